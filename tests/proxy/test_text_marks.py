"""A quotation is known again whatever stands around it, and long texts cost no more than short ones."""

import json

import pytest

from proxy.text_marks import HEAD_CHARS, marks_of, texts_in_arguments, texts_of
from tests.proxy.conversations import HASHER

SAID = "The parser drops the last token of every line.\nIt should keep it, and say where it stood before."


def marks(text: str) -> set[bytes]:
    return set(marks_of(text, HASHER))


@pytest.mark.parametrize(
    "quoted",
    [
        f"user: {SAID}",
        f"<conversation>\n<user>{SAID}</user>\n</conversation>",
        f'Summarise "{SAID}" in a word',
        json.dumps({"transcript": f"user: {SAID}"}),
        json.dumps(json.dumps([{"content": SAID}])),
        f"- {SAID}\n- and something else that was said",
        f"**User**: {SAID.replace(' ', '  ')}",
        f"Human: {SAID} AI: certainly",
    ],
)
def test_a_quotation_carries_most_of_the_marks(quoted: str) -> None:
    assert len(marks(SAID) & marks(quoted)) >= 2


def test_what_is_cut_off_is_known_by_what_is_left() -> None:
    assert marks(SAID) & marks(SAID[:60] + "...")


def test_short_pieces_tell_nothing() -> None:
    assert not marks("OK")
    assert not marks("yes.\nno.\nperhaps.\n" * 9)


def test_a_long_text_is_looked_at_at_its_ends() -> None:
    long = "\n".join(f"line number {n} of a very long output" for n in range(100_000))
    found = marks(long)
    assert len(found) < HEAD_CHARS
    assert marks("line number 3 of a very long output") <= found
    assert marks("line number 99999 of a very long output") <= found
    assert not marks("line number 50000 of a very long output") & found
    further = set(marks_of(long, HASHER, quoting=True))
    assert len(further) > 2 * len(found), "what may quote is looked at further on"


def test_texts_are_found_in_every_kind_of_content() -> None:
    parts = [{"type": "text", "text": "one"}, {"type": "image_url"}, "odd", {"type": "text", "text": 7}]
    messages = [{"content": "zero"}, {"content": parts}, {"content": None}, {}]
    assert list(texts_of(messages)) == ["zero", "one"]


def test_arguments_may_be_anything() -> None:
    assert list(texts_in_arguments('{"a": {"prompt": "do"}, "b": ["it", 7]}')) == ["do", "it"]
    assert list(texts_in_arguments("no json")) == ["no json"]
    assert list(texts_in_arguments("[" * 100_000)) == ["[" * 100_000]
