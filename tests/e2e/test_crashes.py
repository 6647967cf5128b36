"""kill -9 of every process of the stack while agents talk: calls go on where the engine lives, the books come
right again, and what is dead leaves the cache for good."""

import asyncio
import json
import sys
from array import array
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from contextlib import asynccontextmanager
from itertools import count
from pathlib import Path
from typing import Any, TypeVar

import httpx
import msgspec
import openai
import pytest

from engine_bridge.chunk_keys import chunk_keys
from engine_bridge.drivers.lmcache_client import LmcacheClient
from engine_bridge.drivers.lmcache_keys import ObjectKey
from engine_bridge.pin_holder import PinHolder
from engine_bridge.stack.engine_stack import EngineStack
from engine_bridge.stack.processes import Process, free_ports
from lifecycle.core.events import ChunksConfirmed, ChunksGone, DirectiveSettled, OperationApplied
from lifecycle.core.ids import split_keys
from lifecycle.projections.contexts import Contexts
from lifecycle.store.opening import open_log
from lifecycle.vocabulary import DirectiveOutcome, Tier
from proxy.config import Config, Listener
from tests.e2e.agent import (
    BOTH,
    KV_RANK,
    NOWHERE,
    SECONDS,
    Agent,
    Cache,
    World,
    config_for,
    polled,
    prose,
    world_of,
)
from tests.lifecycle.lives import books, replayed
from tests.lifecycle.store.redis_process import RedisProcess

T = TypeVar("T")
PAUSE_SECONDS = 0.2
NUM_AGENTS = 3
MAX_TURNS = 300
"""Bound of what one agent says in one test."""

THINKS_SECONDS = 0.3
NUM_LOOKS = int(4 * SECONDS / PAUSE_SECONDS)
"""What could not be deleted is tried again after half a minute, more than once where a server was away."""


KEEPS_NOTHING = {"kv_transfer_params": {"lmcache.max_offload_tokens": 0}}


class Talk:
    """Agents that talk until they are told to stop: questions, and a summary in their place now and then.

    A call that fails is made again. `answered` and `failed` count, `keys` has every chunk that was computed.
    """

    def __init__(self, world: Any, num_agents: int = NUM_AGENTS) -> None:
        self.world = world
        self.agents: list[Agent] = [world.agent(f"talker-{n}") for n in range(num_agents)]
        self.answered = 0
        self.failed: list[str] = []
        self.keys: dict[bytes, None] = {}
        self.last: dict[str, list[dict[str, Any]]] = {}
        self.declares = True
        self.declared: dict[str, int] = {}
        self._stop = asyncio.Event()
        self._heard = asyncio.Event()

    async def _turn(self, agent: Agent, number: int) -> None:
        if number % 3 == 2:
            if self.declares:
                await self.declare(agent, op="replace", span=[1, len(agent.messages)], n=1)
            agent.messages[1:] = [{"role": "user", "content": "so far: " + prose(20)}]
        else:
            agent.messages.append({"role": "user", "content": prose(25)})
        answer = await self._persist(lambda: agent.call(1, call=f"call-{number}"))
        self.last[agent.ctx] = list(agent.asked)
        agent.messages.append(answer)
        self.answered += 1
        self._heard.set()
        prompt = await self._persist(lambda: self.world.cache.tokens(agent.asked))
        computed = [*prompt, *agent.ids[0][:-1]]
        self.keys |= dict.fromkeys(split_keys(chunk_keys(array("I", computed), self.world.cache.chunk)))

    async def declare(self, agent: Agent, **operation: Any) -> None:
        """One operation, the same again until it was answered."""
        seq = self.declared[agent.ctx] = self.declared.get(agent.ctx, 0) + 1
        body = {"source": agent.ctx, "ops": [{"ctx": agent.ctx, "seq": seq, **operation}]}

        async def attempt() -> dict[str, Any]:
            reply = await self.world.http.post(f"{self.world.data_url}/kv/v1/ops", json=body)
            reply.raise_for_status()
            return dict(reply.json()["results"][0])

        result = await self._persist(attempt)
        # Calls may be answered by a process that dies before it has written them down.
        if result["status"] == "rejected" and result["reason"] == "no such context":
            self.declared[agent.ctx] -= 1
        elif result["status"] == "rejected":
            assert "no list" in result["reason"]
        else:
            assert result["status"] in ("applied", "duplicate"), result

    async def _persist(self, attempt: Callable[[], Awaitable[T]]) -> T:
        for _ in range(int(3 * SECONDS / PAUSE_SECONDS)):
            try:
                return await attempt()
            except (openai.APIError, httpx.HTTPError) as error:
                self.failed.append(f"{type(error).__name__}: {error}")
                await asyncio.sleep(PAUSE_SECONDS)
        raise AssertionError(self.failed[-1])

    async def _talk(self, agent: Agent) -> None:
        for number in range(MAX_TURNS):
            if self._stop.is_set():
                return
            await self._turn(agent, number)
            await asyncio.sleep(THINKS_SECONDS)

    async def until_answered(self, more: int) -> None:
        """So many answers more."""
        wanted = self.answered + more
        async with asyncio.timeout(2 * SECONDS):
            while self.answered < wanted:
                self._heard.clear()
                waits = [*self._tasks, asyncio.ensure_future(self._heard.wait())]
                done, _ = await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
                waits[-1].cancel()
                for task in done & set(self._tasks):
                    task.result()
                    raise AssertionError("an agent has said everything it may")

    async def __aenter__(self) -> "Talk":
        self._tasks = [asyncio.ensure_future(self._talk(agent)) for agent in self.agents]
        await self.until_answered(2 * len(self.agents))
        return self

    async def __aexit__(self, kind: Any, error: Any, trace: Any) -> None:
        self._stop.set()
        results = await asyncio.gather(*self._tasks, return_exceptions=True)
        if error is None:
            assert [r for r in results if isinstance(r, BaseException)] == []

    async def close(self) -> None:
        """Close every context."""
        for agent in self.agents:
            await self.declare(agent, op="close")

    async def all_gone(self, keys: Iterable[bytes] | None = None) -> None:
        """Close every context: then the directory shows none of the chunks, the disk has no file of them, and
        the engine finds nothing. Of all that were computed, or of these."""
        await self.close()
        cache: Cache = self.world.cache
        chosen = list(self.keys if keys is None else set(keys) & set(self.keys))
        for _ in range(NUM_LOOKS):
            shown = [key for key, tiers in zip(chosen, await cache.where(chosen), strict=True) if tiers]
            left = {*shown, *on_disk(cache.stack, chosen)}
            if not left:
                break
            await asyncio.sleep(PAUSE_SECONDS)
        else:
            raise AssertionError(f"{len(left)} of {len(chosen)} are left: {self.world.explained(list(left))}")
        await cache.forget_engine_cache()
        for asked in self.last.values():
            reply = await cache.direct(asked, max_tokens=1, **KEEPS_NOTHING)
            details = reply["usage"]["prompt_tokens_details"] or {}
            assert (details.get("cached_tokens") or 0) == 0


def on_disk(stack: EngineStack, keys: Iterable[bytes]) -> list[bytes]:
    """Which of the chunks have a file in L2, whatever the directory says."""
    names = "\n".join(path.name for path in stack.l2_dir.rglob("*"))
    return [key for key in keys if key.hex() in names]


@asynccontextmanager
async def talking(cache: Cache, config: Config) -> AsyncIterator[tuple[World, Talk]]:
    """A proxy and agents that talk through it; at the end the books are what the log says."""
    async with world_of(cache, config) as world:
        world.data_url = world.up.data_url  # type: ignore[attr-defined]
        world.explained = lambda keys: explained(world, keys)  # type: ignore[attr-defined]
        yield world, Talk(world)
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


async def found_again(world: World, agent: Agent) -> None:
    """What is alive of an agent's list is found in the cache, not only in the engine's own memory."""
    await agent.say(prose(30), call="found")
    await world.until_confirmed(await agent.keys())
    await world.cache.forget_engine_cache()
    await agent.say("and again", call="again")
    assert agent.cached_tokens >= world.cache.chunk


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


def proven(world: World) -> set[bytes]:
    """Chunks that the cache has shown, stored by our calls."""
    return {key for e in world.events(ChunksConfirmed) if e.stored for key in split_keys(e.keys)}


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
            await engine_stack.kill("vllm")
            await asyncio.sleep(PAUSE_SECONDS)
            await engine_stack.revive("vllm")
            await talk.until_answered(4 * NUM_AGENTS)
        assert talk.failed, "nobody answers for an engine that is not there"
        await found_again(world, talk.agents[0])
        await talk.all_gone()


class Outside:
    """A proxy in a process of its own, before the stack; stands in for a `World` where agents talk."""

    def __init__(self, cache: Cache, folder: Path) -> None:
        self.cache = cache
        self.folder = folder
        ports = free_ports(2)
        config = config_for(cache.stack, folder)
        self.log_url = config.log_url
        self.config = msgspec.structs.replace(
            config, data=Listener(port=ports[0]), admin=Listener(port=ports[1])
        )
        self.data_url, self.admin_url = (f"http://127.0.0.1:{port}" for port in ports)
        file = folder / "kvtether.yaml"
        file.write_text(json.dumps(msgspec.to_builtins(self.config)))
        command = [sys.executable, "-c", "from proxy.cli import main; main()", "serve", "--config", str(file)]
        environment = {"PYTHONPATH": str(Path(__file__).parents[2])}
        self.process = Process(
            "proxy", command, environment, folder / "proxy.log", f"{self.admin_url}/readyz"
        )
        self.http = httpx.AsyncClient(timeout=120.0, trust_env=False)
        self.client = openai.AsyncOpenAI(
            base_url=f"{self.data_url}/v1",
            api_key="any",
            max_retries=0,
            http_client=openai.DefaultAsyncHttpxClient(trust_env=False),
        )
        self._ids = count(1)

    def agent(self, name: str) -> Agent:
        system = {"role": "system", "content": prose(70)}
        return Agent(self, f"outside:{name}-{next(self._ids)}", [system], [])  # type: ignore[arg-type]

    def explained(self, keys: list[bytes]) -> str:
        return f"log in {self.log_url}"

    async def start(self) -> None:
        self.process.start()
        await self.process.wait_ready(SECONDS)

        async def ready() -> bool:
            return (await self.http.get(f"{self.admin_url}/readyz")).json()["problems"] == []

        await polled(ready)

    async def close(self) -> None:
        await self.process.stop()
        await self.client.close()
        await self.http.aclose()


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


async def nothing_proven_is_left(outside: Outside, talk: Talk) -> bool:
    """Whether all that was proven to be ours is gone. What was computed when a proxy died may never be,
    and what is not proven is not touched."""
    event_log = (await open_log(outside.log_url)).event_log
    stored = [
        r.event.keys
        async for r in event_log.read_all()
        if isinstance(r.event, ChunksConfirmed) and r.event.stored
    ]
    await event_log.close()
    proven = list({key for keys in stored for key in split_keys(keys)} & set(talk.keys))
    shown = await outside.cache.where(proven)
    return len(proven) > 0 and not any(shown) and not on_disk(outside.cache.stack, proven)


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
