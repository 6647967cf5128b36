"""An engine that says exactly what a test wants, byte by byte, over real sockets.

A script is a coroutine over one `Exchange`: it reads the request, writes whatever bytes it likes and may
wait, cut the connection or go silent. When the peer hangs up, the script is cancelled and
`Exchange.hung_up` is set.
"""

import asyncio
import json
import socket
import struct
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, TypeAlias

Header: TypeAlias = tuple[bytes, bytes]


class PeerGone(Exception):
    """The peer closed the connection in the middle of its request."""


@dataclass
class Exchange:
    """One request that arrived, and the wire to answer on. Header names stand as they were sent."""

    method: str
    target: bytes
    headers: list[Header]
    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    connection_number: int
    body: bytes = b""
    keep_alive: bool = True
    body_read: asyncio.Event = field(default_factory=asyncio.Event)
    hung_up: asyncio.Event = field(default_factory=asyncio.Event)

    def header(self, name: bytes) -> list[bytes]:
        """Every value of a header, whatever its case."""
        return [value for key, value in self.headers if key.lower() == name]

    def json(self) -> Any:
        return json.loads(self.body)

    async def read_body(self) -> bytes:
        """The request's body, chunked or sized. Raises `PeerGone`."""
        try:
            if self.header(b"transfer-encoding"):
                pieces = []
                while size := int((await self.reader.readline()).split(b";")[0], 16):
                    pieces.append(await self.reader.readexactly(size))
                    await self.reader.readexactly(2)
                await self.reader.readline()
                self.body = b"".join(pieces)
            else:
                length = int((self.header(b"content-length") or [b"0"])[0])
                self.body = await self.reader.readexactly(length)
        except (asyncio.IncompleteReadError, ConnectionError, ValueError) as error:
            self.hung_up.set()
            raise PeerGone from error
        self.body_read.set()
        return self.body

    async def write(self, data: bytes) -> None:
        self.writer.write(data)
        await self.writer.drain()

    async def head(self, status: int, headers: Iterable[Header] = ()) -> None:
        """Status line and headers, nothing added."""
        lines = [b"HTTP/1.1 %d Scripted" % status, *(name + b": " + value for name, value in headers)]
        await self.write(b"\r\n".join(lines) + b"\r\n\r\n")

    async def respond(self, status: int, body: bytes = b"", headers: Iterable[Header] = ()) -> None:
        """A whole answer with a length."""
        await self.head(status, [*headers, (b"Content-Length", b"%d" % len(body))])
        await self.write(body)

    async def respond_json(self, document: object, status: int = 200, headers: Iterable[Header] = ()) -> None:
        body = json.dumps(document).encode()
        await self.respond(status, body, [(b"Content-Type", b"application/json"), *headers])

    async def start_stream(self, headers: Iterable[Header] = ()) -> None:
        """The head of a chunked event stream."""
        head = [(b"Content-Type", b"text/event-stream; charset=utf-8"), (b"Transfer-Encoding", b"chunked")]
        await self.head(200, [*head, *headers])

    async def chunk(self, data: bytes) -> None:
        if data:
            await self.write(b"%x\r\n%b\r\n" % (len(data), data))

    async def end_stream(self) -> None:
        await self.write(b"0\r\n\r\n")

    def cut(self) -> None:
        """Close without finishing."""
        self.keep_alive = False
        self.writer.close()

    def reset(self) -> None:
        """Drop the connection with a TCP reset."""
        self.keep_alive = False
        sock: socket.socket = self.writer.get_extra_info("socket")
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.writer.transport.abort()


Script: TypeAlias = Callable[[Exchange], Awaitable[None]]


class ScriptedUpstream:
    """A server on a free loopback port, or on a Unix `socket`; use it as an async context manager.

    `arrived` gives every exchange as soon as its head was read, in order.
    """

    def __init__(self, script: Script, socket: Path | None = None) -> None:
        self.script = script
        self._socket = socket
        self.exchanges: list[Exchange] = []
        self.num_connections = 0
        self._arrivals: asyncio.Queue[Exchange] = asyncio.Queue()
        self._server: asyncio.Server | None = None
        self._connections: set[asyncio.Task[None]] = set()
        self._writers: set[asyncio.StreamWriter] = set()

    @property
    def port(self) -> int:
        assert self._server is not None
        port: int = self._server.sockets[0].getsockname()[1]
        return port

    @property
    def url(self) -> str:
        return f"unix:{self._socket}" if self._socket else f"http://127.0.0.1:{self.port}"

    async def arrived(self) -> Exchange:
        """The next exchange that nobody has asked for yet."""
        return await asyncio.wait_for(self._arrivals.get(), 10)

    async def __aenter__(self) -> "ScriptedUpstream":
        if self._socket:
            self._server = await asyncio.start_unix_server(self._serve, self._socket, limit=2**20)
        else:
            self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0, limit=2**20)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._server is not None
        self._server.close()
        for task in self._connections:
            task.cancel()
        await asyncio.gather(*self._connections, return_exceptions=True)
        for writer in self._writers:
            # What nobody reads any more would keep it open.
            writer.transport.abort()
        await self._server.wait_closed()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._connections.add(task)
        self._writers.add(writer)
        self.num_connections += 1
        number = self.num_connections
        pending = b""
        try:
            while True:
                head = pending + await reader.readuntil(b"\r\n\r\n")
                exchange = self._parse(head, reader, writer, number)
                self.exchanges.append(exchange)
                self._arrivals.put_nowait(exchange)
                pending = await self._run(exchange)
                if not exchange.keep_alive or exchange.hung_up.is_set():
                    break
        except (asyncio.IncompleteReadError, ConnectionError, PeerGone, asyncio.CancelledError):
            pass
        finally:
            writer.close()
            self._connections.discard(task)

    async def _run(self, exchange: Exchange) -> bytes:
        """Run the script and watch the peer; returns a byte of the next request that the watch caught."""
        script = asyncio.ensure_future(self._follow(exchange))
        watch = asyncio.ensure_future(self._watch(exchange))
        try:
            await asyncio.wait((script, watch), return_when=asyncio.FIRST_COMPLETED)
            if watch.done() and exchange.hung_up.is_set():
                script.cancel()
            await asyncio.gather(script, return_exceptions=True)
            if not script.cancelled() and (error := script.exception()) is not None:
                raise error
            return watch.result() if watch.done() else b""
        finally:
            script.cancel()
            watch.cancel()
            await asyncio.gather(script, watch, return_exceptions=True)

    async def _follow(self, exchange: Exchange) -> None:
        await self.script(exchange)

    async def _watch(self, exchange: Exchange) -> bytes:
        await exchange.body_read.wait()
        try:
            caught = await exchange.reader.read(1)
        except ConnectionError:
            caught = b""
        if not caught:
            exchange.hung_up.set()
        return caught

    @staticmethod
    def _parse(
        head: bytes, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, number: int
    ) -> Exchange:
        request_line, *lines = head.removesuffix(b"\r\n\r\n").split(b"\r\n")
        method, target, _ = request_line.split(b" ")
        headers = [(name, value.strip()) for name, _, value in (line.partition(b":") for line in lines)]
        return Exchange(method.decode(), target, headers, reader, writer, number)


def sse(document: object) -> bytes:
    """One event, as vLLM writes it."""
    return b"data: " + json.dumps(document, ensure_ascii=False).encode() + b"\n\n"


DONE = b"data: [DONE]\n\n"


def chat_chunks(
    pieces: Iterable[str], *, finish_reason: str = "stop", prompt_tokens: int = 7, cached_tokens: int = 0
) -> list[bytes]:
    """The events of a streamed chat answer: role, one delta a piece, finish, usage, `[DONE]`."""
    base = {"id": "chatcmpl-1", "object": "chat.completion.chunk", "created": 1, "model": "m"}
    deltas: list[dict[str, Any]] = [{"role": "assistant", "content": ""}]
    deltas += [{"content": piece} for piece in pieces]
    events = [sse({**base, "choices": [{"index": 0, "delta": d, "finish_reason": None}]}) for d in deltas]
    last = {"index": 0, "delta": {}, "finish_reason": finish_reason}
    usage = {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": len(deltas) - 1,
        "total_tokens": prompt_tokens + len(deltas) - 1,
        "prompt_tokens_details": {"cached_tokens": cached_tokens},
    }
    return [*events, sse({**base, "choices": [last]}), sse({**base, "choices": [], "usage": usage}), DONE]


def chat_answer(text: str, *, prompt_tokens: int = 7, cached_tokens: int = 0) -> dict[str, Any]:
    """A whole chat answer."""
    return {
        "id": "chatcmpl-1",
        "object": "chat.completion",
        "created": 1,
        "model": "m",
        "choices": [{"index": 0, "message": {"role": "assistant", "content": text}, "finish_reason": "stop"}],
        "usage": {
            "prompt_tokens": prompt_tokens,
            "completion_tokens": 3,
            "total_tokens": prompt_tokens + 3,
            "prompt_tokens_details": {"cached_tokens": cached_tokens},
        },
    }


async def openai_like(exchange: Exchange) -> None:
    """A script that answers chat completions, streamed or not, and lists one model."""
    await exchange.read_body()
    path = exchange.target.split(b"?")[0]
    if path == b"/v1/chat/completions" and exchange.json().get("stream"):
        await exchange.start_stream()
        for event in chat_chunks(["Hel", "lo"]):
            await exchange.chunk(event)
        await exchange.end_stream()
    elif path == b"/v1/chat/completions":
        await exchange.respond_json(chat_answer("Hello"))
    elif path == b"/v1/models":
        await exchange.respond_json({"object": "list", "data": [{"id": "m", "object": "model"}]})
    else:
        await exchange.respond_json({"object": "error", "message": "Not Found", "code": 404}, 404)
