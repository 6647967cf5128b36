"""Deployments that are not what we take them for: nothing is deleted, and the reason is told."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from engine_bridge.stack.engine_stack import EngineStack
from lifecycle.vocabulary import DirectiveOutcome
from proxy.config import Config
from tests.e2e.agent import Agent, World, config_for, prose, world_of
from tests.e2e.engine_cache import BOTH, Cache
from tests.e2e.recording_upstream import recording

TEMPLATE = "chat_template"


def another_model(stack: EngineStack, folder: Path, change: Callable[[Path], None]) -> Path:
    """The engine's model directory without its weights, changed."""
    copy = folder / "model"
    shutil.copytree(stack.model_path, copy, ignore=shutil.ignore_patterns("*.safetensors"))
    change(copy)
    return copy


def edit_json(path: Path, change: Callable[[dict[str, Any]], None]) -> None:
    document = json.loads(path.read_text())
    change(document)
    path.write_text(json.dumps(document))


def without_merges(model: Path) -> None:
    """A tokenizer that knows bytes only."""
    edit_json(model / "tokenizer.json", lambda document: document["model"].update(merges=[]))


def with_two_tokens_swapped(model: Path) -> None:
    """A tokenizer that is wrong about two letters that the self-test does not happen to use."""

    def swap(document: dict[str, Any]) -> None:
        vocabulary = document["model"]["vocab"]
        vocabulary["Ġq"], vocabulary["Ġz"] = vocabulary["Ġz"], vocabulary["Ġq"]

    edit_json(model / "tokenizer.json", swap)


def with_another_template(model: Path) -> None:
    """A template of another revision: one more line break behind every role."""

    def change(document: dict[str, Any]) -> None:
        template = document[TEMPLATE]
        document[TEMPLATE] = template.replace("message.role + '\\n'", "message.role + '\\n\\n'").replace(
            "<|im_start|>system\\n", "<|im_start|>system\\n\\n"
        )
        assert document[TEMPLATE] != template

    edit_json(model / "tokenizer_config.json", change)


def for_model(stack: EngineStack, folder: Path, change: Callable[[Path], None]) -> Config:
    config = config_for(stack, folder)
    [model] = config.models
    path = str(another_model(stack, folder, change))
    return msgspec.structs.replace(config, models=(msgspec.structs.replace(model, path=path),))


async def a_life(world: World) -> tuple[Agent, list[bytes]]:
    """An agent that lives, edits and closes; the chunks that its calls really stored."""
    agent = world.agent("stranger", system="q q q q " + prose(70))
    await agent.say(prose(60))
    await agent.say(prose(60))
    stored = await agent.keys()
    await world.cache.await_tiers(stored, BOTH)
    return agent, stored


async def readiness(world: World) -> dict[str, Any]:
    return dict((await world.http.get(f"{world.up.admin_url}/readyz")).json())


async def test_a_wrong_tokenizer_is_found_at_start(
    engine_stack: EngineStack, cache: Cache, tmp_path: Path
) -> None:
    config = for_model(engine_stack, tmp_path, without_merges)
    async with world_of(cache, config, controls=False) as world:
        ready = await readiness(world)
        assert ready["control"] is False
        assert any("our tokenizer and the engine's differ" in problem for problem in ready["problems"])
        await nothing_is_deleted(world, because="probe 'user': ")


async def test_a_wrong_chunk_size_is_found_at_start(
    engine_stack: EngineStack, cache: Cache, tmp_path: Path
) -> None:
    config = config_for(engine_stack, tmp_path)
    config = msgspec.structs.replace(config, cache=msgspec.structs.replace(config.cache, chunk_size=256))
    async with world_of(cache, config, controls=False) as world:
        ready = await readiness(world)
        assert ready["control"] is False
        assert any("set the chunk size to 64" in problem for problem in ready["problems"])
        await nothing_is_deleted(world)


async def test_a_wrong_template_is_found_at_start(
    engine_stack: EngineStack, cache: Cache, tmp_path: Path
) -> None:
    async with world_of(cache, for_model(engine_stack, tmp_path, with_another_template)) as world:
        [problem] = (await readiness(world))["problems"]
        assert problem.startswith("model tiny: probe 'user': ids differ at token ")
        assert "set models[].path to the directory that the engine serves" in problem
        await nothing_is_deleted(world, because="probe 'user': ")


async def test_what_no_test_at_start_can_see_is_found_by_the_keys(
    engine_stack: EngineStack, cache: Cache, tmp_path: Path
) -> None:
    async with world_of(cache, for_model(engine_stack, tmp_path, with_two_tokens_swapped)) as world:
        ready = await readiness(world)
        assert (ready["control"], ready["problems"]) == (True, [])
        await nothing_is_deleted(world)


async def nothing_is_deleted(world: World, because: str = "verify: ") -> None:
    """A whole life and a second one behind it: both unmapped with a reason, no delete, every chunk left."""
    deletes = world.cache.control_writes()
    agent, stored = await a_life(world)
    await world.until(lambda: unmapped(world, agent))
    agent.messages[2:] = [{"role": "user", "content": prose(20)}]
    await agent.call()
    await agent.ops({"op": "close"})
    # The second one's verification takes seconds, in which the reclaim loop has looked at the first.
    other, others = await a_life(world)
    reason = await world.until(lambda: unmapped(world, other))
    assert reason.startswith(because)
    assert (await world.view(other.ctx))["unmapped"] == reason
    assert world.cache.control_writes() == deletes
    assert await world.cache.where(stored + others) == [BOTH] * len(stored + others)


def unmapped(world: World, agent: Agent) -> str:
    """Why the agent's context is unmapped; empty while it is not."""
    state = world.state(agent.ctx)
    return state.unmapped if state is not None else ""


async def test_adapters_without_a_salt_are_found_at_start(
    engine_stack: EngineStack, cache: Cache, tmp_path: Path
) -> None:
    name = engine_stack.options.model_name

    def with_adapter(answer: bytes) -> bytes:
        listed = json.loads(answer)
        listed["data"].append({**listed["data"][0], "id": "poet", "root": "/adapters/poet", "parent": name})
        return json.dumps(listed).encode()

    async with recording(engine_stack.upstream_url, {"/v1/models": with_adapter}) as pipe:
        config = config_for(engine_stack, tmp_path)
        upstream = msgspec.structs.replace(config.upstream, url=pipe.url)
        config = msgspec.structs.replace(config, upstream=upstream)
        async with world_of(cache, config, controls=False) as world:
            ready = await readiness(world)
            assert ready["control"] is False
            expected = "adapters poet share cache keys with their base model: salt their calls by adapter"
            assert expected in ready["problems"]
            deletes = cache.control_writes()
            agent, stored = await a_life(world)
            await world.until_confirmed(stored)
            await agent.ops({"op": "close"})
            await world.until_settled(stored, DirectiveOutcome.SUPPRESSED)
            reasons = {
                d["result"]["reason"] for d in await world.directives() if d["outcome"] == "suppressed"
            }
            assert reasons == {expected}
            assert cache.control_writes() == deletes
            assert await cache.where(stored) == [BOTH] * len(stored)
