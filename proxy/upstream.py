"""The HTTP client of the data path: one request out, one answer back, nothing interpreted on the way.

It is our own, a pool over `EngineConnection`: a general client costs more CPU a call than everything else on
the path, and rewrites headers and targets that must arrive as they were sent.
"""

import asyncio
import ssl
from collections import deque
from collections.abc import AsyncIterator, Coroutine
from contextlib import suppress
from typing import Any, Protocol
from urllib.parse import urlsplit
from weakref import WeakSet

import msgspec

from engine_bridge.engine_address import socket_path
from proxy.engine_connection import EngineAnswer, EngineConnection, Headers, OnSwitch
from proxy.errors import ConnectFailed, FirstByteTimeout, InvalidRequest

_DEFAULT_PORTS = {"http": 80, "https": 443}

_HOP_BY_HOP = frozenset(
    {
        b"connection",
        b"keep-alive",
        b"proxy-authenticate",
        b"proxy-authorization",
        b"proxy-connection",
        b"te",
        b"trailer",
        b"transfer-encoding",
        b"upgrade",
    }
)


BUSY_SOCKET_SECONDS = 0.02
"""Pause before a Unix socket whose queue was full is tried again, until the time for connecting is over."""


class UpstreamTimeouts(msgspec.Struct, frozen=True):
    """Seconds. `first_byte` runs from the start of sending to the answer's head, `idle` between two
    reads of its body. There is no total: a long generation is not an error."""

    connect: float = 10.0
    first_byte: float = 3600.0
    idle: float = 600.0


class UpstreamTarget(msgspec.Struct, frozen=True):
    """Where an engine lives. `prefix` is the path that stands before `/v1`, without a trailing slash;
    `socket` the path of the Unix socket that it listens on, empty for a port."""

    scheme: str
    host: str
    port: int
    prefix: str = ""
    socket: str = ""

    @classmethod
    def parse(cls, base_url: str) -> "UpstreamTarget":
        """From any of the forms people write: `http://h`, `…/`, `…/v1`, `…/v1/`, `…/x/v1`, `unix:/a.sock`.

        Raises `ValueError` for what is not an http(s) URL, or carries credentials, a query or a fragment.
        """
        socket = socket_path(base_url)
        if socket:
            return cls("http", "localhost", _DEFAULT_PORTS["http"], socket=socket)
        parts = urlsplit(base_url.strip())
        if parts.scheme not in _DEFAULT_PORTS or not parts.hostname:
            raise ValueError(f"not an http(s) URL: {base_url!r}")
        if parts.query or parts.fragment or "@" in parts.netloc:
            raise ValueError(f"an upstream URL is scheme, host and path only: {base_url!r}")
        prefix = parts.path.rstrip("/").removesuffix("/v1").rstrip("/")
        return cls(parts.scheme, parts.hostname, parts.port or _DEFAULT_PORTS[parts.scheme], prefix)

    @property
    def authority(self) -> str:
        """What the `host` header says: the port only where it is not the scheme's own."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return host if self.port == _DEFAULT_PORTS[self.scheme] else f"{host}:{self.port}"

    def path(self, raw_target: bytes) -> bytes:
        """A request target behind the prefix, path and query exactly as given."""
        return self.prefix.encode("latin-1") + raw_target


class UpstreamCredentials(msgspec.Struct, frozen=True):
    """What is forwarded of a caller's key: with `keep` what the client sent, else nothing."""

    keep: bool = True


class UpstreamRequest(msgspec.Struct, frozen=True, kw_only=True):
    """One request. `raw_target` is path and query as on the wire. A body given as an iterator is sent
    with the `content-length` among `headers`, or chunked without one; for bytes it is computed. With
    `on_switch` (and `connection` and `upgrade` among `headers`) the engine may switch protocols: the answer
    is 101 then, and the connection went to `on_switch` before."""

    method: str
    raw_target: bytes
    headers: Headers
    body: bytes | AsyncIterator[bytes] | None = None
    on_switch: OnSwitch | None = None


class UpstreamResponse(Protocol):
    """The answer: its head at once, its body piece by piece."""

    @property
    def status(self) -> int: ...

    @property
    def headers(self) -> Headers:
        """End-to-end headers, in order, duplicates kept, names in lower case."""
        ...

    async def read(self) -> bytes:
        """The next bytes as they arrived, empty at the end. Raises `UpstreamBroken`."""
        ...

    def at_end(self) -> bool:
        """Whether the body is known to be over."""
        ...

    def close(self) -> None:
        """Let go. A body that is not at its end is given up by closing the connection, which stops the
        engine."""
        ...


class Upstream(Protocol):
    """One engine."""

    async def open(self, request: UpstreamRequest) -> UpstreamResponse:
        """Send the request and wait for the answer's head.

        Cancelling it closes the connection. Raises `ConnectFailed`, `FirstByteTimeout` or `UpstreamBroken`.
        """
        ...

    async def close(self) -> None: ...


class PooledUpstream:
    """An engine behind a pool of connections. Must be built and closed on the loop that uses it.

    As many connections as there are calls. Idle ones are dropped after `keepalive_seconds`, before an engine
    that runs on uvicorn drops them after 5: a request written onto a dying connection could not be repeated
    safely.
    """

    def __init__(
        self,
        target: UpstreamTarget,
        timeouts: UpstreamTimeouts | None = None,
        keepalive_seconds: float = 4.0,
    ) -> None:
        self._target = target
        self._timeouts = timeouts or UpstreamTimeouts()
        self._keepalive_seconds = keepalive_seconds
        self._tls = ssl.create_default_context() if target.scheme == "https" else None
        self._idle: deque[EngineConnection] = deque()
        self._all: WeakSet[EngineConnection] = WeakSet()
        self._sweep: asyncio.TimerHandle | None = None
        self._closed = False

    async def open(self, request: UpstreamRequest) -> UpstreamResponse:
        """See `Upstream`. A connection that cannot be made is tried once more; what went out is never
        repeated."""
        deadline = asyncio.get_running_loop().time() + self._timeouts.first_byte
        connection = self._idle_connection() or await self._connect()
        answer = EngineAnswer(
            connection,
            is_head_request=request.method == "HEAD",
            idle_seconds=self._timeouts.idle,
            on_switch=request.on_switch,
        )
        streamed = None if request.body is None or isinstance(request.body, bytes) else request.body
        sized = any(name == b"content-length" for name, _ in request.headers)
        try:
            connection.begin(
                self._head(request, chunked=streamed is not None and not sized),
                request.body if isinstance(request.body, bytes) else None,
                answer,
            )
            if streamed is not None:
                sending = connection.stream(streamed, chunked=not sized)
                answer.sending = asyncio.get_running_loop().create_task(_quietly(sending))
            async with asyncio.timeout_at(deadline):
                await answer.head
        except TimeoutError as error:
            answer.close()
            raise FirstByteTimeout("the engine sent no answer in time") from error
        except BaseException:
            answer.close()
            raise
        return _EndToEnd(answer)

    async def close(self) -> None:
        """Close every connection."""
        self._closed = True
        if self._sweep is not None:
            self._sweep.cancel()
        for connection in list(self._all):
            connection.close()

    def _idle_connection(self) -> EngineConnection | None:
        """The one used last that is still open: the longer one rests, the likelier the engine closes it."""
        while self._idle:
            connection = self._idle.pop()
            if connection.is_open and not self._is_stale(connection):
                return connection
            connection.close()
        return None

    async def _connect(self) -> EngineConnection:
        for attempt in (1, 2):
            try:
                async with asyncio.timeout(self._timeouts.connect):
                    connection = await self._connection()
            except TimeoutError as error:
                raise ConnectFailed("cannot connect to the engine") from error
            except OSError as error:
                if attempt == 2:
                    raise ConnectFailed("cannot connect to the engine") from error
            else:
                self._all.add(connection)
                return connection
        raise ConnectFailed("cannot connect to the engine")

    async def _connection(self) -> EngineConnection:
        loop, target = asyncio.get_running_loop(), self._target
        if target.socket:
            connection = await self._socket_connection(target.socket)
        else:
            _, connection = await loop.create_connection(self._new, target.host, target.port, ssl=self._tls)
        return connection

    async def _socket_connection(self, path: str) -> EngineConnection:
        while True:
            try:
                _, connection = await asyncio.get_running_loop().create_unix_connection(self._new, path)
            except BlockingIOError:
                # As many wait to be accepted as may. With TCP the kernel would ask again.
                await asyncio.sleep(BUSY_SOCKET_SECONDS)
            else:
                return connection

    def _new(self) -> EngineConnection:
        return EngineConnection(self._released)

    def _released(self, connection: EngineConnection) -> None:
        if self._closed:
            connection.close()
            return
        loop = asyncio.get_running_loop()
        connection.idle_since = loop.time()
        self._idle.append(connection)
        if self._sweep is None:
            self._sweep = loop.call_later(self._keepalive_seconds, self._drop_stale)

    def _drop_stale(self) -> None:
        self._sweep = None
        while self._idle and (not self._idle[0].is_open or self._is_stale(self._idle[0])):
            self._idle.popleft().close()
        if self._idle:
            loop = asyncio.get_running_loop()
            due = self._idle[0].idle_since + self._keepalive_seconds
            self._sweep = loop.call_at(due, self._drop_stale)

    def _is_stale(self, connection: EngineConnection) -> bool:
        rested = asyncio.get_running_loop().time() - connection.idle_since
        return rested >= self._keepalive_seconds

    def _head(self, request: UpstreamRequest, *, chunked: bool) -> bytes:
        """The request's head. Raises `InvalidRequest` for a line break where none may be."""
        lines = [
            b"%b %b HTTP/1.1" % (request.method.encode("latin-1"), self._target.path(request.raw_target)),
            b"host: " + self._target.authority.encode("latin-1"),
            *(b"%b: %b" % header for header in request.headers),
        ]
        if isinstance(request.body, bytes):
            lines.append(b"content-length: %d" % len(request.body))
        elif chunked:
            lines.append(b"transfer-encoding: chunked")
        head = b"\r\n".join(lines)
        if head.count(b"\n") != len(lines) - 1 or head.count(b"\r") != len(lines) - 1:
            raise InvalidRequest("a header of the request has a line break in it")
        return head + b"\r\n\r\n"


class _EndToEnd:
    """An answer without what concerned only our connection with the engine."""

    def __init__(self, answer: EngineAnswer) -> None:
        self.status = answer.status
        self.headers: Headers = end_to_end(answer.headers)
        self.read = answer.read
        self.at_end = answer.at_end
        self.close = answer.close


async def _quietly(sending: Coroutine[Any, Any, None]) -> None:
    """What goes wrong with the sending shows in the answer, or in its absence."""
    with suppress(OSError):
        await sending


def end_to_end(headers: Headers) -> list[tuple[bytes, bytes]]:
    """Headers without the hop-by-hop ones and those that `Connection` names; names in lower case."""
    lowered = [(name.lower(), value) for name, value in headers]
    named = {
        token.strip().lower()
        for name, value in lowered
        if name == b"connection"
        for token in value.split(b",")
    }
    return [(name, value) for name, value in lowered if name not in _HOP_BY_HOP and name not in named]
