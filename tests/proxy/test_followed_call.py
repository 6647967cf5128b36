"""Two spellings of one message are one message; two messages never are."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.answer_facts import ChoiceFact, ToolCallFact
from proxy.call_readers import parse_calls
from proxy.followed_call import FollowedCall, MessageHasher

HASHER = MessageHasher(b"a secret")


def parse(body: bytes) -> FollowedCall:
    [read] = parse_calls("/v1/chat/completions", body, HASHER)
    return read


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
    assert parse(body).facts == parse(again).facts


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


def test_several_chat_messages_are_one_message_of_the_client() -> None:
    answer = {"role": "tool", "tool_call_id": "call_1", "content": "ok"}
    words = {"role": "user", "content": "go on"}
    both = HASHER.joined("user", [answer, words])
    assert (both.fact.role, both.answers) == ("user", "call_1")
    assert HASHER.joined("user", [words]) == HASHER.shape(words)
    other = [HASHER.joined("user", parts).fact for parts in ([words, answer], [answer], [words], [])]
    assert len({both.fact, *other}) == 5


def test_a_prompt_of_text_is_not_the_one_of_the_same_ids() -> None:
    prompts = [HASHER.text("prompt", given).fact for given in ("[1]", [1], [1, 2], "1")]
    assert len(set(prompts)) == 4
