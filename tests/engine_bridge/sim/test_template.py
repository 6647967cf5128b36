"""The simulated model's template maps exactly, and what is generated reads back as it was."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine_bridge.mapping.mapper import ChatMapper, MappingState
from engine_bridge.mapping.model_profile import ModelProfile
from engine_bridge.mapping.prompts import ChatPrompt
from engine_bridge.sim.model_files import MODEL_DIRECTORY
from engine_bridge.sim.template import DONE, MARKS
from tests.engine_bridge.mapping.conversations import Walk, plain_keys, plain_text

PROFILE = ModelProfile.load(MODEL_DIRECTORY, "sim")
CHUNK = 16


@pytest.mark.parametrize("seed", range(6))
def test_a_conversation_that_grows_and_is_edited_maps_exactly(seed):
    mapper, conversation, state = ChatMapper(PROFILE, CHUNK), Walk(seed), MappingState()
    resumed = 0
    for _ in range(25):
        prompt = conversation.prompt()
        mapped = mapper.map(prompt, state)
        ids = PROFILE.tokenizer.encode(plain_text(mapper, prompt)).tolist()
        assert mapped.token_ids.tolist() == ids
        assert mapped.chunk_keys == plain_keys(ids, CHUNK)
        resumed += mapped.num_kept_tokens > 0
        conversation.step()
    assert resumed >= 10


@given(st.text(max_size=40), st.dictionaries(st.text(max_size=5), st.integers() | st.text(max_size=5)))
def test_what_was_generated_has_the_same_tokens_when_it_is_sent_back(text, arguments):
    mapper = ChatMapper(PROFILE, CHUNK)
    question = [{"role": "user", "content": "Look it up."}]
    asked = mapper.map(ChatPrompt(messages=question))
    call = {"name": "look", "arguments": json.dumps(arguments)}
    answer = {
        "role": "assistant",
        "content": text,
        "tool_calls": [{"id": "c", "type": "function", "function": call}],
    }
    again = mapper.map(ChatPrompt(messages=[*question, answer], add_generation_prompt=False))
    generated = again.token_ids[asked.num_tokens :]
    assert again.token_ids[: asked.num_tokens] == asked.token_ids
    decoded = PROFILE.tokenizer.backend.decode(generated.tolist(), skip_special_tokens=False)
    assert PROFILE.tokenizer.encode(decoded) == generated
    assert decoded.endswith(DONE)


def test_marks_are_single_tokens_and_end_every_turn():
    assert [len(PROFILE.tokenizer.encode(mark)) for mark in MARKS] == [1, 1, 1, 1]
