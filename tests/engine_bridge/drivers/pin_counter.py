"""LMCache's coordinator as far as it counts pins, over HTTP, as a test tool."""

from array import array
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from aiohttp import web

from engine_bridge.chunk_keys import chunk_keys
from engine_bridge.drivers.lmcache_keys import pack_kv_rank
from lifecycle.core.ids import split_keys

CHUNK = 4


class PinCounter:
    """Counts by chunk key, one rank. `failing` answers 503; if `too_late`, behind the request's effect."""

    def __init__(self) -> None:
        self.url = ""
        self.counts: Counter[bytes] = Counter()
        self.failing = False
        self.too_late = False

    async def answer(self, request: web.Request) -> web.Response:
        if self.failing and not self.too_late:
            return web.Response(status=503)
        if request.method == "GET":
            pins = [{"key": _object(key), "pin_count": count} for key, count in (+self.counts).items()]
            return web.json_response({"total": len(pins), "pins": pins})
        keys = split_keys(chunk_keys(array("I", (await request.json())["token_ids"]), CHUNK))
        for key in keys:
            change = 1 if request.method == "POST" else -1
            self.counts[key] = max(0, self.counts[key] + change)
        return web.Response(status=503) if self.failing else web.json_response({})


def _object(key: bytes) -> dict[str, object]:
    return {
        "chunk_hash_hex": key.hex(),
        "model_name": "m",
        "kv_rank": pack_kv_rank(1, 0),
        "object_group_id": 0,
        "cache_salt": "",
    }


@asynccontextmanager
async def pin_counter() -> AsyncIterator[PinCounter]:
    """A coordinator on a free port."""
    counter = PinCounter()
    app = web.Application()
    app.router.add_route("*", "/cache/pins", counter.answer)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    counter.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    try:
        yield counter
    finally:
        await runner.cleanup()
