"""Ranges from owners: running maximum, tiling, and what the lifecycle is told."""

from array import array

from hypothesis import given
from hypothesis import strategies as st

from engine_bridge.mapping.ranges import MappedPrompt, Segments
from lifecycle.vocabulary import MappingKind

runs = st.lists(st.tuples(st.integers(-1, 4), st.integers(1, 5)), max_size=12)


def segments(pairs, start=0):
    out, at = [], start
    for owner, length in pairs:
        out.append((at, owner))
        at += length
    return out, at


@given(runs)
def test_ends_follow_the_running_maximum_of_owners(pairs):
    starts, end = segments(pairs)
    made = Segments()
    made.replace_tail(0, starts)
    owners = [owner for owner, length in pairs for _ in range(length)]
    highest = [max(owners[: at + 1]) for at in range(len(owners))]
    expected = [sum(owner <= message for owner in highest) for message in range(-1, 5)]
    assert made.char_ends(5, end).tolist() == expected


@given(runs, runs, st.integers(0, 40))
def test_a_replaced_tail_equals_segments_made_at_once(first, second, kept):
    starts, end = segments(first)
    kept = min(kept, end)
    tail, new_end = segments(second, kept)
    made = Segments()
    made.replace_tail(0, starts)
    made.replace_tail(kept, tail)
    whole = Segments()
    whole.replace_tail(0, [pair for pair in starts if pair[0] < kept] + tail)
    assert made.char_ends(5, new_end).tolist() == whole.char_ends(5, new_end).tolist()


def test_text_behind_the_last_message_belongs_to_none():
    made = Segments()
    made.replace_tail(0, [(0, -1), (3, 0), (7, -1)])
    assert made.char_ends(1, 7).tolist() == [3, 7]


def test_the_lifecycle_learns_everything_but_the_tokens():
    mapped = MappedPrompt(
        token_ids=array("I", [1, 2, 3]),
        num_tokens=3,
        num_kept_tokens=1,
        head_end=1,
        message_ends=(2,),
        tools_end=1,
        chunk_keys=b"",
        chunk_tokens=2,
    )
    observed = mapped.observed()
    assert observed.kind is MappingKind.EXACT
    assert (observed.num_tokens, observed.head_end, observed.message_ends) == (3, 1, (2,))
    assert (observed.tools_end, observed.chunk_size) == (1, 2)
