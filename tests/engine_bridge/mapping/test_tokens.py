"""Incremental tokens equal a full encode, for tokenizers of every build; positions equal its offsets'."""

import functools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, models, normalizers, pre_tokenizers, trainers

from engine_bridge.errors import RejectedByEngine
from engine_bridge.mapping.tokens import Rope, TextTokenizer, TokenisedText, common_prefix

MARKERS = ("<|a|>", "<|ab|>", "<|", "|>", "<|a|><|b|>")
PIECES = (
    "a",
    "b",
    " ",
    "\n",
    "é",
    "日",
    "e\u0301",
    "<|a|>",
    "<|ab|>",
    "<|",
    "|>",
    "<|b|>",
    "<",
    "|",
    "aab",
    "A",
)
BUILDS = (
    "bytes",
    "metaspace",
    "lower",
    "lower, normalised",
    "composed",
    "strips left",
    "strips right",
    "whole words",
    "normalised",
)
text = st.lists(st.sampled_from(PIECES), max_size=30).map("".join)


@functools.lru_cache(maxsize=len(BUILDS))
def tokenizer(build: str) -> TextTokenizer:
    made = Tokenizer(models.BPE(unk_token="<unk>", fuse_unk=True))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    if build == "metaspace":
        made.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    if build.startswith("lower"):
        made.normalizer = normalizers.Lowercase()
    if build == "composed":
        made.normalizer = normalizers.NFC()
    alphabet = pre_tokenizers.ByteLevel.alphabet() if build != "metaspace" else list("ab\n<|>Aé日▁")
    trainer = trainers.BpeTrainer(
        vocab_size=330, initial_alphabet=alphabet, special_tokens=["<unk>"], show_progress=False
    )
    made.train_from_iterator(["aab a b ab aab", "<|a|> b | ab"], trainer)
    options = {
        "strips left": {"lstrip": True},
        "strips right": {"rstrip": True},
        "whole words": {"single_word": True},
        "normalised": {"normalized": True},
        "lower, normalised": {"normalized": True},
    }.get(build, {})
    made.add_tokens(
        [
            AddedToken(content, **{"normalized": False, **(options if at == 0 else {})})
            for at, content in enumerate(MARKERS)
        ]
    )
    return TextTokenizer(made)


@pytest.mark.parametrize("build", BUILDS)
@settings(max_examples=80, deadline=None)
@given(texts=st.lists(st.tuples(text, st.integers(0, 40)), min_size=1, max_size=5))
def test_any_edit_gives_the_ids_of_a_full_encode(build, texts):
    encoder = tokenizer(build)
    tokenised = TokenisedText()
    now = ""
    for added, cut in texts:
        kept = min(cut, len(now))
        old = tokenised.ids[:]
        now = now[:kept] + added
        same, common = tokenised.update(encoder, kept, added)
        full = encoder.encode(now)
        assert tokenised.ids == full
        assert tokenised.text.tail(0) == now
        assert old[:same] == full[:same]
        assert common >= kept
        ends = encoder.ends(now)
        chars = sorted({0, len(now), *range(0, len(now), 3)})
        expected = [
            int(np.searchsorted(ends, char, side="right")) if char < len(now) else len(full) for char in chars
        ]
        expected[0] = expected[0] if now else 0
        assert tokenised.token_positions(encoder, chars[1:]) == expected[1:]


def test_an_append_behind_a_marker_keeps_what_stands_before_it():
    encoder = tokenizer("bytes")
    tokenised = TokenisedText()
    tokenised.update(encoder, 0, "aab ab<|a|>b a")
    same, _ = tokenised.update(encoder, 14, " ab")
    assert same >= len(encoder.encode("aab ab"))


def test_lone_surrogates_are_the_clients_fault():
    with pytest.raises(RejectedByEngine):
        tokenizer("bytes").encode("\ud800")


@given(text, text, text)
def test_the_common_prefix_is_the_longest(shared, left, right):
    size = common_prefix(shared + left, shared + right)
    assert (shared + left)[:size] == (shared + right)[:size]
    assert (
        size == min(len(shared + left), len(shared + right))
        or (shared + left)[size] != (shared + right)[size]
    )


def test_the_common_prefix_of_long_texts():
    left = "ab" * 100_000
    assert common_prefix(left, left + "x") == 200_000
    assert common_prefix(left, left[:150_001] + "x" + left) == 150_001


@given(st.lists(st.tuples(st.integers(0, 30), text), max_size=8), st.integers(0, 40), st.integers(0, 40))
def test_a_rope_is_the_text_that_was_put_together(edits, start, end):
    rope, now = Rope(), ""
    for kept, tail in edits:
        kept = min(kept, len(now))
        rope.replace_tail(kept, tail)
        now = now[:kept] + tail
    assert len(rope) == len(now)
    assert rope.tail(0) == now
    assert rope.cut(start, end) == now[start:end]


@given(st.lists(st.tuples(st.integers(0, 400_000), st.integers(0, 150_000)), max_size=8), st.data())
@settings(max_examples=20, deadline=None)
def test_a_long_rope_takes_little_room_and_loses_nothing(edits, data):
    rope, now = Rope(), ""
    for kept, size in edits:
        kept = min(kept, len(now))
        tail = ("été \ud800 " * (size // 7 + 1))[:size]
        rope.replace_tail(kept, tail)
        now = now[:kept] + tail
    assert len(rope) == len(now)
    start = data.draw(st.integers(0, len(now)))
    end = data.draw(st.integers(start, len(now)))
    assert rope.cut(start, end) == now[start:end]
    assert rope.size_bytes < len(now) // 10 + 600_000
