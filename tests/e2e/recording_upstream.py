"""A byte pipe before the engine that remembers what passed through it."""

from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from typing import NamedTuple

import aiohttp
from aiohttp import web

HOP_BY_HOP = frozenset(("connection", "keep-alive", "transfer-encoding", "content-length", "host"))


class Exchange(NamedTuple):
    """One request and its answer, as bytes."""

    path: str
    asked: bytes
    answered: bytes


class Recording:
    """What passed. `changes` put other answers in place of the engine's, by path."""

    def __init__(self, target: str, changes: Mapping[str, Callable[[bytes], bytes]]) -> None:
        self.url = ""
        self.exchanges: list[Exchange] = []
        self._target = target
        self._changes = changes

    def of(self, path: str) -> list[Exchange]:
        """Exchanges of one path, in the order in which they ended."""
        return [each for each in self.exchanges if each.path == path]

    async def handle(self, request: web.Request) -> web.StreamResponse:
        body = await request.read()
        headers = {n: v for n, v in request.headers.items() if n.lower() not in HOP_BY_HOP}
        headers["accept-encoding"] = "identity"
        answered = bytearray()
        async with (
            aiohttp.ClientSession(auto_decompress=False) as session,
            session.request(
                request.method, self._target + request.raw_path, data=body, headers=headers
            ) as upstream,
        ):
            kept = {n: v for n, v in upstream.headers.items() if n.lower() not in HOP_BY_HOP}
            response = web.StreamResponse(status=upstream.status, headers=kept)
            change = self._changes.get(request.path)
            if change is not None:
                answered += change(await upstream.read())
                response.content_length = len(answered)
                await response.prepare(request)
                await response.write(bytes(answered))
            else:
                await response.prepare(request)
                async for piece in upstream.content.iter_any():
                    answered += piece
                    await response.write(piece)
            self.exchanges.append(Exchange(request.path, body, bytes(answered)))
            await response.write_eof()
        return response


@asynccontextmanager
async def recording(
    target: str, changes: Mapping[str, Callable[[bytes], bytes]] | None = None
) -> AsyncIterator[Recording]:
    """A running pipe to the engine at `target`."""
    pipe = Recording(target, changes or {})
    app = web.Application(client_max_size=1 << 30)
    app.router.add_route("*", "/{path:.*}", pipe.handle)
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    host, port = runner.addresses[0][:2]
    pipe.url = f"http://{host}:{port}"
    try:
        yield pipe
    finally:
        await runner.cleanup()
