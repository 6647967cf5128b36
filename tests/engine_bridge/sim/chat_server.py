"""A chat endpoint on a real socket that says something else to every call, and notes what it was sent."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

from aiohttp import web


class ChatServer:
    """`heard` are the bodies in the order of their arrival, `said` the answers. `refuses` names the arrivals
    that get an error, `cuts` those whose answer breaks off."""

    def __init__(self) -> None:
        self.base_url = ""
        self.heard: list[dict[str, Any]] = []
        self.said: list[str] = []
        self.refuses: Callable[[int], bool] = lambda number: False
        self.cuts: Callable[[int], bool] = lambda number: False
        self.most_at_once = 0
        self._now = 0

    @asynccontextmanager
    async def serving(self) -> AsyncIterator["ChatServer"]:
        app = web.Application(client_max_size=1 << 26)
        app.router.add_post("/v1/chat/completions", self._answer)
        runner = web.AppRunner(app)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        port = runner.addresses[0][1]
        self.base_url = f"http://127.0.0.1:{port}/v1"
        try:
            yield self
        finally:
            await runner.cleanup()

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        number = len(self.heard)
        self.heard.append(await request.json())
        self.said.append(f"answer {number}")
        self._now += 1
        self.most_at_once = max(self.most_at_once, self._now)
        try:
            if self.refuses(number):
                return web.json_response({"error": {"message": "not now"}}, status=503)
            return await self._stream(request, number)
        finally:
            self._now -= 1

    async def _stream(self, request: web.Request, number: int) -> web.StreamResponse:
        response = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await response.prepare(request)
        deltas: list[dict[str, str]] = [{"role": "assistant", "content": ""}]
        deltas += [{"content": part} for part in ("answer", f" {number}")]
        for delta in deltas:
            await _send(response, {"choices": [{"index": 0, "delta": delta}]})
            await asyncio.sleep(0)
        if self.cuts(number):
            assert request.transport is not None
            request.transport.abort()
            return response
        await _send(response, {"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]})
        usage = {"prompt_tokens": 100 + number, "completion_tokens": 2}
        usage_line = {"choices": [], "usage": {**usage, "prompt_tokens_details": {"cached_tokens": number}}}
        await _send(response, usage_line)
        await response.write(b"data: [DONE]\n\n")
        return response


async def _send(response: web.StreamResponse, piece: dict[str, Any]) -> None:
    await response.write(f"data: {json.dumps(piece)}\n\n".encode())
