"""A model that nobody but its engine can render: its own token ids give the chain."""

import json
from pathlib import Path

import msgspec
import pytest

from engine_bridge.stack.engine_stack import EngineStack
from lifecycle.core.events import CallMapped
from lifecycle.vocabulary import MappingKind, Mode
from proxy.config import Config
from tests.e2e.agent import World, config_for, prose, world_of
from tests.e2e.engine_cache import BOTH, NOWHERE, Cache


def without_template(stack: EngineStack, folder: Path) -> Config:
    """The model's directory says that its prompts are written by an encoder of the engine's."""
    directory = folder / "model"
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps({"model_type": "gpt_oss"}))
    config = config_for(stack, folder)
    [model] = config.models
    return msgspec.structs.replace(config, models=(msgspec.structs.replace(model, path=str(directory)),))


def mappings(world: World) -> list[CallMapped]:
    return [each.event for each in world.heard if isinstance(each.event, CallMapped)]


async def test_an_edit_frees_exactly_the_old_chain(
    engine_stack: EngineStack, cache: Cache, tmp_path: Path
) -> None:
    async with world_of(cache, without_template(engine_stack, tmp_path)) as world:
        agent = world.agent("harmony")
        old: set[bytes] = set()
        for _ in range(3):
            await agent.say(prose(60))
            old.update(await agent.keys())
        whole = await agent.keys()
        await world.until_confirmed(whole)
        await cache.await_tiers(whole, BOTH)
        assert {each.kind for each in mappings(world)} == {MappingKind.ENGINE_IDS}

        # Undeclared: the second question is another one. One turn later nobody doubts it any more.
        agent.messages = [*agent.messages[:1], {"role": "user", "content": prose(50)}]
        await agent.call(1)
        agent.messages.append({"role": "assistant", "content": "so be it"})
        await agent.say(prose(50))
        kept = set(await agent.keys()) & old
        dead = sorted(old - kept)
        assert len(kept) >= 2
        assert len(dead) >= 5
        await world.until_gone(dead)
        assert await cache.where(dead) == [NOWHERE] * len(dead)
        assert await cache.where(sorted(kept)) == [BOTH] * len(kept)


@pytest.mark.parametrize("stream", [False, True])
async def test_only_a_client_that_asks_for_ids_gets_them(
    engine_stack: EngineStack, cache: Cache, tmp_path: Path, stream: bool
) -> None:
    async with world_of(cache, without_template(engine_stack, tmp_path)) as world:
        for number, asks in enumerate((True, False), start=1):
            body = {
                "model": engine_stack.options.model_name,
                "messages": [{"role": "user", "content": prose(30)}],
                "max_tokens": 3,
                "stream": stream,
            }
            if asks:
                body["return_token_ids"] = True
            answer = await world.http.post(f"{world.up.data_url}/v1/chat/completions", json=body)
            assert answer.status_code == 200
            assert ("token_ids" in answer.text) is asks
            await world.until(lambda number=number: len(mappings(world)) == number)
        assert {each.kind for each in mappings(world)} == {MappingKind.ENGINE_IDS}


async def test_in_observe_the_engine_is_not_asked(
    engine_stack: EngineStack, cache: Cache, tmp_path: Path
) -> None:
    config = msgspec.structs.replace(without_template(engine_stack, tmp_path), mode=Mode.OBSERVE)
    async with world_of(cache, config) as world:
        body = {
            "model": engine_stack.options.model_name,
            "messages": [{"role": "user", "content": prose(30)}],
            "max_tokens": 1,
        }
        answer = await world.http.post(f"{world.up.data_url}/v1/chat/completions", json=body)
        assert '"token_ids":[' not in answer.text
        await world.until(lambda: mappings(world))
        [mapped] = mappings(world)
        assert mapped.kind is MappingKind.NONE
        assert "Harmony" in mapped.reason
