"""Amounts are found again in the span they fell into, and old or too many names cost no memory."""

from hypothesis import given
from hypothesis import strategies as st

from lifecycle.projections.report_counts import (
    CELLS_PER_BUCKET,
    HOUR_NS,
    HOURS_KEPT,
    MINUTE_NS,
    MINUTES_KEPT,
    OTHER,
    Cell,
    CountBook,
    grouped,
)

CELL = Cell("m", "t", "a", "h", "enforce")
NOON = 500_000 * HOUR_NS


def calls(book: CountBook, start_ns: int) -> int:
    return sum(counts.calls for counts in book.since(start_ns)[1].values())


@given(st.lists(st.integers(0, 3 * MINUTES_KEPT), max_size=40), st.integers(1, 3 * MINUTES_KEPT))
def test_a_span_holds_what_fell_into_it_to_the_minute_or_to_the_hour(ages: list[int], span: int) -> None:
    book = CountBook()
    times = [*sorted(NOON - age * MINUTE_NS for age in ages), NOON]
    for at_ns in times:
        book.note(at_ns)
        book.add(at_ns, CELL, calls=1)
    from_ns, _ = book.since(NOON - span * MINUTE_NS)
    unit = MINUTE_NS if span < MINUTES_KEPT else HOUR_NS
    assert from_ns == max((NOON - span * MINUTE_NS) // unit * unit, times[0])
    assert calls(book, NOON - span * MINUTE_NS) == sum(at_ns >= from_ns for at_ns in times)


def test_what_is_too_old_is_forgotten_and_no_longer_taken() -> None:
    book = CountBook()
    book.note(NOON)
    book.add(NOON, CELL, calls=1)
    late = NOON + HOURS_KEPT * HOUR_NS
    book.note(late)
    book.add(NOON, CELL, calls=1)
    assert book.num_cells() == 0
    from_ns, entries = book.since(NOON)
    assert (from_ns, entries) == (late - (HOURS_KEPT - 1) * HOUR_NS, {})


def test_many_names_are_counted_together_and_none_is_lost() -> None:
    book = CountBook()
    book.note(NOON)
    names = 3 * CELLS_PER_BUCKET
    for n in range(names):
        book.add(NOON, Cell("m", f"t{n % 7}", f"agent {n}", "h", "enforce"), calls=1)
        book.add(NOON, Cell("m", f"tenant {n}", "a", "h", "enforce"), calls=1)
    _, entries = book.since(NOON)
    assert sum(counts.calls for counts in entries.values()) == 2 * names
    assert book.num_cells() <= 2 * (2 * CELLS_PER_BUCKET + 1)
    assert OTHER in grouped(entries, "agent")


def test_days_of_minutes_keep_a_fixed_number_of_buckets() -> None:
    book = CountBook()
    for minute in range(10 * 24 * 60):
        book.note(NOON + minute * MINUTE_NS)
        book.add(NOON + minute * MINUTE_NS, CELL, calls=1)
    assert book.num_cells() == MINUTES_KEPT + HOURS_KEPT
