"""Two cache servers and their coordinator over real HTTP, as a test tool."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from aiohttp import web

from engine_bridge.drivers.lmcache_client import LmcacheClient
from engine_bridge.drivers.lmcache_keys import Layout
from engine_bridge.drivers.lmcache_reclaim import Target

KEYS = [bytes([n]) * 32 for n in range(5)]
TARGET = Target("m", "", Layout(world_sizes=frozenset({1}), object_groups=frozenset({0})))


class Node:
    """One cache server of several: what it holds, and whether it answers."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.l1: set[str] = set()
        self.l2: set[str] = set()
        self.port = 0
        self.runner: web.AppRunner | None = None

    async def answer(self, request: web.Request) -> web.Response:
        if request.path == "/config/adapters":
            return web.json_response({"adapters": [{"type_name": "fs"}]})
        body: Any = await request.json()
        names = {each["chunk_hash_hex"] for each in body["keys"]}
        held = self.l1 if body["tier"] == "l1" else self.l2
        held -= names
        return web.json_response({"deleted": len(names), "skipped": 0, "ok": True})

    async def start(self) -> None:
        app = web.Application()
        app.router.add_route("*", "/{rest:.*}", self.answer)
        self.runner = web.AppRunner(app)
        await self.runner.setup()
        await web.TCPSite(self.runner, "127.0.0.1", self.port).start()
        self.port = self.runner.addresses[0][1]

    async def stop(self) -> None:
        if self.runner is not None:
            await self.runner.cleanup()
            self.runner = None


class Pair:
    """Two cache servers under one coordinator, which shows what they hold, except from the `untold`."""

    def __init__(self) -> None:
        self.nodes = [Node("one"), Node("two")]
        self.registered = ["one", "two"]
        self.asked = 0
        self.untold: set[str] = set()

    async def answer(self, request: web.Request) -> web.Response:
        if request.path == "/instances":
            self.asked += 1
            told = [
                {"instance_id": n.name, "ip": "127.0.0.1", "http_port": n.port}
                for n in self.nodes
                if n.name in self.registered
            ]
            return web.json_response({"instances": told})
        if request.path == "/directory/lookup":
            body: Any = await request.json()
            return web.json_response({"results": [self.found(each) for each in body["keys"]]})
        return web.Response(status=404)

    def found(self, key: dict[str, Any]) -> dict[str, Any]:
        name = key["chunk_hash_hex"]
        places = [
            {"instance_id": node.name, "tier": tier, "backend": "fs", "size_bytes": 1}
            for node in self.nodes
            for tier, held in (("l1", node.l1), ("l2", node.l2))
            if name in held
            and node.name not in self.untold
            and (tier == "l2" or node.name in self.registered)
        ]
        return {"key": key, "placements": places}


@asynccontextmanager
async def pair() -> AsyncIterator[tuple[Pair, Node, Node, LmcacheClient]]:
    fleet = Pair()
    app = web.Application()
    app.router.add_route("*", "/{rest:.*}", fleet.answer)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    for node in fleet.nodes:
        node.l1, node.l2 = {key.hex() for key in KEYS}, {key.hex() for key in KEYS}
        await node.start()
    client = LmcacheClient(f"http://127.0.0.1:{runner.addresses[0][1]}")
    yield fleet, *fleet.nodes, client
    await client.close()
    for node in fleet.nodes:
        await node.stop()
    await runner.cleanup()
