"""What is read of a chat completion request, and what is not one."""

import json
from typing import Any

import pytest

from proxy.call_readers import parse_calls
from proxy.followed_call import FollowedCall, NotFollowed
from tests.proxy.conversations import HASHER

CHAT = "/v1/chat/completions"


def parse(**fields: Any) -> FollowedCall:
    body = json.dumps({"model": "m", "messages": [], **fields}).encode()
    [read] = parse_calls(CHAT, body, HASHER)
    return read


def call(arguments: str) -> dict[str, Any]:
    return {"id": "call_1", "type": "function", "function": {"name": "f", "arguments": arguments}}


def test_what_is_read_of_a_request() -> None:
    read = parse(
        messages=[
            {"role": "system", "content": "s"},
            {"role": "assistant", "tool_calls": [call("{}")]},
            {"role": "tool", "tool_call_id": "call_1", "content": "ok"},
        ],
        stream=True,
        n=2,
        return_token_ids=True,
        kv_lifecycle={"ctx": "a"},
    )
    assert [message.fact.role for message in read.messages] == ["system", "assistant", "tool"]
    assert [message.tool_call_ids for message in read.messages] == [(), ("call_1",), ()]
    assert read.messages[2].answers == "call_1"
    assert (read.model, read.stream, read.num_choices) == ("m", True, 2)
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
        [read] = parse_calls(CHAT, body, HASHER)
    except NotFollowed:
        return
    assert len(read.messages) == 1


@pytest.mark.parametrize("n", [0, -1, True, "2", 1.5, None])
def test_a_nonsense_number_of_choices_is_one(n: object) -> None:
    assert parse(n=n).num_choices == 1
