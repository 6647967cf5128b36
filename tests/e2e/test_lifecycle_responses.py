"""Responses calls on the real stack: sent as a list, and gone on with by the id of a response."""

import json
from typing import Any

import pytest

from lifecycle.core.events import CallEnded, CallMapped, UntrackedForwarded
from lifecycle.core.ids import split_keys
from lifecycle.vocabulary import CallEnd, MappingKind
from tests.e2e.agent import World, calls_tool, lifecycle, prose
from tests.e2e.engine_cache import NOWHERE

NO_THOUGHTS = {"chat_template_kwargs": {"enable_thinking": False}}


async def respond(world: World, headers: dict[str, str], **body: Any) -> tuple[dict[str, Any], str]:
    """One call; answers the response, and the context that it was given to."""
    asked = {"model": world.cache.stack.options.model_name, "max_output_tokens": 80, **NO_THOUGHTS, **body}
    reply = await world.http.post(f"{world.up.data_url}/v1/responses", json=asked, headers=headers)
    reply.raise_for_status()
    context = reply.headers["x-kv-context"]
    if not body.get("stream"):
        return reply.json(), context
    events = [json.loads(line[6:]) for line in reply.text.splitlines() if line.startswith("data: ")]
    assert events[-1]["type"] == "response.completed"
    return events[-1]["response"], context


async def freed(world: World, context: str, keys: list[bytes]) -> None:
    """Proven, and after the context's end nowhere."""
    await world.until_confirmed(keys)
    [result] = await world.ops(f"closes {context}", {"op": "close", "seq": 1, "ctx": context})
    assert result["status"] == "applied"
    await world.until_gone(keys)


@pytest.mark.parametrize("stream", [False, True])
async def test_a_chain_of_responses_is_one_context_proven_and_freed(world: World, stream: bool) -> None:
    instructions, ctx = prose(40), lifecycle(ctx=prose(1))
    asked: dict[str, Any] = {"instructions": instructions, "stream": stream}
    first, context = await respond(world, ctx, input=prose(40), **asked)
    second, again = await respond(world, {}, input=prose(30), previous_response_id=first["id"], **asked)
    items = [{"type": "message", "role": "user", "content": [{"type": "input_text", "text": prose(30)}]}]
    third, _ = await respond(world, {}, input=items, previous_response_id=second["id"], **asked)
    assert context == again
    ends = await world.until(lambda: len(world.events(CallEnded)) == 3 and world.events(CallEnded))
    mapped = world.events(CallMapped)
    assert [m.kind for m in mapped] == [MappingKind.EXACT] * 3
    told = [answer["usage"]["input_tokens"] for answer in (first, second, third)]
    assert [m.num_tokens for m in mapped] == [e.prompt_tokens for e in ends] == told
    assert {e.end for e in ends} == {CallEnd.COMPLETED}
    assert all(e.output_tokens > 0 for e in ends)
    assert not world.events(UntrackedForwarded)
    await freed(world, context, split_keys(mapped[-1].keys))
    stored = {key for m in mapped for key in split_keys(m.keys)}
    await world.cache.await_tiers(sorted(stored), NOWHERE)


async def test_an_agent_with_tools_sends_its_list_and_is_found_by_its_calls(world: World) -> None:
    look = {"type": "function", "name": "look", "description": prose(12), "parameters": {"type": "object"}}
    asked = {"instructions": prose(40), "tools": [look], "store": False, "max_output_tokens": 200}
    said = [{"role": "user", "content": prose(40)}]
    first, context = await respond(world, {}, input=said, **calls_tool("look"), **asked)
    [call] = [item for item in first["output"] if item["type"] == "function_call"]
    result = {"type": "function_call_output", "call_id": call["call_id"], "output": prose(30)}
    second, again = await respond(world, {}, input=[*said, *first["output"], result], stream=True, **asked)
    assert context == again
    mapped = await world.until(lambda: len(world.events(CallMapped)) == 2 and world.events(CallMapped))
    told = [answer["usage"]["input_tokens"] for answer in (first, second)]
    assert [(m.kind, m.num_tokens) for m in mapped] == [(MappingKind.EXACT, count) for count in told]
    await world.until(lambda: len(world.events(CallEnded)) == 2)
    await freed(world, context, split_keys(mapped[-1].keys))


async def test_what_a_response_stands_for_is_forgotten_and_said(world: World) -> None:
    question = prose(20)
    first, _ = await respond(world, lifecycle(ctx=prose(1)), input=question)
    direct = await world.http.post(
        f"{world.cache.stack.upstream_url}/v1/responses",
        json={"model": world.cache.stack.options.model_name, "input": question, "max_output_tokens": 5},
    )
    second, context = await respond(world, {}, input="go on", previous_response_id=direct.json()["id"])
    mapped = await world.until(lambda: len(world.events(CallMapped)) == 2 and world.events(CallMapped))
    assert (mapped[1].kind, mapped[1].reason) == (
        MappingKind.NONE,
        "what previous_response_id stands for is not known",
    )
    assert second["usage"]["input_tokens"] > first["usage"]["input_tokens"] > 0
    assert world.state(context) is not None
