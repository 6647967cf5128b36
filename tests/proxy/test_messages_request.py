"""What is read of a Messages request: the client's messages, by what the engine makes of them."""

import json
from typing import Any

import pytest

from lifecycle.core.observations import PinRequest
from proxy.answer_tap import AnswerTap
from proxy.call_readers import parse_calls
from proxy.followed_call import FollowedCall, NotFollowed
from proxy.lineage import BY_CALL_IDS, BY_ECHO, LineageIndex, Relation
from proxy.messages_request import leases
from tests.proxy.conversations import HASHER, fresh

Body = dict[str, Any]


def parse(**fields: Any) -> FollowedCall:
    body = {"model": "m", "max_tokens": 10, "messages": [], **fields}
    [call] = parse_calls("/v1/messages", json.dumps(body).encode(), HASHER)
    return call


def user(content: Any) -> Body:
    return {"role": "user", "content": content}


def text(words: str, ttl: str | None = None) -> Body:
    mark = {"type": "ephemeral"} if ttl == "" else {"type": "ephemeral", "ttl": ttl}
    return {"type": "text", "text": words} | ({} if ttl is None else {"cache_control": mark})


def signed(number: int) -> Body:
    return text(f"x-anthropic-billing-header: cch={number}")


def result(tool_id: str) -> Body:
    return {"type": "tool_result", "tool_use_id": tool_id, "content": "ok"}


def test_messages_are_the_clients_and_the_system_prompt_is_the_head() -> None:
    call = parse(system="be good", messages=[user("one"), user([result("t1"), text("two")])], stream=True)
    assert [message.fact.role for message in call.messages] == ["user", "user"]
    assert call.messages[1].answers == "t1"
    assert call.stream
    assert call.head != parse(system="be bad").head
    assert not call.tells_token_ids


def test_what_the_engine_does_not_see_is_no_difference() -> None:
    one = parse(system=[signed(1), text("s", "1h")], messages=[user([text("a", "")])])
    other = parse(system=[signed(2), text("s")], messages=[user("a")], temperature=1)
    assert (one.head, one.facts) == (other.head, other.facts)
    assert parse(messages=[user([text("b")])]).facts != other.facts


@pytest.mark.parametrize("answered", ["text", "tool"])
def test_an_agent_is_found_again_by_what_was_answered(answered: str) -> None:
    index = LineageIndex()
    context, tool_id = fresh("ctx"), fresh("toolu_abcdef")
    first = [user("look")]
    index.observe_call("t", context, "c", parse(messages=first))
    blocks: list[Body] = [{"type": "thinking", "thinking": "hm", "signature": "s"}, text("I look.")]
    if answered == "tool":
        blocks = [{"type": "tool_use", "id": tool_id, "name": "ls", "input": {"p": "."}}]
    tap = AnswerTap(200, "application/json")
    tap.feed(json.dumps({"type": "message", "role": "assistant", "content": blocks}).encode())
    tap.close()
    answers = [HASHER.shape(choice.message()) for choice in tap.facts().choices]
    index.observe_end("t", context, "c", answers)
    following = user([result(tool_id)]) if answered == "tool" else user("and?")
    again = parse(messages=[*first, {"role": "assistant", "content": blocks}, following])
    match = index.find("t", again)
    assert (match.relation, match.context_id) == (Relation.CONTINUES, context)
    assert match.reason == (BY_CALL_IDS if answered == "tool" else BY_ECHO)


def test_a_mark_with_a_ttl_is_a_lease_and_the_last_of_a_kind_counts() -> None:
    body = {
        "tools": [{"name": "f", "input_schema": {}, "cache_control": {"type": "ephemeral", "ttl": "1h"}}],
        "system": [text("s", "1h"), text("t", "")],
        "messages": [user([text("a", "1h")]), user("b"), user([text("c", "5m"), text("d", "9y")])],
    }
    assert list(leases(body)) == [PinRequest((0, 1), 3600.0), PinRequest((2, 3), 300.0)]
    assert parse(**body).pins == tuple(leases(body))
    assert not list(leases({"messages": [user([text("a", "")])]}))
    assert list(leases({"system": [text("s", "1h")], "messages": [user([text("a", "5m")])]})) == [
        PinRequest("system", 3600.0),
        PinRequest((0, 1), 300.0),
    ]
    whole = {"messages": [user("a"), user("b")], "cache_control": {"type": "ephemeral", "ttl": "1h"}}
    assert list(leases(whole)) == [PinRequest((1, 2), 3600.0)]


@pytest.mark.parametrize(
    ("messages", "reason"),
    [
        ([{"role": "tool", "content": "x"}], "no known role"),
        ([user([{"type": "hologram"}])], "no known type"),
        ([{"role": "system", "content": [{"type": "tool_removal"}]}], "changes the tools"),
    ],
)
def test_what_is_not_replayed_is_not_followed(messages: list[Body], reason: str) -> None:
    with pytest.raises(NotFollowed, match=reason):
        parse(messages=messages)
