"""The request's body on its way from the client, whole or streamed, and the watch for a hang-up behind it."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, MutableMapping
from typing import Any, TypeAlias

from proxy.errors import BodyTooLarge, ClientGone, InvalidRequest, ProxyError

Scope: TypeAlias = MutableMapping[str, Any]
Receive: TypeAlias = Callable[[], Awaitable[MutableMapping[str, Any]]]

DEFAULT_BODY_LIMIT_BYTES = 512 * 1024 * 1024
_QUEUED_PIECES = 16


async def read_body(scope: Scope, receive: Receive, limit_bytes: int = DEFAULT_BODY_LIMIT_BYTES) -> bytes:
    """The whole request body. Raises `BodyTooLarge`, `InvalidRequest` (contradicting framing),
    `ClientGone`."""
    check_framing(scope, limit_bytes)
    pieces: list[bytes] = []
    size = 0
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientGone("the client hung up while it sent its request")
        piece = message.get("body", b"")
        size += len(piece)
        if size > limit_bytes:
            raise _too_large(limit_bytes)
        pieces.append(piece)
        if not message.get("more_body", False):
            return b"".join(pieces)


class RequestFeed:
    """The request's body on its way from the client to the engine, and the watch for a hang-up behind it."""

    def __init__(self, receive: Receive, limit_bytes: int) -> None:
        self._receive = receive
        self._limit_bytes = limit_bytes
        self._queue: asyncio.Queue[bytes | None] = asyncio.Queue(_QUEUED_PIECES)

    async def pump(self) -> ProxyError:
        """Read until the client is gone or has sent too much; returns which."""
        size = 0
        more = True
        while more:
            message = await self._receive()
            if message["type"] == "http.disconnect":
                return ClientGone("the client hung up")
            piece = message.get("body", b"")
            size += len(piece)
            if size > self._limit_bytes:
                return _too_large(self._limit_bytes)
            if piece:
                await self._queue.put(piece)
            more = message.get("more_body", False)
        await self._queue.put(None)
        return await hang_up(self._receive)

    async def pieces(self) -> AsyncIterator[bytes]:
        while (piece := await self._queue.get()) is not None:
            yield piece


async def hang_up(receive: Receive) -> ProxyError:
    while (await receive())["type"] != "http.disconnect":
        pass
    return ClientGone("the client hung up")


def check_framing(scope: Scope, limit_bytes: int) -> None:
    """Raises `InvalidRequest` for framing that two readers may understand differently, or that ends here with
    the coding of the body lost; `BodyTooLarge` for a declared length."""
    lengths = {value for name, value in scope["headers"] if name == b"content-length"}
    codings = [value.strip().lower() for name, value in scope["headers"] if name == b"transfer-encoding"]
    if codings not in ([], [b"chunked"]):
        raise InvalidRequest("no transfer coding but chunked is understood")
    if len(lengths) > 1 or (lengths and codings):
        raise InvalidRequest("content-length contradicts the rest of the request's framing")
    for length in lengths:
        if length.isdigit() and int(length) > limit_bytes:
            raise _too_large(limit_bytes)


def has_body(scope: Scope) -> bool:
    return any(
        name == b"transfer-encoding" or (name == b"content-length" and value.strip() != b"0")
        for name, value in scope["headers"]
    )


def _too_large(limit_bytes: int) -> BodyTooLarge:
    return BodyTooLarge(f"the request body is larger than {limit_bytes} bytes")
