"""The report on the real stack: its figures are what engine and cache did; a wrong client loses control."""

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from engine_bridge.stack.engine_stack import EngineStack
from lifecycle.core.directives import Reclaim
from lifecycle.core.events import CallEnded, HarmBudgetExceeded
from lifecycle.vocabulary import DirectiveOutcome
from proxy.config import HarmConfig
from tests.e2e.agent import Agent, World, config_for, prose, world_of
from tests.e2e.engine_cache import BOTH, Cache


@pytest.fixture
async def world(engine_stack: EngineStack, cache: Cache, tmp_path: Path) -> AsyncIterator[World]:
    """A proxy in enforce whose harm budget two calls use up."""
    harm = HarmConfig(floor_prompt_tokens=0, min_calls=2)
    config = msgspec.structs.replace(config_for(engine_stack, tmp_path), harm=harm)
    async with world_of(cache, config) as world:
        yield world


async def report(world: World) -> dict[str, Any]:
    answer = await world.http.get(f"{world.up.admin_url}/kv/v1/report", params={"since": "1h"})
    document: dict[str, Any] = answer.json()
    return document


async def edited(world: World, outcome: DirectiveOutcome) -> tuple[Agent, list[bytes]]:
    """A context that took its first message out; what only that list held is settled."""
    agent = world.agent()
    await agent.say(prose(200))
    old = await agent.keys()
    await world.until_confirmed(old)
    await agent.ops({"op": "remove", "span": [1, 2]})
    head = await world.cache.head_keys(agent.messages[:1])
    dead = [key for key in old if key not in head]
    assert dead
    await world.until_settled(dead, outcome)
    return agent, dead


async def test_regret_is_told_as_it_was_and_ends_control(world: World, cache: Cache) -> None:
    chunk = world.up.runtime.self_test.chunk_size
    needed = 0
    for _ in range(2):
        agent, dead = await edited(world, DirectiveOutcome.APPLIED)
        await world.until_gone(dead)
        await agent.call()
        needed += len(dead)
    await world.until(lambda: bool(world.events(HarmBudgetExceeded)))
    await world.until(lambda: len(world.events(CallEnded)) == 4)
    document = await report(world)
    total = document["total"]
    assert total["regretted_tokens"] == needed * chunk
    assert total["freed_tokens"] == len(world.asked(Reclaim)) * chunk >= needed * chunk
    assert total["freed_bytes"] == total["freed_tokens"] * world.up.runtime.self_test.bytes_per_token
    ended = world.events(CallEnded)
    assert total["calls"] == len(ended)
    assert total["prompt_tokens"] == sum(e.prompt_tokens for e in ended)
    assert total["cached_tokens"] == sum(e.cached_tokens for e in ended)
    assert document["problems"]

    agent, dead = await edited(world, DirectiveOutcome.SUPPRESSED)
    await cache.await_tiers(dead, BOTH)
    document = await report(world)
    assert document["total"]["would_free_tokens"] >= len(dead) * chunk
    assert document["verified_share"]["model"] == {world.namespace.model: 1.0}
    assert document["dead_now"]["dead_tokens"] <= document["dead_now"]["resident_tokens"]
