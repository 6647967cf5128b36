"""Conversations behind response ids: gone on with, bounded, never guessed."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine_bridge.errors import Unmappable
from proxy.answer_facts import AnswerFacts
from proxy.call_readers import parse_calls
from proxy.followed_call import FollowedCall
from proxy.response_chains import UNKNOWN, ResponseChains
from tests.proxy.conversations import HASHER


def asks(text: Any, follows: str | None = None, **fields: Any) -> FollowedCall:
    body = {"model": "m", "input": text, "previous_response_id": follows, **fields}
    [call] = parse_calls("/v1/responses", json.dumps(body).encode(), HASHER)
    return call


def texts(call: FollowedCall) -> list[tuple[str, str]]:
    messages = call.prompt().converted().prompt.messages  # type: ignore[union-attr, call-arg]
    return [(message["role"], message["content"]) for message in messages]


def answer(
    chains: ResponseChains, call: FollowedCall, response_id: str, *said: str, tenant: str = "t"
) -> None:
    chains.remember(tenant, call, AnswerFacts(response_id=response_id, answer_texts=said))


def test_a_call_stands_behind_the_conversation_that_it_names() -> None:
    chains = ResponseChains(HASHER)
    first = asks([{"role": "system", "content": "once"}, {"role": "user", "content": "a"}])
    answer(chains, first, "r1", "b")
    second = chains.resolved("t", asks("c", "r1", instructions="new"))
    assert texts(second) == [("system", "new"), ("user", "a"), ("assistant", "b"), ("user", "c")]
    assert [message.fact.role for message in second.messages] == ["user", "assistant", "user"]
    answer(chains, second, "r2", "d")
    assert texts(chains.resolved("t", asks("e", "r2")))[-2:] == [("assistant", "d"), ("user", "e")]
    assert texts(chains.resolved("t", asks("x", "r1")))[-1] == ("user", "x"), "it may be named again"


def test_what_goes_on_with_a_response_tells_so() -> None:
    chains = ResponseChains(HASHER)
    answer(chains, asks("a"), "r1")
    answer(chains, asks("a"), "r2", "said")
    silent = chains.resolved("t", asks("c", "r1"))
    assert silent.messages[1].tool_call_ids == ("r1",)
    assert chains.resolved("t", asks("c", "r2")).messages[1].tool_call_ids == ("r2",)


@pytest.mark.parametrize("case", ["never seen", "another tenant's", "not to be kept"])
def test_what_is_not_known_is_not_guessed(case: str) -> None:
    chains = ResponseChains(HASHER)
    if case == "another tenant's":
        answer(chains, asks("a"), "r1", "b", tenant="other")
    if case == "not to be kept":
        answer(chains, asks("a", store=False), "r1", "b")
    call = chains.resolved("t", asks("c", "r1"))
    with pytest.raises(Unmappable, match=UNKNOWN):
        call.prompt()
    assert call.messages[0].fact != asks("c").messages[0].fact, "no list of others begins with it"
    answer(chains, call, "r2", "d")
    following = chains.resolved("t", asks("e", "r2"))
    with pytest.raises(Unmappable, match=UNKNOWN):
        following.prompt()
    assert following.messages[:2] == call.messages[:2]


def test_other_calls_stay_as_they_are() -> None:
    [chat] = parse_calls("/v1/chat/completions", b'{"messages": [{"role": "user", "content": "a"}]}', HASHER)
    chains = ResponseChains(HASHER)
    assert chains.resolved("t", chat) is chat
    chains.remember("t", chat, AnswerFacts(response_id="r"))
    assert len(chains) == 0


@given(st.lists(st.tuples(st.integers(0, 9), st.text("x", max_size=300)), max_size=40))
def test_the_text_is_bounded_and_the_latest_stay(steps: list[tuple[int, str]]) -> None:
    chains = ResponseChains(HASHER, max_bytes=4_000)
    for number, (named, text) in enumerate(steps):
        call = chains.resolved("t", asks(text, f"r{named}"))
        answer(chains, call, f"r{number}", "ok")
        assert chains.size_bytes <= 4_000
        assert (chains.size_bytes == 0) == (len(chains) == 0)


def test_a_conversation_that_was_gone_on_with_goes_first() -> None:
    answered = asks("a" * 1_000)
    chains = ResponseChains(HASHER, max_bytes=6_000)
    answer(chains, answered, "other")
    answer(chains, answered, "r1")
    answer(chains, chains.resolved("t", asks("b", "r1")), "r2")
    answer(chains, answered, "r3")
    answer(chains, answered, "r4")
    known = [name for name in ("other", "r1", "r2", "r3", "r4") if _known(chains, name)]
    assert known == ["other", "r2", "r3", "r4"]


def _known(chains: ResponseChains, response_id: str) -> bool:
    try:
        chains.resolved("t", asks("?", response_id)).prompt()
    except Unmappable:
        return False
    return True
