"""Prompts that no template makes: read as the engine reads them, encoded as it encodes them."""

import random
from array import array
from typing import Any

import pytest
from tokenizers import Tokenizer
from tokenizers.processors import TemplateProcessing

from engine_bridge.chunk_keys import chunk_keys
from engine_bridge.errors import Unmappable
from engine_bridge.mapping.mapper import ChatMapper, MappingState
from engine_bridge.mapping.model_profile import ModelProfile
from engine_bridge.mapping.plain import MAX_PROMPTS, PlainPrompt, given_prompts
from engine_bridge.mapping.prompts import ChatPrompt
from tests.engine_bridge.mapping.conversations import (
    CHATML,
    has_real,
    real_profile,
    say,
    toy_profile,
    toy_tokenizer,
)
from tests.engine_bridge.mapping.engine_answers import engine_prompts

CHUNK = 4


def mapper() -> ChatMapper:
    return ChatMapper(toy_profile(CHATML), CHUNK)


@pytest.mark.parametrize(
    ("given", "prompts"),
    [
        ("a", ["a"]),
        (["a", "b"], ["a", "b"]),
        ([1, 2], [[1, 2]]),
        ([[1], [2, 3]], [[1], [2, 3]]),
        ("", [""]),
    ],
)
def test_a_prompt_is_text_or_ids_or_several_of_one_kind(given: Any, prompts: Any):
    assert list(given_prompts(given)) == prompts


@pytest.mark.parametrize(
    "given",
    [
        None,
        [],
        [[]],
        [1, "a"],
        ["a", [1]],
        [True],
        [1.0],
        [-1],
        [1 << 32],
        {"a": 1},
        ["a"] * (MAX_PROMPTS + 1),
    ],
)
def test_what_an_engine_may_read_in_several_ways_is_not_read(given: Any):
    assert not given_prompts(given)


@pytest.mark.parametrize(
    "fields",
    [
        {"suffix": ""},
        {"truncate_prompt_tokens": 5},
        {"prompt_embeds": "x"},
        {"use_beam_search": True},
        {"add_special_tokens": "no"},
    ],
)
def test_what_changes_the_tokens_elsewhere_is_unmappable(fields: dict[str, Any]):
    with pytest.raises(Unmappable):
        PlainPrompt.from_body(fields, "text")


def test_ids_are_taken_as_they_are_and_are_one_message():
    ids = list(range(4 * CHUNK + 1))
    mapped = mapper().map_plain(PlainPrompt(ids))
    assert mapped.token_ids.tolist() == ids
    assert (mapped.head_end, mapped.message_ends, mapped.num_tokens) == (0, (len(ids),), len(ids))
    assert mapped.chunk_keys == chunk_keys(array("I", ids), CHUNK)


def test_the_tokenizers_own_tokens_stand_around_a_text_unless_not_wanted():
    tokenizer = Tokenizer.from_str(toy_tokenizer().to_str())
    begin = tokenizer.token_to_id("<s>")
    tokenizer.post_processor = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", begin)])
    profile = ModelProfile(name="m", tokenizer=tokenizer, templates={"default": CHATML})
    with_begin, without = (
        ChatMapper(profile).map_plain(PlainPrompt("some text", special)).token_ids.tolist()
        for special in (True, False)
    )
    assert with_begin == [begin, *without]


def test_a_prompt_goes_on_from_the_last_one_of_whatever_kind():
    rng, state, whole = random.Random(1), MappingState(), ""
    for step in range(12):
        whole = whole[: rng.randint(0, len(whole))] + say(rng, 5, 40)
        chat = ChatPrompt(messages=[{"role": "user", "content": whole}])
        plain = PlainPrompt(whole if step % 2 else mapper().map_plain(PlainPrompt(whole)).token_ids.tolist())
        on = mapper().map(chat, state) if step % 3 == 2 else mapper().map_plain(plain, state)
        cold = mapper().map(chat) if step % 3 == 2 else mapper().map_plain(plain)
        assert (on.token_ids, on.chunk_keys, on.message_ends) == (
            cold.token_ids,
            cold.chunk_keys,
            cold.message_ends,
        )


@pytest.mark.e2e
@pytest.mark.parametrize("model", ["qwen3", "llama3_1"])
def test_vllm_reads_and_encodes_the_same_prompts(model: str):
    if not has_real(model):
        pytest.fail(f"run tests/fetch_tokenizers.py {model} first: make test does")
    rng = random.Random(7)
    texts = [say(rng, 1, 60) for _ in range(40)] + ["", " ", "\n", "<s>", "<|begin_of_text|>x", "é" * 400]
    given: list[Any] = [*texts, texts, [1, 2, 3], [[1], [2, 3]]]
    bodies: list[dict[str, Any]] = [{"model": "m", "prompt": each} for each in given]
    bodies += [{**body, "add_special_tokens": False, "echo": True, "n": 2} for body in bodies]
    jobs = [{"api": "completions", "body": body} for body in bodies]
    mapping = ChatMapper(real_profile(model))
    compared = 0
    for body, theirs in zip(bodies, engine_prompts(model, jobs), strict=True):
        if "error" in theirs:
            assert body["prompt"] == "", theirs
            continue
        ours = [
            mapping.map_plain(PlainPrompt.from_body(body, each)) for each in given_prompts(body["prompt"])
        ]
        assert theirs["ids"] == [mapped.token_ids.tolist() for mapped in ours], body
        compared += 1
    assert compared > len(bodies) - 4
