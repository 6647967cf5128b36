"""Entries of the streams: whatever is not ours, or not where it should be, is named and not read."""

import pytest

from lifecycle.errors import CorruptLog
from lifecycle.store.codec import checksum, encode
from lifecycle.store.redis_entries import Run, feed_run, recorded_event
from tests.lifecycle.core.event_examples import EVENT_TYPES, full

EVENT = full(EVENT_TYPES[0])
PAYLOAD = encode(EVENT)
FIELDS = {b"p": b"9", b"e": PAYLOAD, b"c": b"%d" % checksum("ctx/a", 4, PAYLOAD)}


def test_a_feed_entry_names_a_batch_that_ends_at_its_id() -> None:
    run = feed_run(b"9-0", {b"s": b"ctx/a", b"v": b"4", b"n": b"3"})
    assert run == Run("ctx/a", first_version=4, first_position=7, num_events=3)
    assert run.last_version == 6
    assert run.part(1, 1) == Run("ctx/a", first_version=5, first_position=8, num_events=1)
    assert run.part(1, 99).last_version == 6


@pytest.mark.parametrize("fields", [{}, {b"s": b"a", b"v": b"x", b"n": b"1"}, {b"s": b"a", b"v": b"1"}])
def test_an_entry_of_something_else_is_no_batch(fields: dict[bytes, bytes]) -> None:
    with pytest.raises(CorruptLog, match="none of ours"):
        feed_run(b"1-0", fields)


def test_an_event_comes_back_with_its_place() -> None:
    recorded = recorded_event("ctx/a", 4, (b"4-0", FIELDS), 9)
    assert (recorded.stream, recorded.version, recorded.position) == ("ctx/a", 4, 9)
    assert recorded.event == EVENT


@pytest.mark.parametrize(
    ("version", "entry_id", "changes", "position", "says"),
    [
        (4, b"5-0", {}, 9, "is missing"),
        (4, b"4-0", {b"e": PAYLOAD + b"x"}, 9, "altered"),
        (4, b"4-0", {}, 10, "names position 9"),
        (4, b"4-0", {b"p": b"many"}, 9, "none of ours"),
    ],
)
def test_what_is_not_as_it_was_written_is_named(
    version: int, entry_id: bytes, changes: dict[bytes, bytes], position: int, says: str
) -> None:
    with pytest.raises(CorruptLog, match=says):
        recorded_event("ctx/a", version, (entry_id, FIELDS | changes), position)
