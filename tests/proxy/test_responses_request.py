"""What is read of a Responses request: the client's items, by what the engine makes of them."""

import json
from typing import Any

import pytest

from engine_bridge.mapping.responses import ResponsesPrompt
from proxy.answer_tap import AnswerTap
from proxy.call_readers import parse_calls
from proxy.followed_call import FollowedCall, NotFollowed
from proxy.lineage import BY_CALL_IDS, BY_ECHO, LineageIndex, Relation
from tests.proxy.conversations import HASHER, fresh

Body = dict[str, Any]


def parse(given: Any, **fields: Any) -> FollowedCall:
    body = {"model": "m", "input": given, **fields}
    [call] = parse_calls("/v1/responses", json.dumps(body).encode(), HASHER)
    return call


def user(content: Any) -> Body:
    return {"role": "user", "content": content}


def thought(text: str) -> Body:
    content = [{"type": "reasoning_text", "text": text}]
    return {"type": "reasoning", "id": fresh("rs"), "summary": [], "content": content}


def said(text: str) -> Body:
    content = [{"type": "output_text", "text": text, "annotations": []}]
    return {
        "type": "message",
        "id": fresh("msg"),
        "role": "assistant",
        "status": "completed",
        "content": content,
    }


def called(call_id: str) -> Body:
    return {"type": "function_call", "id": fresh("fc"), "call_id": call_id, "name": "ls", "arguments": "{}"}


def test_messages_are_the_items_and_instructions_are_the_head() -> None:
    output = {"type": "function_call_output", "call_id": "c1", "output": "ok"}
    call = parse([user("q"), thought("hm"), called("c1"), output], instructions="be good", stream=True)
    assert [message.fact.role for message in call.messages] == ["user", "assistant", "assistant", "tool"]
    assert call.messages[1].tool_call_ids == call.messages[2].tool_call_ids == ("c1",)
    assert call.messages[3].answers == "c1"
    assert call.stream
    assert call.head == parse("other", instructions="be good", temperature=1).head
    assert call.head != parse("other", instructions="be bad").head
    assert not call.tells_token_ids
    assert isinstance(call.prompt(), ResponsesPrompt)


def test_what_the_engine_does_not_see_is_no_difference() -> None:
    one = parse([user([{"type": "input_text", "text": "a"}]), {**said("b"), "phase": "final_answer"}])
    other = parse([{**user([{"type": "input_text", "text": "a"}]), "type": "message", "id": "x"}, said("b")])
    assert one.facts == other.facts
    assert parse("a").facts == parse([user("a")]).facts != parse([user("b")]).facts


@pytest.mark.parametrize("answered", ["text", "tool"])
def test_an_agent_is_found_again_by_what_was_answered(answered: str) -> None:
    index = LineageIndex()
    context, tool_id = fresh("ctx"), fresh("call_abcdef")
    index.observe_call("t", context, "c", parse([user("look")]))
    output = [thought("hm"), said("I look.") if answered == "text" else called(tool_id)]
    tap = AnswerTap(200, "application/json")
    tap.feed(json.dumps({"object": "response", "id": "r", "status": "completed", "output": output}).encode())
    tap.close()
    answers = [HASHER.shape(choice.message()) for choice in tap.facts().choices]
    index.observe_end("t", context, "c", answers)
    following = {"type": "function_call_output", "call_id": tool_id, "output": "ok"}
    again = parse([user("look"), *output, user("and?") if answered == "text" else following])
    match = index.find("t", again)
    assert (match.relation, match.context_id) == (Relation.CONTINUES, context)
    assert match.reason == (BY_CALL_IDS if answered == "tool" else BY_ECHO)


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"background": True}, "outlives"),
        ({"previous_response_id": 5}, "not text"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "not supported"),
        ({"prompt": {"id": "x"}}, "stored prompt"),
    ],
)
def test_what_is_not_replayed_is_not_followed(fields: Body, reason: str) -> None:
    with pytest.raises(NotFollowed, match=reason):
        parse(**{"given": fields.pop("input", "x"), **fields})
