"""Pins on the real stack: leased holds that outlive their context, follow their message, cost a budget."""

from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
import pytest

from engine_bridge.stack.engine_stack import EngineStack
from lifecycle.core.events import PinMoved, PinReleased
from proxy.config import LimitsConfig
from tests.e2e.agent import Agent, World, config_for, prose, world_of
from tests.e2e.engine_cache import BOTH, NOWHERE, Cache


@pytest.fixture(params=["promised", "held in L2"])
async def pinning(
    request: pytest.FixtureRequest, engine_stack: EngineStack, cache: Cache, tmp_path: Path
) -> AsyncIterator[World]:
    """A proxy whose pins are its own promise, or the coordinator's holds too."""
    config = config_for(engine_stack, tmp_path)
    l2_pins = request.param == "held in L2"
    config = msgspec.structs.replace(config, cache=msgspec.structs.replace(config.cache, l2_pins=l2_pins))
    async with world_of(cache, config) as world:
        yield world
        await world.http.post(f"{world.up.admin_url}/kv/v1/release-all")


async def pinned_agent(world: World, ttl: float = 600) -> tuple[Agent, list[bytes], list[bytes]]:
    """An agent whose first two messages are pinned, their chunks, and the chunks behind them."""
    agent = world.agent("pinner")
    for _ in range(3):
        await agent.say(prose(40))
    stored = await agent.stored_keys()
    await world.until_confirmed(stored)
    held = await world.cache.head_keys(agent.messages[:2])
    [result] = await agent.ops({"op": "pin", "span": [0, 2], "ttl": ttl})
    holds_below = world.runtime.config.cache.l2_pins
    assert result["granted"] == {
        "l1": "not reclaimed; the cache may evict",
        "l2": "held" if holds_below else "not reclaimed; the cache may evict",
    }
    rest = stored[len(held) :]
    assert len(held) >= 6
    assert len(rest) >= 4
    return agent, held, rest


async def coordinator_holds(world: World, keys: list[bytes]) -> list[int]:
    counts = await world.cache.pin_counts()
    return [counts.get(key, 0) for key in keys]


async def test_a_pin_survives_close_and_unpin_frees_it(pinning: World) -> None:
    world, cache = pinning, pinning.cache
    agent, held, rest = await pinned_agent(world)
    again = await agent.ops({"op": "pin", "span": [0, 2], "ttl": 600})
    assert again[0]["status"] == "applied"
    state = world.state(agent.ctx)
    assert state is not None
    assert len(state.pins) == 1, "a second identical pin changes nothing"
    assert world.runtime.tracker.contexts.use.of("default").pinned_bytes == state.pins[0].size_bytes

    await agent.ops({"op": "close"})
    await world.until_gone(rest)
    await world.sweep()
    assert await cache.where(held) == [BOTH] * len(held)
    assert await cache.where(rest) == [NOWHERE] * len(rest)
    below = int(world.runtime.config.cache.l2_pins)
    assert await coordinator_holds(world, held) == [below] * len(held)

    await agent.ops({"op": "unpin", "span": [0, 2]})
    await world.until_gone(held)
    await cache.await_tiers(held, NOWHERE)
    assert await coordinator_holds(world, held) == [0] * len(held)
    assert world.runtime.tracker.contexts.use.of("default").pinned_bytes == 0


async def test_the_end_of_its_lease_frees_a_pin(pinning: World) -> None:
    world, cache = pinning, pinning.cache
    agent, held, rest = await pinned_agent(world, ttl=6)
    await agent.ops({"op": "close"})
    await world.until_gone(rest)
    assert not world.events(PinReleased), "too slow a machine for this lease"
    assert await cache.where(held) == [BOTH] * len(held)
    await world.until_gone(held)
    [released] = world.events(PinReleased)
    assert "lease" in released.reason
    await cache.await_tiers(held, NOWHERE)
    assert await coordinator_holds(world, held) == [0] * len(held)


async def test_a_pin_follows_its_message_behind_another_prefix(pinning: World) -> None:
    world, cache = pinning, pinning.cache
    agent = world.agent("mover")
    for _ in range(3):
        await agent.say(prose(40))
    stored = await agent.stored_keys()
    await world.until_confirmed(stored)
    system = await cache.head_keys(agent.messages[:1])
    await agent.ops({"op": "pin", "span": [3, 4], "ttl": 600})  # the second question
    old = await cache.head_keys(agent.messages[:4])

    # One message stands for the first exchange; the second question follows it, unchanged.
    await agent.ops({"op": "replace", "span": [1, 3], "n": 1})
    agent.messages[1:3] = [{"role": "user", "content": prose(25)}]
    moved = await cache.head_keys(agent.messages[:3])
    await agent.say(prose(40))
    await world.until(lambda: world.events(PinMoved))
    stored_now = await agent.stored_keys()
    await world.until_confirmed(stored_now)
    await world.until_gone([key for key in stored if key not in moved])
    await agent.ops({"op": "close"})
    await world.until_gone([key for key in stored_now if key not in moved])
    await world.sweep()
    assert len(moved) > len(system)
    assert moved[: len(system)] == system
    assert len(set(old) & set(moved)) <= len(system) + 1, "the next role may share the chunk behind"
    assert await cache.where(moved) == [BOTH] * len(moved)
    below = int(world.runtime.config.cache.l2_pins)
    assert await coordinator_holds(world, moved) == [below] * len(moved)
    assert await coordinator_holds(world, [key for key in old if key not in moved]) == [0] * len(
        old[len(system) :]
    )
    await agent.ops({"op": "unpin", "span": [2, 3]})
    await world.until_gone(moved)
    assert await coordinator_holds(world, moved) == [0] * len(moved)


async def test_the_budget_refuses_with_a_reason(
    engine_stack: EngineStack, cache: Cache, tmp_path: Path
) -> None:
    config = config_for(engine_stack, tmp_path)
    bytes_per_token = 2 * 2 * 32 * 2  # two layers, key and value, one head of 32, two bytes
    budget = LimitsConfig(pinned_bytes=bytes_per_token * 700)
    async with world_of(cache, msgspec.structs.replace(config, limits=budget)) as world:
        agent = world.agent("spender")
        for _ in range(3):
            await agent.say(prose(40))
        await world.until_confirmed(await agent.stored_keys())
        whole = len(await cache.tokens(agent.messages[:4], prompt=False))
        system = len(await cache.tokens(agent.messages[:1], prompt=False))
        assert system < 700 < whole
        ops = [
            {"op": "pin", "ctx": agent.ctx, "seq": 1, "span": [0, 4], "ttl": 60},
            {"op": "pin", "ctx": agent.ctx, "seq": 2, "span": "system", "ttl": 60},
            {"op": "pin", "ctx": agent.ctx, "seq": 3, "span": [0, 1], "ttl": 60},
        ]
        refused, granted, same = await world.ops("spender", *ops)
        assert (refused["status"], granted["status"], same["status"]) == ("rejected", "applied", "applied")
        assert refused["reason"] == (
            f"pin budget: {whole * bytes_per_token} bytes needed, {700 * bytes_per_token} left"
        )
        assert world.runtime.tracker.contexts.use.of("default").pinned_bytes == system * bytes_per_token
