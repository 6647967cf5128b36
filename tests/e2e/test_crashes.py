"""kill -9 of every process of the stack while agents talk: calls go on where the engine lives, the books come
right again, and what is dead leaves the cache for good."""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import msgspec
import pytest

from engine_bridge.drivers.lmcache_client import LmcacheClient
from engine_bridge.drivers.lmcache_keys import ObjectKey
from engine_bridge.pin_holder import PinHolder
from engine_bridge.stack.engine_stack import EngineStack
from lifecycle.core.events import ChunksGone, DirectiveSettled, OperationApplied
from lifecycle.core.ids import split_keys
from lifecycle.projections.contexts import Contexts
from lifecycle.store.opening import open_log
from lifecycle.vocabulary import DirectiveOutcome, Tier
from proxy.config import Config
from tests.e2e.agent import Agent, World, config_for, prose, world_of
from tests.e2e.engine_cache import BOTH, KV_RANK, NOWHERE, Cache
from tests.e2e.outside_proxy import Outside, nothing_proven_is_left
from tests.e2e.polling import SECONDS, polled
from tests.e2e.talking_agents import NUM_AGENTS, PAUSE_SECONDS, Talk, proven
from tests.lifecycle.lives import books, replayed
from tests.lifecycle.store.redis_process import RedisProcess


@asynccontextmanager
async def talking(cache: Cache, config: Config) -> AsyncIterator[tuple[World, Talk]]:
    """A proxy and agents that talk through it; at the end the books are what the log says."""
    async with world_of(cache, config) as world:
        world.data_url = world.up.data_url  # type: ignore[attr-defined]
        world.explained = lambda keys: explained(world, keys)  # type: ignore[attr-defined]
        try:
            yield world, Talk(world)
        except Exception:
            with suppress(Exception):  # what made the test fail is what counts
                await asyncio.wait_for(world.runtime.holds.release_all(), SECONDS)
            raise
        contexts = world.runtime.tracker.contexts
        await world.until(lambda: not any(state.flights for state in contexts.states.values()))
        while True:  # what the cache shows is recorded meanwhile
            position, again = contexts.position, await replayed(world.runtime.event_log)
            if position == contexts.position == again.position:
                break
        assert books(contexts) == books(again)


def explained(world: World, keys: list[bytes]) -> str:
    """What the books say of chunks that should be gone."""
    contexts = world.runtime.tracker.contexts
    books = Counter(
        (each.references > 0, each.flags) if (each := contexts.index.describe(world.namespace, key)) else None
        for key in keys
    )
    unmapped = contexts.index.unmapped_contexts(world.namespace)
    untracked = contexts.index.last_untracked_ns(world.namespace)
    outcomes = Counter(str(each) for each in world.outcomes(keys).values())
    failures = Counter(
        e.result.reason for e in world.events(DirectiveSettled) if e.result.outcome is DirectiveOutcome.FAILED
    )
    lost = len(set(keys) & {k for e in world.events(ChunksGone) for k in split_keys(e.keys)})
    asked = f"outcomes {outcomes} because of {failures}"
    return f"{books}, unmapped {unmapped}, untracked {untracked}, {asked}, {lost} called gone"


async def heads_are_shown(world: World, talk: Talk) -> None:
    """Until the cache has shown what every agent's lists begin with: its system prompt."""
    for agent in talk.agents:
        await world.until_confirmed(await world.cache.head_keys(agent.messages[:1]))


async def found_again(world: World, agent: Agent) -> None:
    """What an agent's list begins with is found in the cache, not only in the engine's own memory.

    It goes on from its system prompt: of what was stored while somebody was away nobody may have heard.
    """
    del agent.messages[1:]
    await agent.say(prose(30), call="found")
    await world.until_confirmed(await agent.keys())
    await world.cache.forget_engine_cache()
    await agent.say("and again", call="again")
    head = await world.cache.head_keys(agent.messages[:1])
    assert head
    assert agent.cached_tokens >= len(head) * world.cache.chunk


async def test_the_cache_server(engine_stack: EngineStack, cache: Cache, tmp_path: Path) -> None:
    async with talking(cache, config_for(engine_stack, tmp_path)) as (world, talk):
        loser = world.agent("loser")
        await loser.say(prose(40))
        lost = await loser.keys()
        await world.until_confirmed(lost)
        await cache.await_tiers(lost, BOTH)
        client = LmcacheClient(engine_stack.coordinator_url)
        [server] = await client.instances()
        [adapter] = await client.adapters(server)
        await client.delete(server, objects(engine_stack, lost), Tier.L2, adapter)
        await client.close()
        await cache.await_tiers(lost, frozenset({Tier.L1}))
        async with talk:
            await heads_are_shown(world, talk)
            await engine_stack.kill("lmcache")
            await talk.until_answered(NUM_AGENTS)
            await engine_stack.revive("lmcache")
            await world.until_gone(lost)
            await talk.until_answered(4 * NUM_AGENTS)
        assert talk.failed == []
        await found_again(world, talk.agents[0])
        # What it stored and did not live to tell is shown by nobody, and never proven.
        await talk.all_gone(proven(world))


@pytest.mark.parametrize("keeps", [True, False], ids=["with its metadata", "without"])
async def test_the_coordinator(engine_stack: EngineStack, cache: Cache, tmp_path: Path, keeps: bool) -> None:
    """Its directory is lost in any case; with its metadata go the pins."""
    config = config_for(engine_stack, tmp_path)
    config = msgspec.structs.replace(config, cache=msgspec.structs.replace(config.cache, l2_pins=True))
    async with talking(cache, config) as (world, talk):
        holder = world.runtime.cache
        assert isinstance(holder, PinHolder)
        pinned = world.agent("pinned")
        await pinned.say(prose(40))
        await pinned.ops({"op": "pin", "span": [0, 2], "ttl": 600})
        await world.until(lambda: bool(holder.held_pins()))
        await world.runtime.pins.settled()
        [pin] = holder.held_pins()
        async with talk:
            await heads_are_shown(world, talk)
            await engine_stack.kill("coordinator")
            await talk.until_answered(NUM_AGENTS)
            if not keeps:
                (engine_stack.run_dir / "coordinator.json").unlink()
            await engine_stack.revive("coordinator")
            await talk.until_answered(4 * NUM_AGENTS)
        assert talk.failed == []

        async def held() -> bool:
            counts = await cache.pin_counts()
            return [counts.get(key, 0) for key in split_keys(pin.keys)] == [1] * len(split_keys(pin.keys))

        await polled(held)
        assert not set(split_keys(pin.keys)) & world.gone(), "what is pinned was never lost"
        await found_again(world, talk.agents[0])
        # What was stored while nobody was there to hear of it is shown by nobody, and never proven.
        await talk.all_gone(proven(world))
        await pinned.ops({"op": "unpin", "span": [0, 2]}, {"op": "close"})
        await world.runtime.pins.settled()
        await polled(lambda: nobody_pins(cache))


def objects(stack: EngineStack, keys: list[bytes]) -> list[ObjectKey]:
    return [ObjectKey(key.hex(), stack.model_path, KV_RANK, 0, "") for key in keys]


async def nobody_pins(cache: Cache) -> bool:
    return not any((await cache.pin_counts()).values())


async def test_the_log(engine_stack: EngineStack, cache: Cache, tmp_path: Path) -> None:
    redis = RedisProcess(tmp_path / "redis").start()
    try:
        async with talking(cache, config_for(engine_stack, tmp_path, log_url=redis.url)) as (world, talk):
            talk.declares = False  # an operation is refused for as long as it cannot be recorded
            async with talk:
                await asyncio.to_thread(redis.kill)
                await talk.until_answered(NUM_AGENTS)
                assert world.runtime.tracker.degraded
                await asyncio.to_thread(redis.start)
                await world.until(lambda: not world.runtime.tracker.degraded)
                await talk.until_answered(3 * NUM_AGENTS)
            assert talk.failed == []
            await talk.all_gone()
    finally:
        redis.kill()


async def test_the_engine(engine_stack: EngineStack, cache: Cache, tmp_path: Path) -> None:
    async with talking(cache, config_for(engine_stack, tmp_path)) as (world, talk):
        async with talk:
            await heads_are_shown(world, talk)
            await engine_stack.kill("vllm")
            await asyncio.sleep(PAUSE_SECONDS)
            await engine_stack.revive("vllm")
            await talk.until_answered(4 * NUM_AGENTS)
        assert talk.failed, "nobody answers for an engine that is not there"
        await found_again(world, talk.agents[0])
        await talk.all_gone()


async def test_the_proxy(cache: Cache, tmp_path: Path) -> None:
    outside = Outside(cache, tmp_path)
    try:
        await outside.start()
        talk = Talk(outside)
        async with talk:
            for _ in range(2):
                await outside.process.kill()
                # Agents call again as soon as somebody listens, long before everything is found ready.
                await outside.start()
                await talk.until_answered(3 * NUM_AGENTS)
        assert talk.failed, "nobody answers for a proxy that is not there"
        await talk.close()
        await polled(lambda: nothing_proven_is_left(outside, talk), PAUSE_SECONDS)
    finally:
        await outside.close()
    event_log = (await open_log(outside.log_url)).event_log
    told = [recorded async for recorded in event_log.read_all()]
    contexts = Contexts()
    for recorded in told:
        contexts.apply(recorded)
    await event_log.close()
    applied = Counter(
        (r.stream, r.event.source, r.event.operation.seq)
        for r in told
        if isinstance(r.event, OperationApplied)
    )
    assert set(applied.values()) == {1}
    assert not any(state.flights or state.open for state in contexts.states.values())
    assert {k for k, live in live_chunks(contexts).items() if live} == set()


def live_chunks(contexts: Contexts) -> Counter[bytes]:
    """By a recount."""
    states = contexts.states.values()
    return Counter(k for state in states for v in state.versions.values() for k in split_keys(v.keys))


async def test_what_somebody_does_by_hand(engine_stack: EngineStack, cache: Cache, tmp_path: Path) -> None:
    config = config_for(engine_stack, tmp_path)
    config = msgspec.structs.replace(config, cache=msgspec.structs.replace(config.cache, l2_pins=True))
    async with world_of(cache, config) as world:
        holder = world.runtime.cache
        assert isinstance(holder, PinHolder)
        client = LmcacheClient(engine_stack.coordinator_url)
        [server] = await client.instances()
        [adapter] = await client.adapters(server)

        agent = world.agent("victim")
        await agent.say(prose(60))
        keys = await agent.keys()
        await world.until_confirmed(keys)
        await cache.await_tiers(keys, BOTH)

        # Chunks are deleted: the books learn it, though no event says so.
        taken = keys[2:4]
        for tier, where in ((Tier.L1, None), (Tier.L2, adapter)):
            await client.delete(server, objects(engine_stack, taken), tier, where)
        await world.until_gone(taken)
        index = world.runtime.tracker.contexts.index
        assert index.unverified(world.namespace, b"".join(keys)) == taken

        # A pin is taken away, and one is added in our name.
        await agent.ops({"op": "pin", "span": [0, 1], "ttl": 600})
        await world.until(lambda: bool(holder.held_pins()))
        await world.runtime.pins.settled()
        [pin] = holder.held_pins()
        ours = split_keys(pin.keys)
        named = (list(pin.tokens()), engine_stack.model_path, 1, "")
        await client.unpin(*named)
        await world.runtime.holds.compare()
        assert [(await cache.pin_counts())[key] for key in ours] == [1] * len(ours)
        await client.pin(*named)
        for _ in range(2):
            await world.runtime.holds.compare()
        assert [(await cache.pin_counts())[key] for key in ours] == [1] * len(ours)

        # Somebody else's pin is honoured, and told.
        theirs = (await cache.tokens(agent.messages))[: len(keys) * cache.chunk]
        await client.pin(theirs, engine_stack.model_path, 1, "")
        for _ in range(3):
            await world.runtime.holds.compare()
        counts = await cache.pin_counts()
        assert [counts[key] for key in keys] == [1 + (key in ours) for key in keys]
        assert world.runtime.holds.num_foreign == len(keys)
        await client.unpin(theirs, engine_stack.model_path, 1, "")

        # What was freed lies in L2 again, as a late copy would.
        await agent.ops({"op": "unpin", "span": [0, 1]}, {"op": "close"})
        left = [key for key in keys if key not in taken]
        await world.until_gone(left)
        await cache.forget_engine_cache()
        await cache.direct(agent.asked, max_tokens=1)
        await cache.await_tiers(keys, BOTH)
        await client.delete(server, objects(engine_stack, keys), Tier.L1)
        await cache.await_tiers(keys, frozenset({Tier.L2}))
        await cache.await_tiers([key for key in left if key not in taken], NOWHERE)
        await client.close()
        scraped = (await world.http.get(f"{world.up.admin_url}/metrics")).text
        for line in (
            'drift_total{what="gone"}',
            'drift_total{what="returned"}',
            'what="restored"',
            'what="surplus"',
        ):
            assert line in scraped
