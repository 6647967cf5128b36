"""Two real engines with a cache server each, under one coordinator, behind one proxy.

Their order matters: this stack is gone again before the one that all other tests share is started.
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from engine_bridge.stack.engine_stack import EngineStack, StackNode, StackOptions
from lifecycle.core.events import BackendLost
from proxy.config import BackendConfig, Config, UpstreamConfig
from proxy.doctor import examine
from tests.e2e.agent import Agent, World, config_for, prose, world_of
from tests.e2e.engine_cache import KV_RANK, Cache
from tests.e2e.polling import POLL_SECONDS, polled
from tests.e2e.talking_agents import proven

NAMES = ("a", "b")
LONG_SECONDS = 120.0
"""Bound of waits that span the start of a server and the pause before a failed delete is tried again."""

GIVEN_UP_SECONDS = 6
"""After this long the coordinator gives up a server that is silent; by default it takes 30."""


@pytest.fixture(scope="module")
def fleet() -> Iterator[EngineStack]:
    options = StackOptions(
        num_nodes=2,
        extra_coordinator=("--instance-timeout", str(GIVEN_UP_SECONDS), "--health-check-interval", "1"),
        extra_lmcache=("--coordinator-heartbeat-interval", "1"),
    )
    stack = EngineStack(options=options)
    asyncio.run(stack.start())
    yield stack
    asyncio.run(stack.stop())


def fleet_config(stack: EngineStack, folder: Path) -> Config:
    config = config_for(stack, folder)
    cache = msgspec.structs.replace(config.cache, events_endpoint="", replay_endpoint="")
    upstreams = tuple(
        BackendConfig(
            name=name,
            url=node.upstream_url,
            events_endpoint=node.events_endpoint,
            replay_endpoint=node.replay_endpoint,
        )
        for name, node in zip(NAMES, stack.nodes, strict=True)
    )
    return msgspec.structs.replace(config, upstream=UpstreamConfig(), upstreams=upstreams, cache=cache)


class Fleet:
    """A proxy before both engines, and what the cache servers hold."""

    def __init__(self, stack: EngineStack, world: World) -> None:
        self.stack = stack
        self.world = world
        self.nodes = dict(zip(NAMES, stack.nodes, strict=True))

    async def holders(self, keys: list[bytes]) -> list[set[str]]:
        """Names of the nodes on which each chunk lies, in whatever tier, by the directory."""
        named = [
            {
                "chunk_hash_hex": key.hex(),
                "model_name": self.stack.model_path,
                "kv_rank": KV_RANK,
                "object_group_id": 0,
                "cache_salt": "",
            }
            for key in keys
        ]
        url = f"{self.stack.coordinator_url}/directory/lookup"
        reply = (await self.world.http.post(url, json={"keys": named})).json()
        of = {node.instance_id: name for name, node in self.nodes.items()}
        return [{of[p["instance_id"]] for p in each["placements"]} for each in reply["results"]]

    async def until_held(self, keys: list[bytes], *names: str) -> None:
        """Until every chunk lies on exactly these nodes."""

        async def held() -> bool:
            return all(found == set(names) for found in await self.holders(keys))

        await polled(held)

    def files(self, keys: list[bytes]) -> list[bytes]:
        """Which of the chunks have a file on either node."""
        names = "\n".join(path.name for node in self.stack.nodes for path in node.l2_dir.rglob("*"))
        return [key for key in keys if key.hex() in names]

    def place(self, agent: Agent) -> str:
        """Which engine served it last, by the books; empty until they know."""
        state = self.world.state(agent.ctx)
        return state.backend if state is not None else ""

    async def agent_on(self, name: str) -> Agent:
        """An agent with some turns behind it, on the engine of that name."""
        for _ in range(40):
            agent = self.world.agent("resident")
            await agent.say(prose(40))
            await self.world.until(lambda agent=agent: bool(self.place(agent)))
            if self.place(agent) == name:
                await agent.say(prose(20))
                return agent
        raise AssertionError(f"nobody came to {name}")

    def backend(self, name: str) -> Any:
        return self.world.runtime.backends.find(name)


@pytest.fixture
async def it(fleet: EngineStack, tmp_path: Path) -> AsyncIterator[Fleet]:
    cache = Cache(fleet)
    async with world_of(cache, fleet_config(fleet, tmp_path)) as world:
        found = Fleet(fleet, world)
        await polled(lambda: everybody_is_well(found))
        yield found
    await cache.close()


async def everybody_is_well(it: Fleet) -> bool:
    return not it.world.runtime.problems and all(not b.down for b in it.world.runtime.backends.all)


def other_than(name: str) -> str:
    return next(each for each in NAMES if each != name)


async def test_contexts_stick_forks_go_along_and_deletes_reach_every_node(it: Fleet) -> None:
    world = it.world
    agents = [await it.agent_on(name) for name in NAMES]
    children: list[Agent] = []
    for name, agent in zip(NAMES, agents, strict=True):
        await agent.say(prose(20))
        assert it.place(agent) == name
        assert agent.cached_tokens > 0
        keys = await agent.keys()
        await world.until_confirmed(keys)
        await it.until_held(keys, name)
        child = agent.fork()
        child.messages.append({"role": "user", "content": prose(20)})
        await child.call(parent=agent.ctx, fork_at=len(agent.messages))
        await world.until(lambda child=child: bool(it.place(child)))
        assert it.place(child) == name
        assert child.cached_tokens > 0
        children.append(child)

    mover = agents[0]
    answer = await world.http.post(f"{world.up.admin_url}/kv/v1/backends/a/drain")
    assert answer.status_code == 200, answer.text
    await mover.say(prose(20))
    await world.until(lambda: it.place(mover) == "b")
    assert mover.cached_tokens == 0, "another engine computed it anew"
    keys = await mover.keys()
    await world.until_confirmed(keys)
    shared = keys[: len(keys) // 2]
    await it.until_held(shared, "a", "b")
    await world.http.post(f"{world.up.admin_url}/kv/v1/backends/a/resume")

    for agent in (mover, *children):
        await agent.ops({"op": "close"})
    # The other agent is open, and what both begin with may end behind the template's words for a turn.
    others = await agents[1].keys()
    own = [key for key in keys if key not in others and key in proven(world)]
    assert own
    await world.until_gone(own)
    assert await it.holders(own) == [set()] * len(own)
    assert it.files(own) == []


async def test_an_engine_that_is_killed_is_stood_in_for_and_its_kv_counts_as_lost(it: Fleet) -> None:
    world = it.world
    agent = await it.agent_on("b")
    survivor = await it.agent_on("a")
    node: StackNode = it.nodes["b"]
    try:
        await it.stack.kill(node.vllm)
        await agent.say(prose(20))
        await world.until(lambda: it.place(agent) == "a")
        lost = await world.until(lambda: world.events(BackendLost))
        assert {event.backend for event in lost} == {"b"}
        assert it.backend("b").down
        await survivor.say(prose(20))
        assert it.place(survivor) == "a"
        listed = (await world.http.get(f"{world.up.data_url}/v1/models")).json()
        assert [m["id"] for m in listed["data"]] == [it.stack.options.model_name]
        asked = msgspec.structs.replace(world.runtime.config, log_url="memory:")
        found = {f.subject: f for f in await examine(asked)}
        assert not found["upstream b"].ok
        assert found["upstream a"].ok
        # The KV of the dead engine lies on with its cache server, and goes with the context all the same.
        keys = await agent.keys()
        await world.until_confirmed(keys)
        others = await survivor.keys()
        # What nobody saw absent is proven to be ours by what it stands behind, a little later.
        own = await world.until(lambda: [k for k in keys if k not in others and k in proven(world)])
        await agent.ops({"op": "close"})
        await world.until_gone(own)
        assert await it.holders(own) == [set()] * len(own)
    finally:
        await it.stack.revive(node.vllm)
    await polled(lambda: everybody_is_well(it))
    await it.agent_on("b")


async def test_deletes_wait_for_a_cache_server_that_is_away_and_reach_all_others(it: Fleet) -> None:
    world = it.world
    near, far = [await it.agent_on(name) for name in NAMES]
    all_keys = {"a": await near.keys(), "b": await far.keys()}
    keys = {}
    for name, other in (("a", "b"), ("b", "a")):
        await world.until_confirmed(all_keys[name])
        mine = proven(world) - set(all_keys[other])
        keys[name] = [key for key in all_keys[name] if key in mine]
        assert keys[name]
        await it.until_held(keys[name], name)
        await polled(lambda name=name: written(it, keys[name]))
    node: StackNode = it.nodes["b"]
    await it.stack.kill(node.lmcache)
    try:
        for agent in (near, far):
            await agent.ops({"op": "close"})
        # Tried again after half a minute if the dead server was still waited for.
        await eventually(lambda: nowhere(it, keys["a"]))
        assert it.files(keys["b"]) == keys["b"]
    finally:
        await it.stack.revive(node.lmcache)
    await world.until(lambda: world.gone() >= {*keys["a"], *keys["b"]}, LONG_SECONDS)
    assert await it.holders(keys["b"]) == [set()] * len(keys["b"])
    # Given up before it was back, it owes the deletes, and makes up for them once it is seen again.
    await eventually(lambda: no_files(it, keys["b"]))


async def nowhere(it: Fleet, keys: list[bytes]) -> bool:
    return not any(await it.holders(keys)) and not it.files(keys)


async def eventually(holds: Callable[[], Awaitable[bool]]) -> None:
    for _ in range(int(LONG_SECONDS / POLL_SECONDS)):
        if await holds():
            return
        await asyncio.sleep(POLL_SECONDS)
    raise AssertionError(f"waited {LONG_SECONDS} s in vain")


async def no_files(it: Fleet, keys: list[bytes]) -> bool:
    return it.files(keys) == []


async def written(it: Fleet, keys: list[bytes]) -> bool:
    """Whether every chunk has a file: copies to L2 come later."""
    return it.files(keys) == keys
