"""What the tap reports of an answer, for any cut, coding and oddity of the stream."""

import gzip
import json
import zlib
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.answer_facts import AnswerFacts, ToolCallFact, Usage
from proxy.answer_tap import AnswerTap
from tests.proxy.scripted_upstream import DONE, chat_answer, chat_chunks, sse


def read(
    stream: bytes, content_type: str = "text/event-stream", coding: str = "", step: int = 7
) -> AnswerFacts:
    tap = AnswerTap(200, content_type, coding)
    for start in range(0, len(stream), step):
        tap.feed(stream[start : start + step])
    tap.close()
    return tap.facts()


@given(
    st.lists(st.text(st.characters(codec="utf-8"), min_size=1)),
    st.integers(1, 50),
    st.sampled_from(["", "gzip", "deflate"]),
)
def test_the_message_is_what_the_deltas_say(pieces: list[str], step: int, coding: str) -> None:
    stream = b"".join(chat_chunks(pieces, prompt_tokens=11, cached_tokens=0))
    encode: dict[str, Any] = {"": bytes, "gzip": gzip.compress, "deflate": zlib.compress}
    facts = read(encode[coding](stream), coding=coding, step=step)
    (choice,) = facts.choices
    assert (choice.content or "") == "".join(pieces)
    assert choice.finish_reason == "stop"
    assert (facts.usage.prompt_tokens, facts.usage.cached_tokens) == (11, 0)
    assert facts.complete
    assert facts.num_malformed == 0


def test_tool_calls_are_put_together_by_index_and_choice() -> None:
    def delta(choice: int, **fields: Any) -> bytes:
        return sse({"id": "c", "choices": [{"index": choice, "delta": fields}]})

    def call(index: int, arguments: str, **more: Any) -> dict[str, Any]:
        function = {"arguments": arguments} | ({"name": more.pop("name")} if "name" in more else {})
        return {"index": index, "function": function, **more}

    stream = (
        delta(1, role="assistant", reasoning_content="hm")
        + delta(0, tool_calls=[call(0, "", id="call_a", name="ls")])
        + delta(0, tool_calls=[call(0, '{"p":'), call(1, "{", id="call_b", name="cat")])
        + delta(0, tool_calls=[call(1, "}"), call(0, "1}")])
    )
    facts = read(stream)
    first, second = facts.choices
    assert first.tool_calls == (ToolCallFact("call_a", "ls", '{"p":1}'), ToolCallFact("call_b", "cat", "{}"))
    assert facts.tool_call_ids == ("call_a", "call_b")
    assert (second.index, second.reasoning, second.content) == (1, "hm", None)
    assert not facts.complete
    assert first.message()["tool_calls"][1]["function"] == {"name": "cat", "arguments": "{}"}


@pytest.mark.parametrize(
    "delta",
    [
        {"content": "x"},
        {"reasoning_content": "x"},
        {"reasoning": "x"},
        {"tool_calls": [{"index": 0, "function": {"name": "f"}}]},
    ],
)
def test_the_first_token_is_the_first_generated_delta(delta: dict[str, Any]) -> None:
    tap = AnswerTap(200, "text/event-stream")
    tap.feed(b": ping\n\n" + sse({"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}}]}))
    assert not tap.first_token
    tap.feed(sse({"choices": [{"index": 0, "delta": delta}]}))
    assert tap.first_token


def test_done_is_seen_at_once_and_nothing_is_invented_without_it() -> None:
    tap = AnswerTap(200, "text/event-stream")
    tap.feed(b"".join(chat_chunks(["a"])[:-1]))
    assert not tap.finished
    tap.feed(DONE)
    assert tap.finished


def test_a_whole_answer() -> None:
    document = chat_answer("Hello", cached_tokens=5)
    document["kv_transfer_params"] = {"cached_token_stats": {"l1": 5}}
    document["prompt_token_ids"] = [1, 2, 3]
    document["choices"][0]["token_ids"] = [4]
    facts = read(json.dumps(document).encode(), "application/json")
    assert facts.choices[0].content == "Hello"
    assert facts.choices[0].token_ids == (4,)
    assert facts.prompt_token_ids == (1, 2, 3)
    assert facts.usage.cached_tokens == 5
    assert facts.kv_transfer_params == {"cached_token_stats": {"l1": 5}}
    assert facts.complete
    assert not facts.streamed


def test_a_chat_stream_of_sglang_is_read() -> None:
    """As its documentation shows it: nulls where others leave a field out, and usage with the last piece."""
    base = {"id": "5f3e", "object": "chat.completion.chunk", "created": 1, "model": "q"}
    call = {
        "id": "call_1",
        "index": 0,
        "type": "function",
        "function": {"name": "ls", "arguments": '{"a": 1}'},
    }
    deltas: list[dict[str, Any]] = [
        {"role": "assistant", "content": "", "reasoning_content": None, "tool_calls": None},
        {"role": None, "content": None, "reasoning_content": "hm", "tool_calls": None},
        {"role": None, "content": "é", "reasoning_content": None, "tool_calls": None},
        {"role": None, "content": None, "reasoning_content": None, "tool_calls": [call]},
    ]
    choices: list[dict[str, Any]] = [
        {"index": 0, "delta": delta, "logprobs": None, "finish_reason": None, "matched_stop": None}
        for delta in deltas
    ]
    ended = {"index": 0, "delta": {"content": None}, "finish_reason": "tool_calls", "matched_stop": None}
    usage = {"prompt_tokens": 12, "total_tokens": 21, "completion_tokens": 9, "reasoning_tokens": 1}
    details = {"prompt_tokens_details": {"cached_tokens": 8}}
    stream = b"".join(sse({**base, "choices": [each], "usage": None}) for each in (*choices, ended))
    facts = read(stream + sse({**base, "choices": [], "usage": {**usage, **details}}) + DONE)
    (choice,) = facts.choices
    assert (choice.content, choice.reasoning, choice.finish_reason) == ("é", "hm", "tool_calls")
    assert choice.tool_calls == (ToolCallFact("call_1", "ls", '{"a": 1}'),)
    assert facts.usage == Usage(prompt_tokens=12, completion_tokens=9, cached_tokens=8)
    assert facts.complete
    without = sse({**base, "choices": [], "usage": {**usage, "prompt_tokens_details": None}})
    assert read(without).usage.cached_tokens is None


def test_token_ids_of_a_stream_add_up() -> None:
    stream = sse({"prompt_token_ids": [9, 8], "choices": [{"index": 0, "delta": {}, "token_ids": [1]}]})
    stream += sse({"choices": [{"index": 0, "delta": {"content": "x"}, "token_ids": [2, 3]}]})
    facts = read(stream)
    assert facts.prompt_token_ids == (9, 8)
    assert facts.choices[0].token_ids == (1, 2, 3)


@pytest.mark.parametrize("error", [{"message": "boom", "code": 500}, "boom"])
def test_an_error_in_the_stream_is_told(error: object) -> None:
    assert read(chat_chunks(["a"])[0] + sse({"error": error}) + DONE).error == "boom"


def test_what_cannot_be_read_is_said() -> None:
    assert read(b"\x00\x01", coding="br").blind == "content-encoding br"
    assert read(b"no gzip at all", coding="gzip").blind == "undecodable content"
    tap = AnswerTap(200, "text/event-stream", limit_bytes=100)
    tap.feed(b"data: " + b"x" * 200)
    assert tap.facts().blind == "answer too large"
    bomb = AnswerTap(200, "application/json", "gzip", limit_bytes=1000)
    bomb.feed(gzip.compress(b"0" * 50_000_000))
    assert bomb.facts().blind == "answer too large"


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=4),
    lambda v: st.lists(v, max_size=2) | st.dictionaries(st.text(max_size=3), v, max_size=2),
)
FIELDS = (
    "id",
    "model",
    "usage",
    "choices",
    "error",
    "prompt_token_ids",
    "kv_transfer_params",
    "delta",
    "index",
)
documents = st.dictionaries(
    st.sampled_from(FIELDS),
    json_values
    | st.lists(
        st.dictionaries(
            st.sampled_from(
                ("delta", "message", "index", "tool_calls", "finish_reason", "token_ids", "text")
            ),
            json_values | st.dictionaries(st.sampled_from(("content", "tool_calls", "role")), json_values),
        )
    ),
)


@given(st.lists(documents | json_values | st.binary(max_size=8), max_size=4))
def test_no_answer_makes_the_tap_fail(parts: list[Any]) -> None:
    stream = b"".join(b"data: " + part + b"\n\n" if isinstance(part, bytes) else sse(part) for part in parts)
    assert isinstance(read(stream), AnswerFacts)
    assert isinstance(read(stream, "application/json"), AnswerFacts)
