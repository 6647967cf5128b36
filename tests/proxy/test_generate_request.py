"""Requests of SGLang's own API: one call a prompt, of the only model there is."""

import json
from typing import Any

import pytest

from engine_bridge.errors import Unmappable
from engine_bridge.mapping.plain import PlainPrompt
from proxy.call_readers import parse_calls
from proxy.followed_call import FollowedCall, NotFollowed
from proxy.tracked_call import can_be_labelled
from tests.proxy.conversations import HASHER


def parse(**fields: Any) -> list[FollowedCall]:
    return list(parse_calls("/generate", json.dumps(fields).encode(), HASHER))


def test_text_and_ids_are_prompts() -> None:
    [text], [ids] = parse(text="a", stream=True), parse(input_ids=[1, 2])
    assert (text.prompt(), ids.prompt()) == (PlainPrompt("a"), PlainPrompt([1, 2]))
    assert (text.model, text.stream, ids.stream) == ("", True, False)
    assert not can_be_labelled(text), "the engine takes no label"
    several = parse(text=["a", "b"], sampling_params={"n": 3})
    assert [(call.num_prompts, call.num_choices) for call in several] == [(2, 3)] * 2
    assert several[0].facts == text.facts


@pytest.mark.parametrize(
    "fields", [{}, {"text": 5}, {"text": "a", "input_ids": [1]}, {"input_ids": [[1], 2]}]
)
def test_what_is_no_prompt_is_not_followed(fields: dict[str, Any]) -> None:
    with pytest.raises(NotFollowed):
        parse(**fields)


@pytest.mark.parametrize("field", ["image_data", "session_params", "lora_path", "input_embeds"])
def test_what_else_makes_a_prompt_is_not_mapped(field: str) -> None:
    [call] = parse(text="a", **{field: ["x"]})
    with pytest.raises(Unmappable):
        call.prompt()
