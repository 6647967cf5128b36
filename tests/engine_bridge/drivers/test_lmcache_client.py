"""How the client reads replies and tells trouble apart, against a small real HTTP server."""

from collections.abc import AsyncIterator, Awaitable, Callable

import pytest
from aiohttp import web

from engine_bridge.drivers.lmcache_client import Instance, LmcacheClient
from engine_bridge.drivers.lmcache_keys import ObjectKey
from engine_bridge.errors import CacheUnavailable
from lifecycle.vocabulary import Tier

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
MODEL = "org/model & more"


@pytest.fixture
async def client() -> AsyncIterator[tuple[LmcacheClient, dict[str, Handler], Instance]]:
    """A client, the table its server answers from (path to handler, any method), and the server's address."""
    table: dict[str, Handler] = {}

    async def answer(request: web.Request) -> web.StreamResponse:
        handler = table.get(request.path)
        return web.Response(status=404) if handler is None else await handler(request)

    app = web.Application()
    app.router.add_route("*", "/{rest:.*}", answer)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    instance = Instance("node", "127.0.0.1", runner.addresses[0][1])
    client = LmcacheClient(instance.url + "/")
    yield client, table, instance
    await client.close()
    await runner.cleanup()


def key(number: int, salt: str = "") -> ObjectKey:
    return ObjectKey(f"{number:064x}", MODEL, 0x01000100, 0, salt)


def as_json(key: ObjectKey) -> dict[str, object]:
    return {name: getattr(key, name) for name in key.__struct_fields__}


async def test_pins_are_read_page_by_page_and_salts_told_apart(
    client: tuple[LmcacheClient, dict[str, Handler], Instance],
) -> None:
    lmcache, table, _ = client
    pinned = [key(1), key(2, "other"), key(3), key(4)]

    async def pins(request: web.Request) -> web.Response:
        assert request.query["model_name"] == MODEL
        at = int(request.query["offset"])
        page = [{"key": as_json(each), "pin_count": 2} for each in pinned[at : at + 2]]
        return web.json_response({"total": len(pinned), "pins": page})

    table["/cache/pins"] = pins
    assert await lmcache.pins(MODEL, "") == dict.fromkeys([key(1), key(3), key(4)], 2)


async def test_a_coordinator_without_pins_holds_none(
    client: tuple[LmcacheClient, dict[str, Handler], Instance],
) -> None:
    assert await client[0].pins(MODEL, "") == {}


async def test_a_delete_is_never_forced(client: tuple[LmcacheClient, dict[str, Handler], Instance]) -> None:
    lmcache, table, instance = client
    asked: list[dict[str, object]] = []

    async def objects(request: web.Request) -> web.Response:
        asked.append(await request.json())
        return web.json_response({"deleted": 1, "skipped": 0, "ok": True})

    table["/cache/objects"] = objects
    await lmcache.delete(instance, [key(1)], Tier.L2, "fs")
    assert asked == [{"keys": [as_json(key(1))], "tier": "l2", "adapter": "fs", "force": False}]


@pytest.mark.parametrize(
    "response",
    [
        web.Response(status=503, text="not ready"),
        web.Response(text="<html>"),
        web.Response(text='{"results": []}'),
    ],
    ids=["refused", "not JSON", "too short"],
)
async def test_every_wrong_answer_is_unavailability(
    client: tuple[LmcacheClient, dict[str, Handler], Instance], response: web.Response
) -> None:
    lmcache, table, _ = client

    async def lookup(_: web.Request) -> web.Response:
        return response

    table["/directory/lookup"] = lookup
    with pytest.raises(CacheUnavailable, match="directory/lookup"):
        await lmcache.lookup([key(1)])


async def test_a_coordinators_age_is_what_its_metrics_say(
    client: tuple[LmcacheClient, dict[str, Handler], Instance],
) -> None:
    lmcache, table, _ = client
    assert await lmcache.coordinator_began_ns() == 0

    async def metrics(_: web.Request) -> web.Response:
        return web.Response(
            text="# TYPE process_start_time_seconds gauge\nprocess_start_time_seconds 1.5e+09\n"
        )

    table["/metrics"] = metrics
    assert await lmcache.coordinator_began_ns() == 1_500_000_000 * 10**9


async def test_nobody_listening_is_unavailability() -> None:
    lmcache = LmcacheClient("http://127.0.0.1:1")
    with pytest.raises(CacheUnavailable, match="ConnectError"):
        await lmcache.coordinator_began_ns()
    with pytest.raises(CacheUnavailable, match="ConnectError"):
        await lmcache.instances()
    await lmcache.close()
