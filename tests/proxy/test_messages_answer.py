"""Answers of the Messages API, whole or in the events that vLLM writes, cut anywhere."""

import itertools
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.answer_facts import AnswerFacts, ToolCallFact, Usage
from proxy.answer_tap import AnswerTap

Event = dict[str, Any]


def event(kind: str, **fields: Any) -> bytes:
    return f"event: {kind}\ndata: {json.dumps({'type': kind, **fields})}\n\n".encode()


def head(**usage: int) -> bytes:
    message = {"id": "msg_1", "type": "message", "role": "assistant", "content": [], "model": "m"}
    return event("message_start", message={**message, "usage": {"output_tokens": 0, **usage}})


def block(index: int, opened: Event, *deltas: Event) -> bytes:
    return (
        event("content_block_start", index=index, content_block=opened)
        + b"".join(event("content_block_delta", index=index, delta=delta) for delta in deltas)
        + event("content_block_stop", index=index)
    )


def end(reason: str, **usage: int) -> bytes:
    return event("message_delta", delta={"stop_reason": reason}, usage=usage) + event("message_stop")


TOOL = {"type": "tool_use", "id": "toolu_1", "name": "ls", "input": {}}
WHOLE = (
    head(input_tokens=10)
    + event("ping")
    + block(0, {"type": "thinking", "thinking": ""}, {"type": "thinking_delta", "thinking": "hm"})
    + block(
        1,
        {"type": "text", "text": ""},
        {"type": "text_delta", "text": "é"},
        {"type": "text_delta", "text": "!"},
    )
    + block(2, TOOL, *({"type": "input_json_delta", "partial_json": part} for part in ('{"a"', ": 1}")))
    + end("tool_use", input_tokens=4, output_tokens=7, cache_read_input_tokens=6)
)


def streamed(*pieces: bytes) -> AnswerTap:
    tap = AnswerTap(200, "text/event-stream")
    for piece in pieces:
        tap.feed(piece)
    return tap


@given(st.lists(st.integers(0, len(WHOLE)), max_size=8).map(sorted))
def test_a_stream_tells_what_a_chat_answer_would(cuts: list[int]) -> None:
    edges = [0, *cuts, len(WHOLE)]
    tap = streamed(*(WHOLE[a:b] for a, b in itertools.pairwise(edges)))
    assert tap.finished
    assert tap.first_token
    facts = tap.facts()
    [choice] = facts.choices
    assert (choice.content, choice.reasoning, choice.finish_reason) == ("é!", "hm", "tool_use")
    assert choice.tool_calls == (ToolCallFact("toolu_1", "ls", '{"a": 1}'),)
    assert facts.usage == Usage(prompt_tokens=10, completion_tokens=7, cached_tokens=6)
    assert (facts.response_id, facts.model, facts.complete, facts.num_malformed) == ("msg_1", "m", True, 0)


def test_a_stream_that_breaks_off_has_counted_its_prompt_and_nothing_else() -> None:
    tap = streamed(head(input_tokens=10))
    assert not tap.first_token
    tap.feed(block(0, {"type": "text", "text": ""}, {"type": "text_delta", "text": "a"}))
    assert tap.first_token
    assert not tap.finished
    facts = tap.facts()
    assert facts.usage == Usage(prompt_tokens=10)
    assert not facts.complete


def test_a_whole_answer() -> None:
    document = {
        "id": "msg_1",
        "type": "message",
        "model": "m",
        "content": [{"type": "text", "text": "a"}, {**TOOL, "input": {"b": 2}}],
        "stop_reason": "tool_use",
        "usage": {"input_tokens": 3, "output_tokens": 2},
    }
    tap = AnswerTap(200, "application/json")
    tap.feed(json.dumps(document).encode())
    tap.close()
    facts = tap.facts()
    assert tap.finished
    assert facts.tool_call_ids == ("toolu_1",)
    assert facts.choices[0].message()["tool_calls"][0]["function"] == {"name": "ls", "arguments": '{"b": 2}'}
    assert facts.usage == Usage(prompt_tokens=3, completion_tokens=2)


def test_an_error_is_an_error() -> None:
    error = {"type": "internal_error", "message": "it broke"}
    assert streamed(head(input_tokens=1), event("error", error=error)).facts().error == "it broke"


@pytest.mark.parametrize(
    "odd",
    [
        {"message": None},
        {"message": {"id": 1, "usage": {"input_tokens": "3"}}},
        {"index": "x", "content_block": [], "delta": 5},
        {"usage": []},
    ],
)
@pytest.mark.parametrize(
    "kind", ["message", "message_start", "content_block_start", "message_delta", "message_stop"]
)
def test_nothing_an_engine_sends_raises(kind: str, odd: Event) -> None:
    tap = streamed(event(kind, **odd), event("content_block_delta", **odd))
    tap.close()
    assert isinstance(tap.facts(), AnswerFacts)
