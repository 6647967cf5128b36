"""Texts of a length, one for each id, under real tokenizers and without one."""

import functools
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from engine_bridge import sim
from engine_bridge.sim.traces.calls import Message, Role
from engine_bridge.sim.traces.generated import Workload, generated
from engine_bridge.sim.traces.texts import Texts, counted_by, words_as_tokens
from tests.fetch_tokenizers import TARGET

OURS = Path(str(sim.__file__)).parent / "model"
"""Tokenizer of the simulated engine's model."""

ids = st.text("0123456789abcdef.", min_size=1, max_size=12)


def tokenizer_file(name: str) -> Path:
    return OURS / "tokenizer.json" if name == "ours" else TARGET / name / "models" / "tokenizer.json"


@functools.cache
def tokenizer(name: str) -> Tokenizer:
    return Tokenizer.from_file(str(tokenizer_file(name)))


@functools.cache
def texts(name: str) -> Texts:
    return Texts(counted_by(tokenizer_file(name)))


def message(message_id: str, num_tokens: int) -> Message:
    return Message(message_id, Role.USER, num_tokens)


@pytest.mark.parametrize("name", ["qwen3", "llama2", "ours"])
@given(message_id=ids, num_tokens=st.integers(1, 3000))
@settings(max_examples=10)
def test_a_text_has_the_recorded_length_under_the_models_own_tokenizer(
    name: str, message_id: str, num_tokens: int
) -> None:
    made = texts(name)
    text = made.text(message(f"{message_id}/{num_tokens}", num_tokens))
    theirs = tokenizer(name).encode(text, add_special_tokens=False)
    if made.is_exact:
        assert len(theirs.ids) == num_tokens
    else:
        assert abs(len(theirs.ids) - num_tokens) <= max(2, num_tokens // 100)


@pytest.mark.parametrize("name", ["qwen3", "ours"])
def test_usual_tokenizers_are_met_exactly(name: str) -> None:
    assert texts(name).is_exact


@given(st.lists(ids, min_size=2, max_size=40, unique=True), st.integers(8, 200))
def test_different_ids_differ_within_the_first_words_and_an_id_never_differs_from_itself(
    some: list[str], num_tokens: int
) -> None:
    made = Texts()
    starts = [tuple(made.text(message(each, num_tokens)).split()[:8]) for each in some]
    assert len(set(starts)) == len(some)
    again = Texts()
    assert [made.text(message(each, num_tokens)) for each in some] == [
        again.text(message(each, num_tokens)) for each in reversed(some)
    ][::-1]
    assert all(
        Texts(salt="other").text(message(each, num_tokens)) != made.text(message(each, num_tokens))
        for each in some
    )


def test_an_id_keeps_its_first_length() -> None:
    """Sources count a message by its surroundings, so lengths of one id differ by a few tokens at times."""
    made = Texts()
    assert made.text(message("a", 50)) == made.text(message("a", 47))
    assert words_as_tokens(made.text(message("a", 47))) == 50


def test_equal_prefixes_of_ids_are_equal_prefixes_of_tokens_and_no_others() -> None:
    """Over a whole workload: lists that share messages share exactly their tokens."""
    made = texts("qwen3")
    encode = tokenizer("qwen3").encode
    tokens = functools.cache(lambda text: tuple(encode(text, add_special_tokens=False).ids))
    by_ids: dict[tuple[str, ...], tuple[tuple[int, ...], ...]] = {}
    for call in generated(Workload(num_sessions=3, num_turns=12, rewrite_share=0.3)):
        of_ids: tuple[str, ...] = ()
        of_tokens: tuple[tuple[int, ...], ...] = ()
        for each in call.messages:
            of_ids = (*of_ids, each.id)
            of_tokens = (*of_tokens, tokens(made.text(each)))
            assert by_ids.setdefault(of_ids, of_tokens) == of_tokens
    assert len(set(by_ids.values())) == len(by_ids)
