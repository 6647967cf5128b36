"""The simulated model's files are loadable, small, lossless, and the same whenever they are made."""

from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoTokenizer

from engine_bridge.sim.model_files import MODEL_DIRECTORY, train, write_model
from engine_bridge.sim.template import DONE, MARKS, TEMPLATE

SHIPPED = AutoTokenizer.from_pretrained(str(MODEL_DIRECTORY), local_files_only=True)
TEXTS = ["the quick brown fox jumps over the lazy dog", "the quicker fox was the browner one"] * 3


@given(st.text(max_size=60))
def test_any_text_comes_back(text):
    assert SHIPPED.decode(SHIPPED.encode(text, add_special_tokens=False)) == text


def test_the_shipped_model_is_this_template_and_small():
    assert SHIPPED.chat_template == TEMPLATE
    assert SHIPPED.eos_token == DONE
    assert sum(file.stat().st_size for file in MODEL_DIRECTORY.iterdir()) < 300_000


def test_prose_takes_few_tokens():
    text = " ".join(__doc__.split() * 5)
    assert len(text) / len(SHIPPED.encode(text, add_special_tokens=False)) > 3


def test_the_same_texts_make_the_same_files(tmp_path: Path):
    for name in ("one", "other"):
        write_model(tmp_path / name, train(iter(TEXTS), vocabulary=290))
    for file in (tmp_path / "one").iterdir():
        assert file.read_bytes() == (tmp_path / "other" / file.name).read_bytes()
    again = AutoTokenizer.from_pretrained(str(tmp_path / "one"), local_files_only=True)
    assert len(again) == 290
    assert [len(again.encode(mark, add_special_tokens=False)) for mark in MARKS] == [1] * len(MARKS)
