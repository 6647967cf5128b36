"""What is read of a completion request: a call for each prompt."""

import json
from typing import Any

import pytest

from engine_bridge.errors import Unmappable
from engine_bridge.mapping.plain import PlainPrompt
from proxy.call_readers import parse_calls
from proxy.followed_call import NotFollowed
from tests.proxy.conversations import HASHER


def parse(**fields: Any) -> Any:
    return parse_calls("/v1/completions", json.dumps({"model": "m", **fields}).encode(), HASHER)


def test_one_prompt_is_one_call_with_one_message() -> None:
    [call] = parse(prompt="once", n=2, stream=True, kv_lifecycle={"ctx": "a"}, add_special_tokens=False)
    assert (call.model, call.num_choices, call.num_prompts, call.stream) == ("m", 2, 1, True)
    assert [message.fact.role for message in call.messages] == ["prompt"]
    assert call.prompt() == PlainPrompt("once", special=False)
    assert call.lifecycle == {"ctx": "a"}


def test_every_prompt_is_a_call_and_the_same_prompt_the_same_message() -> None:
    calls = parse(prompt=[[1, 2], [3], [1, 2]])
    assert [call.prompt().given for call in calls] == [[1, 2], [3], [1, 2]]
    assert {call.num_prompts for call in calls} == {3}
    assert calls[0].facts == calls[2].facts != calls[1].facts
    assert parse(prompt="a")[0].head != parse(prompt="a", add_special_tokens=False)[0].head


def test_a_prompt_that_other_fields_change_is_followed_without_its_tokens() -> None:
    [call] = parse(prompt="def f(", suffix=")")
    with pytest.raises(Unmappable, match="suffix"):
        call.prompt()


@pytest.mark.parametrize("prompt", [None, [], [1.0, 2.0], ["a", 1]])
def test_what_is_no_prompt_is_not_followed(prompt: Any) -> None:
    with pytest.raises(NotFollowed, match="neither text nor token ids"):
        parse(prompt=prompt)
