"""Requests to the engine and answers back, as pure ASGI: bytes in, the same bytes out.

`pipe` streams both ways for every path that is not tracked. `forward_call` sends a body that was already
read and edited, and lets an observer listen to the answer. Neither adds, drops or delays a byte of an
answer; when the engine breaks off, the client sees a broken transfer and never an invented end.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine, MutableMapping
from typing import Any, Protocol, TypeAlias

from lifecycle.vocabulary import CallEnd
from proxy.body_edit import cut_engine_ids
from proxy.call_listener import CallListener, CallObserver, ContentHeaders, ForwardOutcome
from proxy.engine_connection import SWITCHING_PROTOCOLS, Headers
from proxy.errors import BodyTooLarge, ClientGone, InvalidRequest, ProxyError, UpstreamBroken, UpstreamError
from proxy.problems import caller_error, send_response
from proxy.request_body import (
    DEFAULT_BODY_LIMIT_BYTES,
    Receive,
    RequestFeed,
    Scope,
    check_framing,
    hang_up,
    has_body,
)
from proxy.sse import EventRewriter
from proxy.tunnel import Tunnel
from proxy.upstream import (
    Upstream,
    UpstreamCredentials,
    UpstreamRequest,
    UpstreamResponse,
    end_to_end,
)

Send: TypeAlias = Callable[[MutableMapping[str, Any]], Awaitable[None]]

_OWN_PREFIX = b"x-kv-"
_NOT_FORWARDED = frozenset({b"host", b"content-length", b"expect"})
_CREDENTIALS = frozenset({b"authorization", b"x-api-key"})
_NO_BODY_STATUSES = (204, 304)
_WEBSOCKET = ((b"connection", b"Upgrade"), (b"upgrade", b"websocket"))

logger = logging.getLogger(__name__)


def request_headers(
    headers: Headers, credentials: UpstreamCredentials, *, keep_length: bool
) -> list[tuple[bytes, bytes]]:
    """The client's headers as the engine gets them: without hop-by-hop ones, ours, and those we answer
    for."""
    return [
        (name, value)
        for name, value in end_to_end(headers)
        if not name.startswith(_OWN_PREFIX)
        and (name not in _NOT_FORWARDED or (keep_length and name == b"content-length"))
        and (credentials.keep or name not in _CREDENTIALS)
    ]


async def pipe(
    scope: Scope,
    receive: Receive,
    send: Send,
    upstream: Upstream,
    *,
    credentials: UpstreamCredentials | None = None,
    limit_bytes: int = DEFAULT_BODY_LIMIT_BYTES,
    tunnel: Tunnel | None = None,
) -> ForwardOutcome:
    """Stream a request through and its answer back. A client that hangs up stops the engine in any phase.

    With a `tunnel` the request is a WebSocket handshake: if the engine grants it, this returns when the
    tunnel has ended; a refusal is an answer like any other.
    """
    try:
        check_framing(scope, limit_bytes)
    except ProxyError as refusal:
        await send_response(
            send, caller_error(refusal, scope["path"]), close=isinstance(refusal, InvalidRequest)
        )
        return ForwardOutcome(CallEnd.FAILED, 0, str(refusal))
    feed = RequestFeed(receive, limit_bytes)
    headers = request_headers(scope["headers"], credentials or UpstreamCredentials(), keep_length=True)
    request = UpstreamRequest(
        method=scope["method"],
        raw_target=raw_target(scope),
        headers=headers if tunnel is None else [*headers, *_WEBSOCKET],
        body=feed.pieces() if has_body(scope) else None,
        on_switch=None if tunnel is None else tunnel.begin,
    )
    exchange = _Exchange(send, upstream, request, tunnel=tunnel)
    return await _race(exchange, feed.pump())


async def forward_call(
    scope: Scope,
    receive: Receive,
    send: Send,
    upstream: Upstream,
    body: bytes,
    *,
    credentials: UpstreamCredentials | None = None,
    response_headers: Callable[[], Headers] | None = None,
    listener: Callable[[], Awaitable[CallObserver | None]] | None = None,
    cut_ids: bool = False,
) -> ForwardOutcome:
    """Send `body` as this request's and relay the answer while somebody listens.

    `listener` is asked who does while the body is on its way; the answer waits for that, nothing before it
    does. `response_headers` is asked once, when the answer's head has come; its headers are appended.
    `cut_ids` takes the token ids that we asked for out of a successful answer (the tap still sees them);
    each event then waits for its end, and the engine is asked not to compress.
    """
    headers = request_headers(scope["headers"], credentials or UpstreamCredentials(), keep_length=False)
    if cut_ids:
        headers = [(name, value) for name, value in headers if name != b"accept-encoding"]
    request = UpstreamRequest(
        method=scope["method"], raw_target=raw_target(scope), headers=headers, body=body
    )
    exchange = _Exchange(send, upstream, request, response_headers, cut_ids)
    return await _race(exchange, hang_up(receive), listener)


def raw_target(scope: Scope) -> bytes:
    """Path and query as the client wrote them."""
    path: bytes = scope.get("raw_path") or scope["path"].encode("utf-8")
    query: bytes = scope["query_string"]
    return path + b"?" + query if query else path


class _Exchange:
    """One request and its answer. `run` raises nothing but cancellation."""

    def __init__(
        self,
        send: Send,
        upstream: Upstream,
        request: UpstreamRequest,
        response_headers: Callable[[], Headers] | None = None,
        cut_ids: bool = False,
        tunnel: Tunnel | None = None,
    ) -> None:
        self.started = False
        self.delivered = False
        self.listener = CallListener()
        self.heard = asyncio.Event()
        """Set when it is known who listens: before that nothing of the answer passes."""
        self._send = send
        self._upstream = upstream
        self._request = request
        self._response_headers = response_headers
        self._cut_ids = cut_ids
        self._tunnel = tunnel

    @property
    def settled(self) -> bool:
        """Whether the client's HTTP exchange is over: answered, or given up for a tunnel."""
        return self.delivered or (self._tunnel is not None and self._tunnel.begun)

    async def run(self) -> None:
        try:
            response = await self._upstream.open(self._request)
        except UpstreamError as error:
            logger.warning("%s: %s", error, error.__cause__)
            await self.heard.wait()
            self.listener.end(CallEnd.FAILED, str(error))
            await self.refuse(error)
            return
        try:
            await self.heard.wait()
            if self._tunnel is not None and response.status == SWITCHING_PROTOCOLS:
                self.listener.head(response.status, ContentHeaders(response.headers))
                await self._tunnel.run()
                self.listener.complete()
            else:
                await self._relay(response)
        except UpstreamBroken as error:
            # Returning without the last body message makes the server break the client's transfer off.
            self.listener.end(CallEnd.FAILED, str(error))
            logger.warning("%s: %s", error, error.__cause__)
        except OSError as error:
            self.listener.end(CallEnd.ABORTED, str(error) or "the client hung up")
        finally:
            response.close()

    async def refuse(self, error: ProxyError) -> None:
        """Answer with an error of our own, before the engine's answer has begun.

        The connection stays open: closing it on a client that is still sending would reset it, and the
        client would never read why. The server discards the rest of the body.
        """
        self.delivered = True
        path = self._request.raw_target.partition(b"?")[0].decode("latin-1")
        await send_response(self._send, caller_error(error, path))

    async def _relay(self, response: UpstreamResponse) -> None:
        content = ContentHeaders(response.headers)
        self.listener.head(response.status, content)
        cutter = self._cutter(response.status, content)
        self.started = True
        await self._send(
            {
                "type": "http.response.start",
                "status": response.status,
                "headers": self._answer_headers(response, resized=cutter is not None),
            }
        )
        ended = response.at_end()
        while not ended:
            piece = await response.read()
            ended = not piece or response.at_end()
            if piece:
                self.listener.heard(piece)
                if cutter is not None:
                    piece = cutter.feed(piece)
            if not ended and piece:
                await self._send({"type": "http.response.body", "body": piece, "more_body": True})
            elif ended:
                await self._finish(piece + (cutter.close() if cutter is not None else b""))
        if not self.delivered:
            await self._finish(b"")

    async def _finish(self, last: bytes) -> None:
        """The last bytes leave, then the end is told: before anything is read that follows from them, for
        this turn of the loop is not over, or, where the client is slow, the next one begins with it."""
        asyncio.get_running_loop().call_soon(self.listener.complete)
        self.delivered = True
        try:
            await self._send({"type": "http.response.body", "body": last, "more_body": False})
        finally:
            self.listener.complete()

    def _answer_headers(self, response: UpstreamResponse, *, resized: bool) -> list[tuple[bytes, bytes]]:
        dropped = resized or response.status in _NO_BODY_STATUSES
        headers = [
            (name, value) for name, value in response.headers if not (dropped and name == b"content-length")
        ]
        if self._response_headers is not None:
            try:
                headers += self._response_headers()
            except Exception:
                logger.exception("no headers of ours on this answer")
        return headers

    def _cutter(self, status: int, content: "ContentHeaders") -> "_Cutter | None":
        if not self._cut_ids or status != 200 or content.encoding not in ("", "identity"):
            return None
        if content.type.startswith("text/event-stream"):
            return EventRewriter(lambda data: cut_engine_ids(data).body)
        return _DocumentCutter()


class _Cutter(Protocol):
    def feed(self, chunk: bytes) -> bytes: ...

    def close(self) -> bytes: ...


class _DocumentCutter:
    """Holds a JSON answer until it is whole."""

    def __init__(self) -> None:
        self._pieces: list[bytes] = []

    def feed(self, chunk: bytes) -> bytes:
        self._pieces.append(chunk)
        return b""

    def close(self) -> bytes:
        return cut_engine_ids(b"".join(self._pieces)).body


async def _race(
    exchange: _Exchange,
    watch: Coroutine[Any, Any, ProxyError],
    listener: Callable[[], Awaitable[CallObserver | None]] | None = None,
) -> ForwardOutcome:
    """Run the exchange until it is over or `watch` says it is pointless; then stop the engine at once."""
    cause: ProxyError = ClientGone("the client hung up")
    try:
        async with asyncio.TaskGroup() as group:
            worker = group.create_task(exchange.run())
            watcher = group.create_task(watch)
            if listener is not None:
                await asyncio.sleep(0)  # the worker's turn: the body leaves
                await _find_listener(exchange.listener, listener)
            exchange.heard.set()
            await asyncio.wait((worker, watcher), return_when=asyncio.FIRST_COMPLETED)
            if watcher.done() and not watcher.cancelled():
                cause = watcher.result()
                # A server reports "disconnect" after a delivered answer as well.
                if not exchange.settled:
                    worker.cancel()
            else:
                watcher.cancel()
    finally:
        exchange.listener.end(CallEnd.ABORTED, str(cause))
    if isinstance(cause, BodyTooLarge) and not exchange.started and not exchange.delivered:
        await exchange.refuse(cause)
    assert exchange.listener.outcome is not None
    return exchange.listener.outcome


async def _find_listener(ears: CallListener, listener: Callable[[], Awaitable[CallObserver | None]]) -> None:
    try:
        ears.observer = await listener()
    except Exception:
        logger.exception("nobody listens to this answer")
