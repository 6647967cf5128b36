"""Holds in L2 over a restart of the proxy, and what a restart of the cache server takes with it."""

from array import array
from collections.abc import Sequence
from pathlib import Path

import msgspec

from engine_bridge.drivers.lmcache_client import LmcacheClient
from engine_bridge.drivers.lmcache_keys import ObjectKey
from engine_bridge.drivers.lmcache_pins import HeldPin
from engine_bridge.pin_holder import PinHolder
from engine_bridge.stack.engine_stack import EngineStack
from lifecycle.core.events import ChunksGone
from lifecycle.core.ids import split_keys
from lifecycle.vocabulary import Tier
from proxy.config import Config
from tests.e2e.agent import Agent, World, config_for, prose, world_of
from tests.e2e.engine_cache import KV_RANK, Cache


def pinning_config(stack: EngineStack, folder: Path) -> Config:
    config = config_for(stack, folder)
    return msgspec.structs.replace(config, cache=msgspec.structs.replace(config.cache, l2_pins=True))


async def talked(world: World, name: str, system: str = "") -> Agent:
    agent = world.agent(name, system=system)
    for _ in range(2):
        await agent.say(prose(40))
    await world.until_confirmed(await agent.stored_keys())
    return agent


async def counts(cache: Cache, keys: Sequence[bytes]) -> list[int]:
    found = await cache.pin_counts()
    return [found.get(key, 0) for key in keys]


def files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}


def held(world: World) -> dict[str, HeldPin]:
    holder = world.runtime.cache
    assert isinstance(holder, PinHolder)
    return {pin.pin_id: pin for pin in holder.held_pins()}


async def release_all(world: World) -> object:
    return (await world.http.post(f"{world.up.admin_url}/kv/v1/release-all")).json()


async def test_a_restarted_proxy_gives_back_what_it_pinned_before(
    engine_stack: EngineStack, cache: Cache, tmp_path: Path
) -> None:
    config = pinning_config(engine_stack, tmp_path)
    async with world_of(cache, config) as world:
        first = await talked(world, "first")
        second = await talked(world, "second", system=first.messages[0]["content"])
        await first.ops({"op": "pin", "span": [0, 2], "ttl": 600})
        await second.ops({"op": "pin", "span": [0, 4], "ttl": 600})
        await world.until(lambda: len(held(world)) == 2)
        await world.runtime.pins.settled()
        one, other = [split_keys(pin.keys) for pin in held(world).values()]
        tokens = array("I", (await cache.tokens(second.messages[:4]))[: cache.chunk]).tobytes()
        ours = list(dict.fromkeys(one + other))
        expected = [(key in one) + (key in other) for key in ours]
        assert max(expected) == 2, "the system prompt is pinned twice"
        assert await counts(cache, ours) == expected
    assert await counts(cache, ours) == expected, "a stop gives nothing back"
    at_rest = files(tmp_path)
    assert any(name.endswith(".pinkey") for name in at_rest)
    assert not any(tokens in content for content in at_rest.values())

    async with world_of(cache, config) as world:
        before = held(world)
        assert len(before) == 2
        await world.ops("later", {"op": "pin", "ctx": first.ctx, "seq": 1, "span": [0, 2], "ttl": 3000})
        await world.until(
            lambda: any(pin.lease_until_ns > before[i].lease_until_ns for i, pin in held(world).items())
        )
        assert await counts(cache, ours) == expected, "neither a start nor a longer lease pins twice"
        assert await release_all(world) == {"pins": 2, "cache_holds": 2}
        assert await counts(cache, ours) == [0] * len(ours)

    async with world_of(cache, config) as world:
        assert held(world) == {}
        assert await release_all(world) == {"pins": 0, "cache_holds": 0}


async def test_what_a_restarted_cache_server_lost_is_recorded_as_gone(
    engine_stack: EngineStack, cache: Cache, tmp_path: Path
) -> None:
    async with world_of(cache, config_for(engine_stack, tmp_path)) as world:
        agent = await talked(world, "loser")
        keys = await agent.stored_keys()
        client = LmcacheClient(engine_stack.coordinator_url)
        [server] = await client.instances()
        objects = [ObjectKey(key.hex(), engine_stack.model_path, KV_RANK, 0, "") for key in keys]
        [adapter] = await client.adapters(server)
        await client.delete(server, objects, Tier.L2, adapter)
        await client.close()
        await cache.await_tiers(keys, frozenset({Tier.L1}))
        await engine_stack.restart("lmcache")
        await world.until_gone(keys)
        gone = [key for e in world.events(ChunksGone) for key in split_keys(e.keys)]
        assert set(keys) <= set(gone), "by the restart that was noticed, or by a look that came first"
