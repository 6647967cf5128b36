"""Answers of the Responses API, whole or in the events that vLLM writes, cut anywhere."""

import itertools
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.answer_facts import AnswerFacts, ToolCallFact, Usage
from proxy.answer_tap import AnswerTap

Event = dict[str, Any]

THOUGHT = {
    "type": "reasoning",
    "id": "rs",
    "content": [{"type": "reasoning_text", "text": "hm"}],
    "summary": [],
}
SAID = {"type": "message", "id": "m", "role": "assistant", "content": [{"type": "output_text", "text": "é!"}]}
CALL = {"type": "function_call", "id": "fc", "call_id": "call_1", "name": "ls", "arguments": '{"a": 1}'}
CUSTOM = {"type": "custom_tool_call", "id": "ctc", "call_id": "call_2", "name": "sh", "input": "pwd"}
SPACED = {**CALL, "call_id": "call_3", "namespace": "fs"}
OUTPUT = [THOUGHT, SAID, CALL, CUSTOM, SPACED]
USAGE = {"input_tokens": 10, "input_tokens_details": {"cached_tokens": 4}, "output_tokens": 7}


def response(status: str, output: list[Event], **more: Any) -> Event:
    return {"object": "response", "id": "resp_1", "model": "m", "status": status, "output": output, **more}


def event(kind: str, **fields: Any) -> bytes:
    return f"event: {kind}\ndata: {json.dumps({'type': kind, **fields})}\n\n".encode()


def stream(status: str = "completed") -> bytes:
    """As vLLM streams it, whose last event is `response.completed` whatever the status is."""
    parts = [event("response.created", response=response("in_progress", [], usage=None))]
    for at, item in enumerate(OUTPUT):
        parts.append(event("response.output_item.added", output_index=at, item={**item, "content": []}))
        if item is SAID:
            parts.append(event("response.output_text.delta", output_index=at, delta="é!"))
        parts.append(event("response.output_item.done", output_index=at, item=item))
    parts.append(event("response.completed", response=response(status, OUTPUT, usage=USAGE)))
    return b"".join(parts)


def streamed(*pieces: bytes) -> AnswerTap:
    tap = AnswerTap(200, "text/event-stream")
    for piece in pieces:
        tap.feed(piece)
    return tap


def whole(document: Event, status: int = 200) -> AnswerFacts:
    tap = AnswerTap(status, "application/json")
    tap.feed(json.dumps(document).encode())
    tap.close()
    return tap.facts()


def check(facts: AnswerFacts) -> None:
    [choice] = facts.choices
    assert (facts.response_id, facts.model, facts.complete) == ("resp_1", "m", True)
    assert facts.usage == Usage(prompt_tokens=10, completion_tokens=7, cached_tokens=4)
    assert (choice.content, choice.reasoning, choice.finish_reason) == ("é!", "hm", "tool_calls")
    assert choice.tool_calls == (
        ToolCallFact("call_1", "ls", '{"a": 1}'),
        ToolCallFact("call_2", "sh", '{"input": "pwd"}'),
        ToolCallFact("call_3", "fs__ls", '{"a": 1}'),
    )
    assert facts.answer_texts == ("é!",)
    assert not facts.error


@given(st.lists(st.integers(0, len(stream()))))
def test_a_stream_is_read_wherever_it_is_cut(cuts: list[int]) -> None:
    data, edges = stream(), sorted({0, *cuts, len(stream())})
    tap = streamed(*(data[a:b] for a, b in itertools.pairwise(edges)))
    assert tap.finished
    check(tap.facts())


def test_a_whole_answer_is_read() -> None:
    check(whole(response("completed", OUTPUT, usage=USAGE)))


def test_the_first_token_is_the_first_item() -> None:
    tap = streamed(event("response.created", response=response("in_progress", [])))
    assert not tap.first_token
    tap.feed(event("response.output_item.added", output_index=0, item={"type": "message", "content": []}))
    assert tap.first_token
    assert not tap.finished


def test_a_broken_stream_tells_the_calls_that_went_out() -> None:
    tap = streamed(event("response.created", response=response("in_progress", [])))
    tap.feed(event("response.output_item.done", output_index=0, item=CALL))
    facts = tap.facts()
    assert (facts.tool_call_ids, facts.complete, facts.response_id) == (("call_1",), False, "resp_1")


@pytest.mark.parametrize(("status", "finish"), [("completed", "tool_calls"), ("incomplete", "length")])
def test_the_status_is_the_reason(status: str, finish: str) -> None:
    assert streamed(stream(status)).facts().choices[0].finish_reason == finish
    assert whole(response("completed", [SAID])).choices[0].finish_reason == "stop"


def test_each_text_counts_for_itself() -> None:
    two = {**SAID, "content": [*SAID["content"], {"type": "output_text", "text": "more"}]}  # type: ignore[misc]
    assert whole(response("completed", [two, SAID])).answer_texts == ("é!", "more", "é!")


@pytest.mark.parametrize(
    "data",
    [
        event("response.failed", response=response("failed", [], error={"code": "x", "message": "broken"})),
        event("error", code="x", message="broken"),
    ],
)
def test_an_error_in_a_stream_is_one(data: bytes) -> None:
    assert (
        streamed(event("response.created", response=response("in_progress", [])), data).facts().error
        == "broken"
    )


def test_a_refusal_of_the_engine_is_read() -> None:
    assert whole({"error": {"message": "no such response", "code": 404}}, 404).error == "no such response"


@pytest.mark.parametrize(
    "odd",
    [
        {"object": "response"},
        response("completed", [None, 5, {"type": "message", "content": 5}], usage=[]),  # type: ignore[list-item]
        {"type": "response.output_item.added", "item": 5, "output_index": None},
        {"type": "response.completed", "response": 5},
        {"type": "response.unheard.of"},
    ],
)
def test_nothing_an_engine_sends_is_too_odd(odd: Event) -> None:
    whole(odd)
    streamed(f"data: {json.dumps(odd)}\n\n".encode()).facts()
