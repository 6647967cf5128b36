"""Unchanged messages are recognised exactly, and normalised once."""

import copy

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine_bridge.errors import Unmappable
from engine_bridge.mapping.history import History
from engine_bridge.mapping.normalise import normalise_message
from tests.engine_bridge.mapping.conversations import Walk


def call(arguments="{}", **extra):
    return {"id": "c", "type": "function", "function": {"name": "f", "arguments": arguments}, **extra}


@given(st.integers(0, 2**32), st.lists(st.sampled_from(("string", "openai")), min_size=1, max_size=8))
def test_a_history_equals_normalising_everything_each_time(seed, formats):
    walk, history = Walk(seed), History()
    for form in formats:
        messages = copy.deepcopy(walk.messages)
        before = history.normal[:]
        common = history.update(messages, form)
        assert history.normal == [normalise_message(message, form) for message in messages]
        assert all(old is new for old, new in zip(before[:common], history.normal[:common], strict=True))
        developers = [at for at, message in enumerate(messages) if message["role"] == "developer"]
        assert history.first_developer == (developers[0] if developers else None)
        walk.step()


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ({"tool_calls": [call(index=1)]}, {"tool_calls": [call(index=True)]}),
        ({"tool_calls": [call(index=1)]}, {"tool_calls": [call(index=1.0)]}),
        ({"tool_calls": [call(a=1, b=2)]}, {"tool_calls": [call(b=2, a=1)]}),
        ({"tool_calls": [call("{}")]}, {"tool_calls": [call("")]}),
        ({"content": "x"}, {"content": "x", "reasoning": "y"}),
    ],
)
def test_messages_that_differ_in_a_prompt_differ_here(one, other):
    base = {"role": "assistant", "content": "x"}
    history = History()
    history.update([{**base, **one}], "string")
    assert history.update([{**base, **one}], "string") == 1
    assert history.update([{**base, **other}], "string") == 0


def test_the_order_of_fields_of_a_message_does_not_matter():
    history = History()
    history.update([{"role": "user", "content": "x"}], "string")
    assert history.update([{"content": "x", "role": "user"}], "string") == 1


def test_a_refused_message_changes_nothing():
    history = History()
    history.update([{"role": "user", "content": "x"}], "string")
    with pytest.raises(Unmappable):
        history.update([{"role": "user", "content": "x"}, {"role": "user", "content": 5}], "string")
    assert len(history.raw) == len(history.normal) == 1
