"""Observe and bypass on the real stack: nothing is written, every byte is the client's own."""

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from engine_bridge.stack.engine_stack import EngineStack
from lifecycle.core.directives import Reclaim
from lifecycle.core.events import ContextCreated
from lifecycle.vocabulary import CONTEXT_HEADER, DirectiveOutcome, Mode
from tests.e2e.agent import World, config_for, lifecycle, prose, world_of
from tests.e2e.engine_cache import BOTH, PLAIN, Cache
from tests.e2e.recording_upstream import Recording, recording
from tests.e2e.test_lifecycle_main import long_run

CHAT = "/v1/chat/completions"


@pytest.fixture
async def pipe(engine_stack: EngineStack) -> AsyncIterator[Recording]:
    """What stands between proxy and engine and sees every byte."""
    async with recording(engine_stack.upstream_url) as pipe:
        yield pipe


def before(pipe: Recording, stack: EngineStack, folder: Path, mode: Mode) -> Any:
    config = config_for(stack, folder, mode)
    upstream = msgspec.structs.replace(config.upstream, url=pipe.url)
    cache = msgspec.structs.replace(config.cache, l2_pins=True)
    return msgspec.structs.replace(config, upstream=upstream, cache=cache)


async def outcomes_of(world: World, kind: str) -> list[str]:
    return [d["outcome"] for d in await world.directives() if d["kind"] == kind]


async def test_observe_plans_everything_and_does_nothing(
    engine_stack: EngineStack, cache: Cache, pipe: Recording, tmp_path: Path
) -> None:
    async with world_of(cache, before(pipe, engine_stack, tmp_path, Mode.OBSERVE)) as world:
        writes = cache.control_writes()
        everything: set[bytes] = set()

        # a compaction
        agent, prompts, generated = await long_run(world)
        await world.until_confirmed(await agent.keys())
        compacted = [agent.messages[0], {"role": "user", "content": prose(40)}]
        head = set(await cache.head_keys(agent.messages[:1], agent.tools))
        dead = prompts - head
        await agent.ops({"op": "replace", "span": [1, len(agent.messages)], "n": 1})
        await world.until_settled(sorted(dead), DirectiveOutcome.SUPPRESSED)
        agent.messages = compacted
        await agent.call()
        live = head | (set(await agent.keys()) - prompts)
        everything |= prompts | generated | live

        # a one-off
        summariser = world.agent("summariser")
        summariser.messages.append({"role": "user", "content": prose(60)})
        await summariser.call(one_off=True)
        once = await summariser.keys()
        assert len(once) >= 8
        await world.until_settled(once, DirectiveOutcome.SUPPRESSED)
        assert await outcomes_of(world, "admit") == ["suppressed"]
        everything |= set(once)

        # a fork whose parent ends, and then itself
        parent = world.agent("parent")
        await parent.say(prose(60))
        child = parent.fork()
        await child.say(prose(60), parent=parent.ctx, fork_at=len(parent.messages))
        await world.until_confirmed(await child.keys())
        shared = [key for key in await parent.keys() if key in await child.keys()]
        await parent.ops({"op": "close"})
        await world.sweep(DirectiveOutcome.SUPPRESSED)
        assert not set(shared) & world.asked(Reclaim)
        await child.ops({"op": "close"})
        await world.until_settled(await child.keys(), DirectiveOutcome.SUPPRESSED)
        everything |= set(await parent.keys()) | set(await child.keys())

        # a pin that outlives its context
        pinner = world.agent("pinner")
        await pinner.say(prose(60))
        await world.until_confirmed(await pinner.keys())
        await pinner.ops({"op": "pin", "span": "system", "ttl": 600}, {"op": "close"})
        held = await cache.head_keys(pinner.messages[:1])
        behind = [key for key in await pinner.keys() if key not in held]
        await world.until_settled(behind, DirectiveOutcome.SUPPRESSED)
        assert not set(held) & world.asked(Reclaim)
        await pinner.ops({"op": "unpin", "span": "system"})
        await world.until_settled(held, DirectiveOutcome.SUPPRESSED)
        assert await outcomes_of(world, "pin") == ["suppressed"]
        assert await outcomes_of(world, "unpin") == ["suppressed"]
        everything |= set(held) | set(behind)

        assert not live & world.asked(Reclaim)
        assert set(await outcomes_of(world, "reclaim")) == {"suppressed"}
        assert cache.control_writes() == writes
        await cache.await_tiers(sorted(everything), BOTH)
        chats = [exchange.asked for exchange in pipe.of(CHAT)]
        assert len(chats) >= 18
        assert chats == world.sent


async def test_bypass_is_a_byte_pipe_at_once_and_tracks_nothing(
    engine_stack: EngineStack, cache: Cache, pipe: Recording, tmp_path: Path
) -> None:
    async with world_of(cache, before(pipe, engine_stack, tmp_path, Mode.ENFORCE)) as world:
        agent = world.agent("tracked")
        await agent.say(prose(40))
        assert len(world.events(ContextCreated)) == 1

        async def ask(ctx: str) -> tuple[bytes, bytes, bool]:
            """Body sent, answer received, and whether the answer names a context."""
            messages = [{"role": "user", "content": prose(80)}]
            document = {"model": engine_stack.options.model_name, "messages": messages, "max_tokens": 5}
            body = msgspec.json.encode({**document, **PLAIN, "temperature": 0.5})
            headers = {**lifecycle(ctx=ctx, one_off=True), "content-type": "application/json"}
            reply = await world.http.post(f"{world.up.data_url}{CHAT}", content=body, headers=headers)
            assert reply.status_code == 200
            return body, reply.content, CONTEXT_HEADER in reply.headers

        await world.http.post(f"{world.up.admin_url}/kv/v1/bypass", params={"on": True})
        for number in range(3):
            body, answer, named = await ask(f"bypassed-{number}")
            assert pipe.of(CHAT)[-1] == (CHAT, body, answer)
            assert not named
        assert len(world.events(ContextCreated)) == 1

        await world.http.post(f"{world.up.admin_url}/kv/v1/bypass", params={"on": False})
        body, answer, named = await ask("followed")
        assert named
        assert pipe.of(CHAT)[-1].answered == answer
        assert pipe.of(CHAT)[-1].asked != body, "a one-off's hint rides again"
        assert [e.context_id for e in world.events(ContextCreated)][1:] == ["followed"]
