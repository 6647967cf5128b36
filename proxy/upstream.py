"""The HTTP client of the data path: one request out, one answer back, nothing interpreted on the way.

aiohttp carries it: its per-request cost is about a tenth of httpx's. It is told to keep its hands off: no
decompression, no redirects, no cookies, no headers of its own, the request target as the client wrote it.
"""

import asyncio
from collections.abc import AsyncIterator, Sequence
from types import SimpleNamespace
from typing import Protocol, TypeAlias
from urllib.parse import urlsplit

import aiohttp
import msgspec
from multidict import CIMultiDict
from yarl import URL

from proxy.errors import ConnectFailed, FirstByteTimeout, UpstreamBroken

Headers: TypeAlias = Sequence[tuple[bytes, bytes]]

_INLINE_BODY_BYTES = 512 * 1024
_SLICE_BYTES = 256 * 1024
_MAX_HEADER_BYTES = 256 * 1024
_NO_AUTOMATIC_HEADERS = ("User-Agent", "Accept", "Accept-Encoding", "Content-Type")
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


class UpstreamTimeouts(msgspec.Struct, frozen=True):
    """Seconds. `first_byte` runs from the start of sending to the answer's head, `idle` between two
    reads of its body. There is no total: a long generation is not an error."""

    connect: float = 10.0
    first_byte: float = 3600.0
    idle: float = 600.0


class UpstreamTarget(msgspec.Struct, frozen=True):
    """Where an engine lives. `prefix` is the path that stands before `/v1`, without a trailing slash."""

    scheme: str
    authority: str
    prefix: str = ""

    @classmethod
    def parse(cls, base_url: str) -> "UpstreamTarget":
        """From any of the forms people write: `http://h`, `…/`, `…/v1`, `…/v1/`, `…/x/v1`.

        Raises `ValueError` for what is not an http(s) URL, or carries credentials, a query or a fragment.
        """
        parts = urlsplit(base_url.strip())
        if parts.scheme not in _DEFAULT_PORTS or not parts.hostname:
            raise ValueError(f"not an http(s) URL: {base_url!r}")
        if parts.query or parts.fragment or "@" in parts.netloc:
            raise ValueError(f"an upstream URL is scheme, host and path only: {base_url!r}")
        host = f"[{parts.hostname}]" if ":" in parts.hostname else parts.hostname
        port = parts.port or _DEFAULT_PORTS[parts.scheme]
        prefix = parts.path.rstrip("/").removesuffix("/v1").rstrip("/")
        return cls(parts.scheme, f"{host}:{port}", prefix)

    def url(self, raw_target: bytes) -> URL:
        """The URL of a request target, path and query exactly as given."""
        return URL.build(
            scheme=self.scheme,
            authority=self.authority,
            path=self.prefix + raw_target.decode("latin-1"),
            encoded=True,
        )


class UpstreamCredentials(msgspec.Struct, frozen=True):
    """What the engine gets to see of a caller's key: with `keep`, what the client sent; else `authorization`,
    or nothing."""

    keep: bool = True
    authorization: bytes | None = None


class UpstreamRequest(msgspec.Struct, frozen=True, kw_only=True):
    """One request. `raw_target` is path and query as on the wire. A body given as an iterator is sent
    with the `content-length` among `headers`, or chunked without one; for bytes it is computed."""

    method: str
    raw_target: bytes
    headers: Headers
    body: bytes | AsyncIterator[bytes] | None = None


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


class AiohttpUpstream:
    """An engine behind an aiohttp connection pool. Must be built and closed on the loop that uses it.

    `max_connections` 0 means no cap. Idle connections are dropped after 4 s, before an engine that runs on
    uvicorn drops them after 5: a request written onto a dying connection could not be repeated safely.
    """

    def __init__(
        self,
        target: UpstreamTarget,
        timeouts: UpstreamTimeouts | None = None,
        max_connections: int = 0,
        keepalive_seconds: float = 4.0,
    ) -> None:
        self._target = target
        self._timeouts = timeouts or UpstreamTimeouts()
        trace = aiohttp.TraceConfig()
        trace.on_connection_reuseconn.append(_mark_reused)
        trace.on_request_headers_sent.append(_mark_sent)
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=max_connections, keepalive_timeout=keepalive_seconds),
            cookie_jar=aiohttp.DummyCookieJar(),
            auto_decompress=False,
            skip_auto_headers=_NO_AUTOMATIC_HEADERS,
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=self._timeouts.connect),
            trace_configs=[trace],
            max_line_size=_MAX_HEADER_BYTES,
            max_field_size=_MAX_HEADER_BYTES,
        )
        # aiohttp repeats GET, PUT and DELETE on its own after bytes went out; repeating is decided in `open`.
        self._session._retry_connection = False

    async def open(self, request: UpstreamRequest) -> UpstreamResponse:
        """See `Upstream`. Repeats once when nothing of the request had left: the connection could not be
        made, or a reused one was found dead before the first byte."""
        headers = CIMultiDict([(_text(name), _text(value)) for name, value in request.headers])
        if isinstance(request.body, bytes):
            headers["Content-Length"] = str(len(request.body))
        for attempt in (1, 2):
            trace = SimpleNamespace(reused=False, sent=False)
            try:
                async with asyncio.timeout(self._timeouts.first_byte):
                    answer = await self._session.request(
                        request.method,
                        self._target.url(request.raw_target),
                        headers=headers,
                        data=_payload(request.body),
                        allow_redirects=False,
                        trace_request_ctx=trace,
                    )
            except (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError) as error:
                if attempt == 1 and not isinstance(error, aiohttp.ConnectionTimeoutError):
                    continue
                raise ConnectFailed("cannot connect to the engine") from error
            except (aiohttp.ClientError, OSError) as error:
                if isinstance(error, TimeoutError):
                    raise FirstByteTimeout("the engine sent no answer in time") from error
                if attempt == 1 and trace.reused and not trace.sent:
                    continue
                raise UpstreamBroken("the engine broke the connection before it answered") from error
            return _AiohttpResponse(answer, self._timeouts.idle)
        raise ConnectFailed("cannot connect to the engine")

    async def close(self) -> None:
        """Close every connection."""
        await self._session.close()


class _AiohttpResponse:
    def __init__(self, answer: aiohttp.ClientResponse, idle_seconds: float) -> None:
        self._answer = answer
        self._idle_seconds = idle_seconds
        self._headers = end_to_end(answer.raw_headers)

    @property
    def status(self) -> int:
        return self._answer.status

    @property
    def headers(self) -> Headers:
        return self._headers

    async def read(self) -> bytes:
        try:
            async with asyncio.timeout(self._idle_seconds):
                return await self._answer.content.readany()
        except TimeoutError as error:
            raise UpstreamBroken(f"the engine was silent for {self._idle_seconds:g} s") from error
        except (aiohttp.ClientError, OSError) as error:
            raise UpstreamBroken("the engine broke its answer off") from error

    def at_end(self) -> bool:
        return self._answer.content.at_eof()

    def close(self) -> None:
        if self._answer.content.at_eof():
            self._answer.release()
        else:
            self._answer.close()


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


def _payload(body: bytes | AsyncIterator[bytes] | None) -> bytes | AsyncIterator[bytes] | None:
    if isinstance(body, bytes) and len(body) > _INLINE_BODY_BYTES:
        return _slices(body)
    return body


async def _slices(body: bytes) -> AsyncIterator[bytes]:
    view = memoryview(body)
    for start in range(0, len(body), _SLICE_BYTES):
        yield bytes(view[start : start + _SLICE_BYTES])


def _text(raw: bytes) -> str:
    # aiohttp writes headers as UTF-8: what is valid UTF-8 keeps its bytes that way.
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError:
        return raw.decode("latin-1")


async def _mark_reused(_session: object, context: SimpleNamespace, _params: object) -> None:
    context.trace_request_ctx.reused = True


async def _mark_sent(_session: object, context: SimpleNamespace, _params: object) -> None:
    context.trace_request_ctx.sent = True
