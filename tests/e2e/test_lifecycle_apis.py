"""Completions and Messages calls on the real stack: the engine's own tokens, proven and freed."""

from collections.abc import Mapping
from typing import Any

import pytest

from lifecycle.core.events import CallEnded, CallMapped, CallVerified, UntrackedForwarded
from lifecycle.core.ids import split_keys
from lifecycle.vocabulary import CallEnd, MappingKind
from tests.e2e.agent import World, lifecycle, prose

MANY_TOKENS = {"max_tokens": 200, "min_tokens": 200, "ignore_eos": True}


async def send(world: World, path: str, ctx: str, body: Mapping[str, Any]) -> Any:
    """One call; answers what came back."""
    asked = {"model": world.cache.stack.options.model_name, **body}
    reply = await world.http.post(f"{world.up.data_url}{path}", json=asked, headers=lifecycle(ctx=ctx))
    reply.raise_for_status()
    return reply.json() if "json" in reply.headers["content-type"] else reply.text


async def tokens_of(world: World, prompt: str) -> list[int]:
    """A text as the engine encodes it."""
    body = {"model": world.cache.stack.options.model_name, "prompt": prompt}
    reply = await world.http.post(f"{world.cache.stack.upstream_url}/tokenize", json=body)
    return list(reply.json()["tokens"])


async def close(world: World, ctx: str) -> None:
    [result] = await world.ops(f"closes {ctx}", {"op": "close", "seq": 1, "ctx": ctx})
    assert result["status"] == "applied"


@pytest.mark.parametrize("by_ids", [False, True])
async def test_a_completion_is_proven_and_freed_with_what_it_generated(world: World, by_ids: bool) -> None:
    text, ctx = prose(60), prose(1)
    tokens = await tokens_of(world, text)
    body = {"prompt": tokens if by_ids else text, "return_token_ids": True, **MANY_TOKENS}
    reply = await send(world, "/v1/completions", ctx, body)
    assert reply["choices"][0]["prompt_token_ids"] == tokens
    [mapped] = await world.until(lambda: world.events(CallMapped))
    assert (mapped.kind, mapped.num_tokens) == (MappingKind.EXACT, len(tokens))
    computed = [*tokens, *reply["choices"][0]["token_ids"][:-1]]
    keys = await world.cache.keys_of(computed)
    assert mapped.keys == b"".join(await world.cache.keys_of(tokens))
    assert len(keys) > len(mapped.keys) // len(keys[0])
    await world.until_confirmed(keys)
    await close(world, ctx)
    await world.until_gone(keys)


async def test_every_prompt_of_a_completion_is_freed_as_far_as_it_is_known_to_be_ours(world: World) -> None:
    """The engine tells the blocks of several prompts not apart: ours is what the cache was seen without."""
    ctx = prose(1)
    prompts = [await tokens_of(world, prose(40)) for _ in range(3)]
    await send(world, "/v1/completions", ctx, {"prompt": prompts, "max_tokens": 1})
    keys = [key for tokens in prompts for key in await world.cache.keys_of(tokens)]
    await world.until(lambda: len(world.events(CallVerified)) == 3)
    await world.until_confirmed(keys)
    others = world.runtime.tracker.contexts.index.unproven(world.namespace, b"".join(keys))
    await close(world, ctx)
    await world.until_gone([key for key in keys if key not in others])
    assert all(await world.cache.where(others))


@pytest.mark.parametrize("stream", [False, True])
async def test_a_messages_call_is_proven_and_freed(world: World, stream: bool) -> None:
    messages: list[dict[str, Any]] = [
        {"role": "user", "content": [{"type": "text", "text": prose(40)}]},
        {
            "role": "assistant",
            "content": [
                {"type": "text", "text": "I look."},
                {"type": "tool_use", "id": "toolu_1", "name": "look", "input": {"path": "a.py"}},
            ],
        },
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": "toolu_1", "content": prose(20)},
                {"type": "text", "text": "And now?"},
            ],
        },
    ]
    ctx = prose(1)
    look = {"name": "look", "description": prose(8), "input_schema": {"properties": {}}}
    system = [
        {"type": "text", "text": "x-anthropic-billing-header: cch=1"},
        {"type": "text", "text": prose(30)},
    ]
    prompt = {"system": system, "messages": messages, "tools": [look], "thinking": {"type": "disabled"}}
    counted = await send(world, "/v1/messages/count_tokens", "counting", prompt)
    await send(world, "/v1/messages", ctx, {**prompt, "max_tokens": 150, "stream": stream})
    [ended] = await world.until(lambda: world.events(CallEnded))
    [mapped] = world.events(CallMapped)
    assert mapped.num_tokens == ended.prompt_tokens == counted["input_tokens"]
    assert (ended.end, ended.output_tokens > 0) == (CallEnd.COMPLETED, True)
    assert not world.events(UntrackedForwarded), "counting is no inference"
    state = world.state(ctx)
    assert state is not None
    assert [v.role for v in sorted(state.versions.values(), key=lambda v: v.id) if v.index >= 0][:3] == [
        "user",
        "assistant",
        "user",
    ]
    keys = split_keys(mapped.keys)
    await world.until_confirmed(keys)
    await close(world, ctx)
    await world.until_gone(keys)
