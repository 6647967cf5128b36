"""Load on one address: calls of agents over keep-alive connections, paced or one behind the other.

Agents of 12 turns: a call is the one before it with an answer and a question more, and names its agent. The
bodies of a size are made once, so that making them costs the machine nothing while it measures.
"""

import asyncio
import json
import re
import time
from collections.abc import Iterator
from typing import NamedTuple, cast

from bench.proxy.engine import HOLD, MODEL

API_KEY = "sk-kvtether-bench-0123456789abcdef"
"""LiteLLM does not start without one; it goes with the calls of all."""

TURNS = 12
CALL_SECONDS = 20.0
"""A call that takes longer counts as failed, and ends its connection's part."""

_FIRST_SHARE = 0.86
_TURN_SHARE = 0.02
"""The first call of an agent and what each turn adds, of the size: a body has the size on average."""

_AGENT = "00000000"
_SENT_AT = re.compile(rb"@(\d+)@")
_HEAD_END = b"\r\n\r\n"
_LAST_CHUNK = b"0\r\n\r\n"


class Bodies:
    """The bodies of agents of one size, the number of the agent left open."""

    def __init__(self, size_bytes: int, *, streamed: bool = False, held: bool = False) -> None:
        self._turns = [
            _body(size_bytes, turn, streamed, held).split(_AGENT.encode()) for turn in range(TURNS)
        ]

    def request(self, agent: int, turn: int) -> bytes:
        """The whole request."""
        number = b"%08d" % agent
        before, behind = self._turns[turn]
        return (
            b"POST /v1/chat/completions HTTP/1.1\r\nhost: bench\r\ncontent-type: application/json\r\n"
            b"authorization: Bearer %b\r\nx-kv-session-id: agent-%b\r\ncontent-length: %d\r\n\r\n"
            % (API_KEY.encode(), number, len(before) + len(number) + len(behind))
        ) + b"%b%b%b" % (before, number, behind)


def _body(size_bytes: int, turn: int, streamed: bool, held: bool) -> bytes:
    added = int(size_bytes * _TURN_SHARE)
    messages = [
        {"role": "system", "content": f"You are agent {_AGENT}. {HOLD if held else ''}"},
        {"role": "user", "content": _words(int(size_bytes * _FIRST_SHARE) - 150)},
    ]
    for number in range(turn):
        messages.append({"role": "assistant", "content": "done"})
        messages.append({"role": "user", "content": f"{number} {_words(max(added - 70, 4))}"})
    document: dict[str, object] = {"model": MODEL, "messages": messages}
    if streamed:
        document["stream"] = True
    return json.dumps(document).encode()


def _words(num_bytes: int) -> str:
    text = "the model reads every word of this prompt once and then never again "
    return (text * (num_bytes // len(text) + 1))[:num_bytes]


class Agents:
    """Numbers of agents, none twice in a run: to a proxy that remembers each is somebody new."""

    def __init__(self) -> None:
        self._next = 0

    def calls(self, bodies: Bodies) -> Iterator[bytes]:
        """The requests of one connection, agent after agent, without end."""
        while True:
            self._next += 1
            agent = self._next
            for turn in range(TURNS):
                yield bodies.request(agent, turn)


class CallFailed(Exception):
    """A call was not answered with 200, or not at all."""


class Line(asyncio.Protocol):
    """One connection; calls one at a time."""

    def __init__(self) -> None:
        self._transport: asyncio.Transport | None = None
        self._done: asyncio.Future[None] | None = None
        self._buffer = bytearray()
        self._first: asyncio.Event = asyncio.Event()
        self._awaited = 0
        self._chunked = False
        self._tail = b""
        self._num_scanned = 0
        self.delays_ns: list[int] = []

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def connection_lost(self, exc: Exception | None) -> None:
        self._fail(f"the connection was lost: {exc}")

    def data_received(self, data: bytes) -> None:
        now = time.monotonic_ns()
        if self._chunked:
            self._take_events(data, now)
            return
        self._buffer += data
        if not self._awaited:
            self._read_head(now)
        elif len(self._buffer) >= self._awaited:
            self._finish()

    async def call(self, request: bytes) -> float:
        """Seconds from the first byte out to the last byte in. Raises `CallFailed`."""
        if self._transport is None or self._transport.is_closing():
            raise CallFailed("the connection was lost before the call")
        loop = asyncio.get_running_loop()
        self._done = loop.create_future()
        self._buffer.clear()
        self._awaited = 0
        self._chunked = False
        expiry = loop.call_later(CALL_SECONDS, self._fail, "it took too long")
        began = time.perf_counter()
        self._transport.write(request)
        try:
            await self._done
        finally:
            expiry.cancel()
        return time.perf_counter() - began

    async def hold(self, request: bytes) -> None:
        """Begin a stream; returns when its first event has come."""
        assert self._transport is not None
        self._first.clear()
        self._done = asyncio.get_running_loop().create_future()
        self._transport.write(request)
        async with asyncio.timeout(CALL_SECONDS):
            await self._first.wait()

    def close(self) -> None:
        """Hang up."""
        if self._transport is not None:
            self._done = None
            self._transport.abort()

    def _read_head(self, now: int) -> None:
        end = self._buffer.find(_HEAD_END)
        if end < 0:
            return
        head = bytes(self._buffer[:end]).lower()
        if b" 200 " not in head[:16]:
            self._fail(f"answered {bytes(self._buffer[:200])!r}")
            return
        length = re.search(rb"content-length: *(\d+)", head)
        body = end + len(_HEAD_END)
        if length:
            self._awaited = body + int(length[1])
            if len(self._buffer) >= self._awaited:
                self._finish()
        else:
            self._chunked = True
            self._tail = b""
            rest = bytes(self._buffer[body:])
            if rest:
                self._take_events(rest, now)

    def _take_events(self, data: bytes, now: int) -> None:
        """Events may be cut anywhere; what is left of the last one is kept for the next piece."""
        text = self._tail + data
        position = 0
        for found in _SENT_AT.finditer(text):
            self.delays_ns.append(now - int(found[1]))
            position = found.end()
            self._first.set()
        self._tail = text[position:][-64:]
        if text.endswith(_LAST_CHUNK):
            self._finish()

    def _finish(self) -> None:
        if self._done is not None and not self._done.done():
            self._done.set_result(None)

    def _fail(self, what: str) -> None:
        if self._done is not None and not self._done.done():
            self._done.set_exception(CallFailed(what))
            self._done.exception()
        if self._transport is not None:
            self._transport.abort()


async def connect(port: int) -> Line:
    """A connection to this machine's `port`."""
    _, line = await asyncio.get_running_loop().create_connection(Line, "127.0.0.1", port)
    return line


class Slot(NamedTuple):
    """What one turn of load showed. `seconds` are times of calls; of streams, travel times of events."""

    seconds: list[float]
    num_calls: int
    num_failed: int
    wall_seconds: float
    first_failure: str


async def run_load(
    port: int,
    bodies: Bodies,
    agents: Agents,
    num_connections: int,
    seconds: float,
    rate: float | None = None,
    max_calls: int | None = None,
) -> Slot:
    """Calls over `num_connections` for `seconds`: `rate` a second in all, or as many as there can be."""
    lines = [await connect(port) for _ in range(num_connections)]
    times: list[float] = []
    failures: list[str] = []
    began = time.perf_counter()
    until = began + seconds
    num_calls = 0
    pause = num_connections / rate if rate else 0.0

    async def drive(number: int, line: Line) -> None:
        nonlocal num_calls
        due = began + pause * number / num_connections
        for request in agents.calls(bodies):
            if pause:
                await asyncio.sleep(max(0.0, due - time.perf_counter()))
                due += pause
            if time.perf_counter() >= until or (max_calls is not None and num_calls >= max_calls):
                return
            num_calls += 1
            try:
                times.append(await line.call(request))
            except CallFailed as failure:
                failures.append(str(failure))
                return

    async with asyncio.TaskGroup() as group:
        for number, line in enumerate(lines):
            group.create_task(drive(number, line))
    wall = time.perf_counter() - began
    delays = [delay / 1e9 for line in lines for delay in line.delays_ns]
    for line in lines:
        line.close()
    return Slot(delays or times, num_calls, len(failures), wall, failures[0] if failures else "")


async def run_streams(port: int, bodies: Bodies, agents: Agents, num_connections: int) -> Slot:
    """One stream on each of `num_connections`."""
    lines = [await connect(port) for _ in range(num_connections)]
    failures: list[str] = []
    began = time.perf_counter()

    async def drive(line: Line) -> None:
        try:
            await line.call(next(agents.calls(bodies)))
        except CallFailed as failure:
            failures.append(str(failure))

    async with asyncio.TaskGroup() as group:
        for line in lines:
            group.create_task(drive(line))
    wall = time.perf_counter() - began
    delays = [delay / 1e9 for line in lines for delay in line.delays_ns]
    for line in lines:
        line.close()
    return Slot(delays, num_connections, len(failures), wall, failures[0] if failures else "")
