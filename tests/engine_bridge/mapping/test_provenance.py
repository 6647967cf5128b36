"""Tagged strings do what strings do, and no character loses its owner."""

import copy
import json
import pickle

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine_bridge.mapping.normalise import Merged
from engine_bridge.mapping.provenance import (
    SCAFFOLD,
    TaggedText,
    concat,
    join,
    runs_of,
    tag_message,
    tagged_json,
)

letters = st.text("ab \n-", max_size=8)
pieces = st.lists(st.tuples(letters, st.integers(-1, 3)), max_size=5)
OPERATIONS = (
    lambda s, t: s + t,
    lambda s, t: t + s,
    lambda s, t: s.strip(),
    lambda s, t: s.strip("a"),
    lambda s, t: s.split(t or " "),
    lambda s, t: s.split(),
    lambda s, t: s.rsplit("a", 1),
    lambda s, t: s.splitlines(),
    lambda s, t: s.splitlines(True),
    lambda s, t: s.replace(t, "xy"),
    lambda s, t: s.replace("a", t, 1),
    lambda s, t: s.partition(t or "-"),
    lambda s, t: s.rpartition(t or "-"),
    lambda s, t: s.removeprefix(t),
    lambda s, t: s.removesuffix(t),
    lambda s, t: s[1:-1],
    lambda s, t: s[::-1],
    lambda s, t: s.upper(),
    lambda s, t: s.title(),
    lambda s, t: t.join([s, s]),
    lambda s, t: s.join(["x", t]),
)


def tagged(parts):
    return concat([TaggedText(text, [(len(text), tag)] if text else []) for text, tag in parts])


def strings(value):
    return [value] if isinstance(value, str) else list(value)


@given(pieces, letters)
def test_every_operation_gives_what_a_plain_string_gives(parts, other):
    text = "".join(part for part, _ in parts)
    for operation in OPERATIONS:
        got, want = operation(tagged(parts), other), operation(text, other)
        assert strings(got) == strings(want)
        for piece in strings(got):
            assert sum(length for length, _ in runs_of(piece)) == len(piece)


@given(st.lists(st.integers(0, 3), min_size=1, max_size=20), st.data())
def test_slices_keep_each_characters_owner(owners, data):
    text = tagged([("x", owner) for owner in owners])
    start = data.draw(st.integers(0, len(owners)))
    end = data.draw(st.integers(start, len(owners)))
    assert [tag for length, tag in runs_of(text[start:end]) for _ in range(length)] == owners[start:end]


def test_joining_keeps_owners_and_leaves_the_separator_to_the_template():
    text = join([TaggedText("aa", [(2, 1)]), TaggedText("b", [(1, 2)])], ", ")
    assert text == "aa, b"
    assert runs_of(text) == [(2, 1), (2, SCAFFOLD), (1, 2)]


def test_marks_stay_where_they_are_put():
    mark = ("enter", 1, 4)
    text = concat([TaggedText("ab", [(2, 0)]), TaggedText("", [(0, mark)]), "cd"])
    assert runs_of(text[1:3]) == [(1, 0), (0, mark), (1, SCAFFOLD)]


def test_json_of_one_messages_data_is_that_messages_text():
    message = tag_message({"role": "assistant", "content": "hi", "tool_calls": [{"id": "x", "a": ["b"]}]}, 7)
    text = tagged_json(json.dumps)(message)
    assert text == '{"role": "assistant", "content": "hi", "tool_calls": [{"id": "x", "a": ["b"]}]}'
    assert {tag for _, tag in runs_of(text)} == {7}


def test_a_merged_message_has_several_owners():
    merged = tag_message({"role": "system", "content": "a\n\nb"}, Merged(((0, "a"), (2, "b"))))
    assert merged["content"] == "a\n\nb"
    assert runs_of(merged["content"]) == [(1, 0), (2, SCAFFOLD), (1, 2)]


@pytest.mark.parametrize("again", [copy.copy, copy.deepcopy, lambda s: pickle.loads(pickle.dumps(s))])
def test_copies_are_equal(again):
    assert again(TaggedText("ab", [(2, 1)])) == "ab"
