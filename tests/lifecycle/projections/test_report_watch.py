"""Memory for removed and dead chunks is bounded, and what may harm is forgotten last."""

from hashlib import blake2b

import pytest

from lifecycle.core.directives import DirectiveResult, Reclaim
from lifecycle.core.ids import KEY_BYTES, split_keys
from lifecycle.projections import report_watch
from lifecycle.projections.report_counts import Cell
from lifecycle.projections.report_watch import MAX_WATCHED, RemovalWatch, covering
from lifecycle.vocabulary import DirectiveOutcome
from tests.lifecycle.projections.tale import SECOND, SPACE, keys

CELL = Cell("m", "t")
BATCH = 2_000


def run_of(number: int) -> bytes:
    return b"".join(blake2b(b"%d/%d" % (number, n), digest_size=KEY_BYTES).digest() for n in range(BATCH))


def ask(watch: RemovalWatch, number: int, outcome: DirectiveOutcome, at_ns: int) -> None:
    run = run_of(number)
    directive = Reclaim(directive_id=f"d{number}", namespace=SPACE, reason="dead", keys=run)
    watch.proposed(directive, [(CELL, BATCH)], at_ns)
    gone = run if outcome is DirectiveOutcome.APPLIED else b""
    watch.settled(SPACE, directive.directive_id, DirectiveResult(outcome=outcome, gone=gone), at_ns)


def test_the_removed_are_remembered_longest_and_all_is_bounded() -> None:
    watch = RemovalWatch()
    ask(watch, 0, DirectiveOutcome.APPLIED, SECOND)
    for number in range(1, MAX_WATCHED // BATCH + 5):
        ask(watch, number, DirectiveOutcome.FAILED, SECOND)
        assert watch.num_chunks() <= MAX_WATCHED
    assert watch.num_dead(SPACE) <= MAX_WATCHED
    assert watch.needed(SPACE, run_of(0), 2 * SECOND).regretted[CELL] == BATCH
    for number in range(1_000, 1_000 + MAX_WATCHED // BATCH + 5):
        ask(watch, number, DirectiveOutcome.APPLIED, 2 * SECOND)
        assert watch.num_chunks() <= MAX_WATCHED


def test_after_ten_minutes_nothing_is_left() -> None:
    watch = RemovalWatch()
    ask(watch, 0, DirectiveOutcome.APPLIED, SECOND)
    watch.needed(SPACE, keys("any"), SECOND + report_watch.REGRET_NS + 1)
    held = watch.num_chunks()
    ask(watch, 1, DirectiveOutcome.APPLIED, SECOND + report_watch.REGRET_NS + 1)
    assert watch.num_chunks() - held == 2 * BATCH
    assert not any(watch.needed(SPACE, run_of(0), 2 * SECOND + report_watch.REGRET_NS).regretted.values())


def test_the_observed_are_asked_for_in_turn() -> None:
    watch = RemovalWatch()
    ask(watch, 0, DirectiveOutcome.SUPPRESSED, SECOND)
    ask(watch, 1, DirectiveOutcome.FAILED, SECOND)
    assert watch.num_suppressed(SPACE) == BATCH
    turns = [watch.observed_keys(SPACE, BATCH // 4) for _ in range(4)]
    assert sorted(key for turn in turns for key in turn) == sorted(split_keys(run_of(0)))
    assert watch.gone(SPACE, b"".join(turns[0])) == {CELL: BATCH // 4}
    assert watch.num_suppressed(SPACE) == BATCH - BATCH // 4


@pytest.mark.parametrize(("told", "whole"), [(1, [1, 2]), (3, [3]), (5, [3]), (0, [0, 3])])
def test_owners_cover_the_keys(told: int, whole: list[int]) -> None:
    rest = Cell("m")
    found = covering([(CELL, told)], keys("x", "y", "z"), rest)
    assert [n for _, n in found] == whole
    assert [cell for cell, _ in found] == [CELL, rest][: len(whole)]
