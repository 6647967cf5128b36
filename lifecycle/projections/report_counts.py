"""Counters by who and when: minutes for the last hours, hours for the last days, nothing older.

Every amount is kept twice, in a minute's bucket and in an hour's: a question about a short span is answered
by the minutes, one about a long span by the hours. Memory is bounded: buckets expire, and a bucket with too
many different names counts the rest under one.
"""

from collections.abc import Mapping
from typing import Literal, get_args

import msgspec
from msgspec.structs import replace

MINUTE_NS = 60 * 10**9
HOUR_NS = 60 * MINUTE_NS

MINUTES_KEPT = 180
HOURS_KEPT = 8 * 24

CELLS_PER_BUCKET = 200
"""Different cells of one bucket before agents and harnesses that are new to it are counted together: their
names come from clients."""

OTHER = "(other)"
UNKNOWN = "(unknown)"

Dimension = Literal["model", "tenant", "agent", "harness", "arm"]
DIMENSIONS: tuple[Dimension, ...] = get_args(Dimension)


class Cell(msgspec.Struct, frozen=True, order=True):
    """Whom an amount is counted for. `arm` is an `Arm`, `UNKNOWN`, or `untracked`: not followed.

    `left` is why prompts left the one before, empty for what has nothing to do with that.
    """

    model: str
    tenant: str = UNKNOWN
    agent: str = UNKNOWN
    harness: str = UNKNOWN
    arm: str = UNKNOWN
    left: str = ""


class Counts(msgspec.Struct):
    """Amounts of one cell. `docs/report.md` says what each means; the units are in the names."""

    calls: int = 0
    calls_mapped: int = 0
    calls_counted: int = 0
    prompt_tokens: int = 0
    counted_prompt_tokens: int = 0
    cached_tokens: int = 0
    recomputed_tokens: int = 0
    avoidable_tokens: int = 0
    moved_tokens: int = 0
    lost_tokens: int = 0
    chunks_checked: int = 0
    chunks_shown: int = 0
    dead_seen_tokens: int = 0
    dead_seen_bytes: int = 0
    freed_tokens: int = 0
    freed_bytes: int = 0
    would_free_tokens: int = 0
    would_free_bytes: int = 0
    evicted_dead_tokens: int = 0
    revived_tokens: int = 0
    regretted_tokens: int = 0
    would_regret_tokens: int = 0
    untracked_minutes: int = 0
    prefix_breaks: int = 0
    prefix_lost_tokens: int = 0
    head_breaks: int = 0
    head_lost_tokens: int = 0
    declared_edits: int = 0
    declared_lost_tokens: int = 0

    def add(self, other: "Counts") -> None:
        """Take the other's amounts in."""
        for name in self.__struct_fields__:
            setattr(self, name, getattr(self, name) + getattr(other, name))


class CountBook:
    """Amounts by cell and time. `began_ns` is the time of the first event, 0 before it."""

    def __init__(self) -> None:
        self.began_ns = 0
        self._minutes: dict[int, dict[Cell, Counts]] = {}
        self._hours: dict[int, dict[Cell, Counts]] = {}
        self._minute = 0

    def note(self, at_ns: int) -> None:
        """Something happened then; what is too old by it is forgotten."""
        self.began_ns = min(self.began_ns, at_ns) if self.began_ns else at_ns
        minute = at_ns // MINUTE_NS
        if minute > self._minute:
            self._minute = minute
            _forget_before(self._minutes, minute - MINUTES_KEPT + 1)
            _forget_before(self._hours, at_ns // HOUR_NS - HOURS_KEPT + 1)

    def add(self, at_ns: int, cell: Cell, **amounts: int) -> None:
        """Add to the fields of `Counts` that are named. What is older than is kept is dropped."""
        minute, hour = at_ns // MINUTE_NS, at_ns // HOUR_NS
        if minute > self._minute - MINUTES_KEPT:
            _add(self._minutes.setdefault(minute, {}), cell, amounts)
        if hour > self._minute * MINUTE_NS // HOUR_NS - HOURS_KEPT:
            _add(self._hours.setdefault(hour, {}), cell, amounts)

    def since(self, start_ns: int) -> tuple[int, dict[Cell, Counts]]:
        """Where the span of the answer really begins, and its amounts by cell.

        It begins with the bucket that `start_ns` lies in, or where what is kept begins.
        """
        fine = start_ns // MINUTE_NS > self._minute - MINUTES_KEPT
        unit, buckets = (MINUTE_NS, self._minutes) if fine else (HOUR_NS, self._hours)
        first = start_ns // unit
        if not fine:
            first = max(first, self._minute * MINUTE_NS // HOUR_NS - HOURS_KEPT + 1)
        found: dict[Cell, Counts] = {}
        for cells in (cells for number, cells in buckets.items() if number >= first):
            for cell, counts in cells.items():
                found.setdefault(cell, Counts()).add(counts)
        return max(first * unit, self.began_ns), found

    def num_cells(self) -> int:
        """Cells in memory, over all buckets."""
        return sum(len(cells) for buckets in (self._minutes, self._hours) for cells in buckets.values())


def grouped(cells: Mapping[Cell, Counts], by: Dimension) -> dict[str, Counts]:
    """Sums by one dimension, in order of names."""
    groups: dict[str, Counts] = {}
    for cell, counts in cells.items():
        groups.setdefault(getattr(cell, by), Counts()).add(counts)
    return dict(sorted(groups.items()))


def killers(cells: Mapping[Cell, Counts]) -> list[tuple[str, str, Counts]]:
    """Harness, why its prompts left the one before, and what that cost: the dearest first."""
    found: dict[tuple[str, str], Counts] = {}
    for cell, counts in cells.items():
        if cell.left and counts.prefix_breaks + counts.head_breaks:
            found.setdefault((cell.harness, cell.left), Counts()).add(counts)
    ranked = sorted(
        found.items(), key=lambda each: (-each[1].prefix_lost_tokens - each[1].head_lost_tokens, each[0])
    )
    return [(harness, left, counts) for (harness, left), counts in ranked]


def _add(cells: dict[Cell, Counts], cell: Cell, amounts: dict[str, int]) -> None:
    counts = cells.get(cell)
    if counts is None:
        if len(cells) >= CELLS_PER_BUCKET:
            cell = replace(cell, agent=OTHER, harness=OTHER)
        if len(cells) >= 2 * CELLS_PER_BUCKET and cell not in cells:
            cell = Cell(OTHER, OTHER, OTHER, OTHER, cell.arm, cell.left)
        counts = cells.setdefault(cell, Counts())
    for name, amount in amounts.items():
        setattr(counts, name, getattr(counts, name) + amount)


def _forget_before(buckets: dict[int, dict[Cell, Counts]], first: int) -> None:
    for number in [n for n in buckets if n < first]:
        del buckets[number]
