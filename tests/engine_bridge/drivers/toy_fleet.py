"""Engines, a cache server each, and their coordinator, over real HTTP and in one process, as a test tool.

Only what the self-test asks: tokens are code points, chunks are stored under the keys of the real hash.
"""

from array import array
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

from aiohttp import web

from engine_bridge.chunk_keys import chunk_keys
from engine_bridge.engine_address import EngineAddress
from lifecycle.core.ids import split_keys

CHUNK = 4
RANK = 1 << 24 | 1 << 8


async def served(app: web.Application, stack: AsyncExitStack) -> str:
    """The URL of an application that serves until the stack ends."""
    runner = web.AppRunner(app)
    await runner.setup()
    stack.push_async_callback(runner.cleanup)
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    return f"http://127.0.0.1:{runner.addresses[0][1]}"


class ToyNode:
    """An engine that stores on its own cache server, unless it is told otherwise."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.url = ""
        self.root = "/models/m"
        self.version = "0.32.0"
        self.stores = True
        self.honours_limit = True
        self.keys_seen: set[str] = set()
        self.stored: set[str] = set()

    async def answer(self, request: web.Request) -> web.Response:
        self.keys_seen.add(request.headers.get("authorization", ""))
        if request.path == "/version":
            return web.json_response({"version": self.version})
        if request.path == "/v1/models":
            return web.json_response({"data": [{"id": "m", "root": self.root}]})
        body: Any = await request.json() if request.can_read_body else {}
        if request.path == "/tokenize":
            return web.json_response({"tokens": [ord(letter) for letter in body["prompt"]]})
        if request.path == "/v1/completions":
            tokens = body["prompt"]
            limit = body.get("kv_transfer_params", {}).get("lmcache.max_offload_tokens")
            kept = tokens if limit is None or not self.honours_limit else tokens[:limit]
            if self.stores:
                self.stored |= {key.hex() for key in split_keys(chunk_keys(array("I", kept), CHUNK))}
            return web.json_response({})
        return web.Response(status=404)


class ToyFleet:
    """What the coordinator and the cache servers say of the nodes."""

    def __init__(self, nodes: list[ToyNode]) -> None:
        self.nodes = nodes
        self.url = ""

    @property
    def addresses(self) -> list[EngineAddress]:
        return [EngineAddress(node.url, node.name, f"key of {node.name}") for node in self.nodes]

    async def answer(self, request: web.Request) -> web.Response:
        match request.path:
            case "/instances":
                port = request.url.port
                told = [
                    {"instance_id": f"cache-{node.name}", "ip": "127.0.0.1", "http_port": port}
                    for node in self.nodes
                ]
                return web.json_response({"instances": told})
            case "/status":
                contexts = {node.name: {"model_name": node.root, "world_size": 1} for node in self.nodes}
                status = {"chunk_size": CHUNK, "hash_algorithm": "blake3", "cache_context_meta": contexts}
                return web.json_response(status)
            case "/config":
                coordinator = {"event_reporting": True, "event_flush_interval": 0.001}
                return web.json_response({"coordinator": coordinator})
            case "/config/adapters":
                return web.json_response({"adapters": [{"type_name": "fs"}]})
            case "/lmc_version":
                return web.json_response("0.5.6")
            case "/directory/lookup":
                return self.lookup(await request.json())
        return web.Response(status=404)

    def lookup(self, body: dict[str, Any]) -> web.Response:
        named = body.get("keys")
        if named is None:
            keys = split_keys(chunk_keys(array("I", body["token_ids"]), CHUNK))
            named = [
                {"chunk_hash_hex": key.hex(), "model_name": body["model_name"], "kv_rank": RANK}
                for key in keys
            ]
        results = [
            {
                "key": key,
                "placements": [
                    {"instance_id": f"cache-{n.name}", "tier": "l1", "backend": "dram", "size_bytes": 64}
                    for n in self.nodes
                    if key["chunk_hash_hex"] in n.stored and key["model_name"] == n.root
                ],
            }
            for key in named
        ]
        return web.json_response({"results": results, "chunks": len(results)})


@asynccontextmanager
async def toy_fleet(*names: str) -> AsyncIterator[ToyFleet]:
    """A fleet in which everything is in order."""
    async with AsyncExitStack() as stack:
        fleet = ToyFleet([ToyNode(name) for name in names])
        for part in (fleet, *fleet.nodes):
            app = web.Application()
            app.router.add_route("*", "/{rest:.*}", part.answer)
            part.url = await served(app, stack)
        yield fleet
