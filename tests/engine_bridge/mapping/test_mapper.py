"""A mapping that grew with its conversation equals one made from nothing, and both equal the plain way."""

import contextlib
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine_bridge.errors import RejectedByEngine, Unmappable
from engine_bridge.mapping.mapper import ChatMapper, MappingState
from engine_bridge.mapping.prompts import ChatPrompt
from engine_bridge.mapping.ranges import MappedPrompt
from tests.engine_bridge.mapping.conversations import (
    CHATML,
    Walk,
    comparable,
    has_real,
    plain_keys,
    plain_text,
    real_profile,
    template_files,
    toy_profile,
)

SMALL_CHUNK = 16
REAL = ("qwen3", "llama3_1", "deepseek_v3", "gemma3")


def check(mapper: ChatMapper, mapped: MappedPrompt, prompt: ChatPrompt) -> None:
    """One result against the plain render, a full encode and keys from their definition."""
    ids = mapper.profile.tokenizer.encode(plain_text(mapper, prompt)).tolist()
    assert mapped.token_ids.tolist() == ids
    assert mapped.num_tokens == len(ids)
    assert mapped.chunk_keys == plain_keys(ids, mapper.chunk_tokens)
    ends = (mapped.head_end, *mapped.message_ends, mapped.num_tokens)
    assert list(ends) == sorted(ends)
    assert ends[0] >= 0
    assert len(mapped.message_ends) == len(prompt.messages)
    assert 0 <= mapped.tools_end <= mapped.num_tokens


def walk(mapper: ChatMapper, seed: int, steps: int) -> int:
    """Map a random conversation step by step; answers how many prompts were mapped."""
    conversation = Walk(seed)
    state = MappingState()
    before: list[int] = []
    mapped_prompts = 0
    for _ in range(steps):
        prompt = conversation.prompt()
        try:
            mapped = mapper.map(prompt, state)
        except Unmappable as error:
            state, before = MappingState(), []
            with pytest.raises(type(error)):
                mapper.map(prompt)
            if isinstance(error, RejectedByEngine):
                with pytest.raises(Exception):  # noqa: B017 - a template raises what it likes
                    plain_text(mapper, prompt)
        else:
            mapped_prompts += 1
            check(mapper, mapped, prompt)
            with contextlib.suppress(
                Unmappable
            ):  # a whole render can be harder to attribute than a resumed one
                assert comparable(mapped) == comparable(mapper.map(prompt))
            ids = mapped.token_ids.tolist()
            kept = mapped.num_kept_tokens
            assert ids[:kept] == before[:kept]
            before = ids
        conversation.step()
    return mapped_prompts


@pytest.mark.parametrize("path", template_files()[::40], ids=lambda path: path.stem)
def test_sampled_templates_map_exactly_while_a_conversation_grows_and_is_edited(path):
    mapper = ChatMapper(toy_profile(path.read_text()), SMALL_CHUNK)
    for seed in range(2):
        walk(mapper, seed, 12)


@pytest.mark.corpus
@pytest.mark.parametrize("path", template_files(), ids=lambda path: path.stem)
def test_every_template_of_the_corpus_maps_exactly(path):
    try:
        mapper = ChatMapper(toy_profile(path.read_text()), SMALL_CHUNK)
    except Unmappable as error:
        pytest.skip(error.reason)
    for seed in range(3):
        walk(mapper, seed, 14)


@pytest.mark.parametrize("model", REAL)
@settings(max_examples=5, deadline=None)
@given(seed=st.integers(0, 2**32))
def test_real_tokenizers_map_exactly(model, seed):
    if not has_real(model):
        pytest.fail(f"run tests/fetch_tokenizers.py {model} first: make test does")
    walk(ChatMapper(real_profile(model)), seed, 10)


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 2**32), cut=st.integers(1, 6))
def test_keys_inside_a_message_survive_what_comes_after_it(seed, cut):
    mapper = ChatMapper(toy_profile(CHATML), SMALL_CHUNK)
    conversation = Walk(seed, exotic=False)
    for _ in range(6):
        conversation.messages += conversation.tool_turn()
    first = mapper.map(conversation.prompt())
    cut = min(cut, len(conversation.messages) - 1)
    del conversation.messages[cut:]
    conversation.messages += [conversation.answer(), conversation.user()]
    second = mapper.map(conversation.prompt())
    inside = first.message_ends[cut - 1] // SMALL_CHUNK * 32
    assert second.message_ends[:cut] == first.message_ends[:cut]
    assert second.chunk_keys[:inside] == first.chunk_keys[:inside]


def test_a_late_system_message_moved_to_the_front_makes_everything_before_it_its_own():
    mapper = ChatMapper(toy_profile(CHATML))
    messages = [
        {"role": "developer", "content": "first rule"},
        {"role": "user", "content": "question"},
        {"role": "system", "content": "late rule"},
        {"role": "user", "content": "next"},
    ]
    mapped = mapper.map(ChatPrompt(messages=messages))
    assert mapped.message_ends[0] == mapped.message_ends[1]
    assert mapped.message_ends[1] < mapped.message_ends[2] < mapped.message_ends[3]


def test_an_edit_of_the_tools_keeps_nothing_behind_them():
    mapper = ChatMapper(toy_profile("{{ tools | tojson }}" + CHATML), SMALL_CHUNK)
    state = MappingState()
    tool = {"type": "function", "function": {"name": "run"}}
    messages = [{"role": "user", "content": "hello"}]
    first = mapper.map(ChatPrompt(messages=messages, tools=[tool]), state)
    other = {"type": "function", "function": {"name": "ran"}}
    second = mapper.map(ChatPrompt(messages=messages, tools=[other]), state)
    assert 0 < second.tools_end <= second.head_end < second.message_ends[0]
    assert second.num_kept_tokens < first.tools_end


def test_a_clone_goes_its_own_way():
    mapper = ChatMapper(toy_profile(CHATML), SMALL_CHUNK)
    conversation = Walk(3, exotic=False)
    state = MappingState()
    mapper.map(conversation.prompt(), state)
    fork = state.clone()
    grown = Walk(3, exotic=False)
    for _ in range(4):
        grown.messages += grown.tool_turn()
        mapper.map(grown.prompt(), state)
    other = Walk(3, exotic=False)
    other.messages.append(other.answer())
    assert comparable(mapper.map(other.prompt(), fork)) == comparable(mapper.map(other.prompt()))
    assert comparable(mapper.map(grown.prompt(), state)) == comparable(mapper.map(grown.prompt()))


def test_a_growing_conversation_stays_within_its_memory_bound():
    mapper = ChatMapper(toy_profile(CHATML))
    rng = random.Random(0)
    state = MappingState()
    messages = [{"role": "user", "content": "go"}]
    for _ in range(50):
        messages += [
            {"role": "assistant", "content": "x" * rng.randrange(400)},
            {"role": "user", "content": "y"},
        ]
        mapped = mapper.map(ChatPrompt(messages=messages), state)
    assert state.size_bytes < 16 * mapped.num_tokens + 1000 * len(messages)


def test_a_message_that_leaves_no_text_still_takes_its_place_in_the_ranges():
    loop = "{% for m in messages %}{% if m.role == 'user' %}{{ m.content }};{% endif %}{% endfor %}"
    mapper = ChatMapper(toy_profile(loop + "{% for m in messages %}{{ m.role if m.x }}{% endfor %}"))
    state = MappingState()
    users = [{"role": "user", "content": f"question {at}"} for at in range(12)]
    mapper.map(ChatPrompt(messages=users), state)
    shifted = ChatPrompt(messages=[*users[:11], {"role": "critic", "content": "silent"}, users[11]])
    assert comparable(mapper.map(shifted, state)) == comparable(mapper.map(shifted))


def test_tools_written_behind_the_messages_are_found_when_they_appear():
    mapper = ChatMapper(toy_profile(CHATML + "{% if tools %}{{ tools | tojson }}{% endif %}"))
    state = MappingState()
    messages = [{"role": "user", "content": f"question {at}"} for at in range(12)]
    tool = {"type": "function", "function": {"name": "run"}}
    for tools in (None, [tool], None, [tool, tool]):
        prompt = ChatPrompt(messages=messages, tools=tools)
        assert comparable(mapper.map(prompt, state)) == comparable(mapper.map(prompt))
