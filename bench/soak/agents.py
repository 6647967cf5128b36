"""The clients of the soak: agents that behave and agents that do not, and what they may expect."""

import asyncio
import contextlib
import json
import random
import socket
import struct
from collections import Counter
from enum import StrEnum
from typing import Any

from bench.soak.answers import DIGEST_HEADER, NUMBER_HEADER, answer
from bench.soak.engine import DAMAGED_STATUS, digest

CALL_SECONDS = 60.0
TURNS = (1, 6)


class Manner(StrEnum):
    """How a client treats its call."""

    POLITE = "read to the end"
    SLOW = "read slowly"
    HANGS_UP = "hung up"
    RESETS = "reset"
    HANGS_UP_EARLY = "hung up before the answer"


MANNERS = (
    *(Manner.POLITE,) * 12,
    *(Manner.SLOW,) * 2,
    Manner.HANGS_UP,
    Manner.RESETS,
    Manner.HANGS_UP_EARLY,
)


class Ledger:
    """What the clients saw. `completed` are calls whose whole answer was read: the log must know them."""

    def __init__(self) -> None:
        self.completed: set[str] = set()
        self.counts: Counter[str] = Counter()
        self.wrong: list[str] = []
        self.surprises: Counter[str] = Counter()

    def wrong_byte(self, what: str) -> None:
        """Remember the first ones."""
        self.counts["wrong answers"] += 1
        if len(self.wrong) < 5:
            self.wrong.append(what)


class Fleet:
    """Agents one behind the other in a number of lanes, until told to stop."""

    def __init__(self, port: int, ledger: Ledger, name: str, seed: int) -> None:
        self._port = port
        self._ledger = ledger
        self._name = name
        self._chance = random.Random(seed)
        self._num_calls = 0
        self._num_contexts = 0
        self.hung_up_early: set[str] = set()
        """Contexts a call of which may have reached the proxy behind the word that they are closed."""
        self.stopping = asyncio.Event()

    async def run(self, num_lanes: int, pause_seconds: float) -> None:
        """Until `stopping` is set, and then until the last agent has closed its context."""
        async with asyncio.TaskGroup() as group:
            for _ in range(num_lanes):
                group.create_task(self._lane(pause_seconds))

    async def _lane(self, pause_seconds: float) -> None:
        while not self.stopping.is_set():
            await self._agent(pause_seconds)

    async def _agent(self, pause_seconds: float) -> None:
        self._num_contexts += 1
        context = f"{self._name}-{self._num_contexts}"
        chance = self._chance
        size = chance.choice((200, 1_000, 1_000, 4_000, 90_000))
        words = ("word " * (size // 5 + 1))[:size]
        messages = [
            {"role": "system", "content": "You are an agent of the soak. Rule after rule. " * 3},
            {"role": "user", "content": f"{context}: {words}"},
        ]
        one_off = chance.random() < 0.1
        turns = 1 if one_off else chance.randint(*TURNS)
        for turn in range(turns):
            fields = [f'ctx="{context}"']
            if one_off:
                fields.append("one_off")
            elif chance.random() < 0.15:
                fields.append('pin=("system";ttl=20)')
            if chance.random() < 0.5 and turn == turns - 1:
                fields.append("close")
            text = await self._call(context, messages, fields)
            messages = [*messages, {"role": "assistant", "content": text or "lost"}]
            messages.append({"role": "user", "content": f"turn {turn}"})
            await asyncio.sleep(chance.random() * 2 * pause_seconds)
        await self._close(context)

    async def close_again(self, contexts: list[str]) -> None:
        """Close those of them that an early hang-up may have opened again."""
        for context in contexts:
            if context in self.hung_up_early:
                self._ledger.counts["contexts closed again, opened by a call that its client gave up"] += 1
                await self._close(context, "again")

    async def _call(self, context: str, messages: list[dict[str, str]], fields: list[str]) -> str:
        """One call in one manner; what was said, if it was read to the end."""
        self._num_calls += 1
        number = self._num_calls
        call = f"{self._name}-call-{number}"
        streamed = self._chance.random() < 0.5
        manner = self._chance.choice(MANNERS)
        if manner is Manner.HANGS_UP_EARLY:
            self.hung_up_early.add(context)
        document = {"model": "toy", "messages": messages, "stream": streamed}
        headers = {
            "x-kv-lifecycle": ", ".join([*fields, f'call="{call}"']),
            NUMBER_HEADER: str(number),
            DIGEST_HEADER: digest(document),
        }
        expected = answer(number, streamed)
        try:
            async with asyncio.timeout(CALL_SECONDS):
                status, body, whole = await self._exchange(json.dumps(document).encode(), headers, manner)
        except TimeoutError:
            self._ledger.surprises[f"no answer within {CALL_SECONDS:g} s"] += 1
            return ""
        except OSError as error:
            self._ledger.surprises[f"{manner}: {type(error).__name__}"] += 1
            return ""
        self._ledger.counts[f"calls {manner}"] += 1
        if status == 200:
            if not expected.body.startswith(body) or (whole and (body != expected.body or expected.breaks)):
                self._ledger.wrong_byte(f"call {number} ({manner}): {body[:60]!r}, {len(body)} bytes")
            if whole:
                self._ledger.completed.add(call)
                return "said"
            if manner in (Manner.POLITE, Manner.SLOW):
                self._ledger.counts["answers broken off"] += 1
        elif status == DAMAGED_STATUS:
            self._ledger.wrong_byte(f"call {number}: the request was damaged on its way")
        elif status:
            self._ledger.counts[f"answered {status}"] += 1
        return ""

    async def _exchange(
        self, body: bytes, headers: dict[str, str], manner: Manner
    ) -> tuple[int, bytes, bool]:
        """Status, the body as far as it was read, and whether it came to its end as HTTP says."""
        reader, writer = await asyncio.open_connection("127.0.0.1", self._port, limit=2**16)
        try:
            lines = [f"{name}: {value}" for name, value in headers.items()]
            head = "\r\n".join(["POST /v1/chat/completions HTTP/1.1", "host: soak", *lines])
            writer.write(f"{head}\r\ncontent-length: {len(body)}\r\n\r\n".encode() + body)
            await writer.drain()
            if manner is Manner.HANGS_UP_EARLY:
                await asyncio.sleep(self._chance.random() * 0.01)
                return 0, b"", False
            return await self._read(reader, writer, manner)
        except (asyncio.IncompleteReadError, ConnectionError):
            return 0, b"", False
        finally:
            writer.close()

    async def _read(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, manner: Manner
    ) -> tuple[int, bytes, bool]:
        head = (await reader.readuntil(b"\r\n\r\n")).lower()
        status = int(head.split(b" ")[1])
        body = bytearray()
        patience = self._chance.randrange(1, 4)
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            async for piece in _pieces(reader, head):
                body += piece
                patience -= 1
                if manner is Manner.SLOW:
                    await asyncio.sleep(0.01)
                elif patience <= 0 and manner in (Manner.HANGS_UP, Manner.RESETS):
                    if manner is Manner.RESETS:
                        linger = struct.pack("ii", 1, 0)
                        writer.get_extra_info("socket").setsockopt(
                            socket.SOL_SOCKET, socket.SO_LINGER, linger
                        )
                    return status, bytes(body), False
            return status, bytes(body), True
        return status, bytes(body), False

    async def _close(self, context: str, source: str = "end") -> None:
        """Close it by an operation, again until it is taken: the log may be away."""
        document = {"source": f"{context}-{source}", "ops": [{"op": "close", "seq": 1, "ctx": context}]}
        body = json.dumps(document).encode()
        for _ in range(120):
            with contextlib.suppress(OSError, asyncio.IncompleteReadError, ValueError):
                status, verdict = await self._post("/kv/v1/ops", body)
                result = verdict["results"][0] if status == 200 else {"status": "refused", "retry_after": 1}
                if result["status"] in ("applied", "duplicate") or "retry_after" not in result:
                    self._ledger.counts[f"close {result['status']}"] += 1
                    return
            await asyncio.sleep(1.0)
        self._ledger.surprises["a context could not be closed"] += 1

    async def _post(self, path: str, body: bytes) -> tuple[int, dict[str, Any]]:
        reader, writer = await asyncio.open_connection("127.0.0.1", self._port)
        try:
            writer.write(
                f"POST {path} HTTP/1.1\r\nhost: soak\r\ncontent-length: {len(body)}\r\n\r\n".encode() + body
            )
            head = (await reader.readuntil(b"\r\n\r\n")).lower()
            text = b"".join([piece async for piece in _pieces(reader, head)])
            return int(head.split(b" ")[1]), json.loads(text)
        finally:
            writer.close()


async def _pieces(reader: asyncio.StreamReader, head: bytes) -> Any:
    """The body's bytes as they come, until HTTP says that it is over."""
    if b"transfer-encoding: chunked" in head:
        while size := int((await reader.readuntil(b"\r\n")).strip(), 16):
            yield await reader.readexactly(size)
            await reader.readexactly(2)
        await reader.readexactly(2)
        return
    length = next(
        int(line.split(b":")[1]) for line in head.split(b"\r\n") if line.startswith(b"content-length")
    )
    while length:
        piece = await reader.read(min(length, 65_536))
        if not piece:
            raise asyncio.IncompleteReadError(b"", length)
        length -= len(piece)
        yield piece
