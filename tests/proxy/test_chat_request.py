"""Two spellings of one message are one message; two messages never are."""

import json
import threading
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.answer_tap import ChoiceFact, ToolCallFact
from proxy.chat_request import OFF_LOOP_BYTES, MessageHasher, NotAChatCall, parse_chat_call, read_chat_call

HASHER = MessageHasher(b"a secret")


def parse(**fields: Any) -> Any:
    return parse_chat_call(json.dumps({"model": "m", "messages": [], **fields}).encode(), HASHER)


def digest(message: dict[str, Any]) -> bytes:
    return HASHER.shape({"role": "user", **message}).fact.digest


def call(arguments: Any, **more: Any) -> dict[str, Any]:
    return {"id": "call_1", "type": "function", "function": {"name": "f", "arguments": arguments}, **more}


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ({"content": "a", "name": None}, {"name": None, "content": "a"}),
        ({"content": "a", "name": None}, {"content": "a"}),
        ({"content": [{"type": "text", "text": "a"}]}, {"content": "a"}),
        ({"content": None, "tool_calls": [call("{}")]}, {"tool_calls": [call("{}")]}),
        ({"content": "", "tool_calls": [call("{}")]}, {"tool_calls": [call("{}")]}),
        ({"tool_calls": [call('{"a": 1, "b": 2}')]}, {"tool_calls": [call({"b": 2, "a": 1})]}),
        ({"tool_calls": [call("{}", index=0)]}, {"tool_calls": [call("{}")]}),
        ({"content": "a", "tool_calls": [], "annotations": []}, {"content": "a"}),
        ({"content": "a", "reasoning_content": "r"}, {"content": "a", "reasoning": "r"}),
    ],
)
def test_spellings_of_one_message(one: dict[str, Any], other: dict[str, Any]) -> None:
    assert digest(one) == digest(other)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ({"content": "a"}, {"content": "b"}),
        ({"content": "a"}, {"content": "a", "role": "assistant"}),
        ({"content": "a"}, {"content": "a "}),
        ({"tool_calls": [call("{}")]}, {"tool_calls": [call('{"a":1}')]}),
        ({"tool_calls": [call("{}")]}, {"tool_calls": [call("{}", id="call_2")]}),
        ({"content": "a"}, {"content": "a", "reasoning": "r"}),
    ],
)
def test_different_messages(one: dict[str, Any], other: dict[str, Any]) -> None:
    assert digest(one) != digest(other)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(st.characters(codec=None)),
    lambda v: st.lists(v, max_size=3) | st.dictionaries(st.text(), v, max_size=3),
)


@given(st.dictionaries(st.text(), json_values, max_size=4), st.randoms())
def test_the_digest_knows_no_order_of_keys_and_no_parser(fields: dict[str, Any], random: Any) -> None:
    message = {**fields, "role": "user"}
    names = list(message)
    random.shuffle(names)
    shuffled = {name: message[name] for name in names}
    body = json.dumps({"messages": [message]}).encode()
    again = json.dumps({"messages": [shuffled], "x": float("nan")}).encode()
    assert parse_chat_call(body, HASHER).facts == parse_chat_call(again, HASHER).facts


def test_keys_keep_digests_apart() -> None:
    other = MessageHasher(b"another secret")
    message = {"role": "user", "content": "a"}
    assert HASHER.shape(message).fact != other.shape(message).fact


def test_an_answer_is_recognised_when_it_comes_back() -> None:
    choice = ChoiceFact(
        index=0,
        content="<think>hm</think>\n\nDone. ",
        reasoning="hm",
        tool_calls=(ToolCallFact("call_1", "f", '{"a": 1}'),),
    )
    answer = HASHER.shape(choice.message())
    assert answer.tool_call_ids == ("call_1",)
    back = {"role": "assistant", "content": "Done.", "tool_calls": [call({"a": 1})]}
    assert HASHER.echo(back) == answer.echo != b""
    assert HASHER.echo({**back, "content": "Done!"}) != answer.echo
    assert HASHER.echo({"role": "assistant", "content": " "}) == b""


def test_what_is_read_of_a_request() -> None:
    read = parse(
        messages=[
            {"role": "system", "content": "s"},
            {"role": "assistant", "tool_calls": [call("{}")]},
            {"role": "tool", "tool_call_id": "call_1", "content": "ok"},
        ],
        stream=True,
        n=2,
        stream_options={"include_usage": True},
        return_token_ids=True,
        kv_lifecycle={"ctx": "a"},
    )
    assert [message.fact.role for message in read.messages] == ["system", "assistant", "tool"]
    assert [message.tool_call_ids for message in read.messages] == [(), ("call_1",), ()]
    assert read.messages[2].answers == "call_1"
    assert (read.model, read.stream, read.num_choices, read.include_usage) == ("m", True, 2, True)
    assert read.wants_token_ids
    assert read.lifecycle == {"ctx": "a"}


@pytest.mark.parametrize(
    ("field", "value", "same"),
    [
        ("tools", [{"type": "function"}], False),
        ("model", "other", False),
        ("chat_template_kwargs", {"enable_thinking": False}, False),
        ("temperature", 1, True),
        ("tools", None, True),
        ("stream", True, True),
    ],
)
def test_the_head_is_what_the_template_sees(field: str, value: object, same: bool) -> None:
    assert (parse().head == parse(**{field: value}).head) is same


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"[]",
        b"{}",
        b"nonsense",
        b'{"messages": 1}',
        b'{"messages": [1]}',
        b'{"messages": [{}]}',
        b'{"messages": [{"role": "\\ud800"}]}',
        b'{"messages": [], "model": "\\ud800"}',
        b'{"messages": [], "model": 7}',
        b"[" * 100_000,
        b'{"messages": [{"role": "user", "content": ' + b"[" * 900 + b"]" * 900 + b"}]}",
        b'\xff\xfe{"messages": []}',
    ],
)
def test_what_is_no_chat_call_is_said_to_be_none_or_read(body: bytes) -> None:
    try:
        read = parse_chat_call(body, HASHER)
    except NotAChatCall:
        return
    assert len(read.messages) == 1


@pytest.mark.parametrize("n", [0, -1, True, "2", 1.5, None])
def test_a_nonsense_number_of_choices_is_one(n: object) -> None:
    assert parse(n=n).num_choices == 1


async def test_large_bodies_are_read_off_the_event_loop() -> None:
    class Spy(MessageHasher):
        thread = 0

        def head(self, document: Any) -> bytes:
            self.thread = threading.get_ident()
            return super().head(document)

    for size, on_loop in ((10, True), (OFF_LOOP_BYTES, False)):
        spy = Spy(b"k")
        body = json.dumps({"messages": [{"role": "user", "content": "x" * size}]}).encode()
        assert len((await read_chat_call(body, spy)).messages) == 1
        assert (spy.thread == threading.get_ident()) is on_loop
