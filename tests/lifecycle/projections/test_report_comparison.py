"""The interval holds what is true about as often as it says, and little data says nothing."""

import random
from itertools import pairwise

import pytest

from lifecycle.projections.report_comparison import (
    CONTEXTS_PER_HOUR,
    MIN_CONTEXTS,
    Comparison,
    ComparisonBook,
    ContextTally,
    compare,
)
from lifecycle.projections.report_counts import HOUR_NS, HOURS_KEPT
from lifecycle.vocabulary import Arm

NOON = 500_000 * HOUR_NS


def contexts(rng: random.Random, num: int, hit: float) -> list[ContextTally]:
    """Contexts of 1 to 30 calls; each has a luck of its own that all its calls share."""
    out = []
    for _ in range(num):
        luck = min(max(rng.gauss(hit, 0.15), 0.0), 1.0)
        tally = ContextTally()
        for _ in range(rng.randint(1, 30)):
            prompt = rng.randint(100, 8_000)
            tally.calls += 1
            tally.prompt_tokens += prompt
            tally.cached_tokens += int(prompt * luck)
        out.append(tally)
    return out


@pytest.mark.parametrize(("hit", "num_holdout"), [(0.5, MIN_CONTEXTS), (0.6, 60)])
def test_the_interval_covers_the_true_difference_about_nineteen_times_in_twenty(
    hit: float, num_holdout: int
) -> None:
    rng = random.Random(7)
    covered = 0
    for _ in range(150):
        found = compare(contexts(rng, 200, hit), contexts(rng, num_holdout, 0.5))
        interval = found.cached_share_difference
        assert interval is not None
        covered += interval.low <= hit - 0.5 <= interval.high
    assert 0.9 <= covered / 150 <= 0.99


def test_more_contexts_make_it_narrower_and_calls_of_one_context_do_not() -> None:
    rng = random.Random(3)
    few, many = contexts(rng, 100, 0.5), contexts(rng, 1_600, 0.5)

    def width(found: Comparison) -> float:
        interval = found.cached_share_difference
        assert interval is not None
        return interval.high - interval.low

    longer = [ContextTally(9 * t.calls, 9 * t.prompt_tokens, 9 * t.cached_tokens) for t in few]
    assert width(compare(longer, longer)) == pytest.approx(width(compare(few, few)))
    assert width(compare(many, many)) == pytest.approx(width(compare(few, few)) / 4, rel=0.2)


def test_little_data_says_what_lacks() -> None:
    rng = random.Random(1)
    found = compare(contexts(rng, 500, 0.5), contexts(rng, MIN_CONTEXTS - 1, 0.5))
    assert found.cached_share_difference is None
    assert found.missing == "29 contexts held out, 30 needed"
    assert found.enforce.contexts == 500
    assert "enforced" in compare([], []).missing


def test_equal_contexts_leave_no_doubt() -> None:
    same = [ContextTally(1, 100, 40)] * MIN_CONTEXTS
    interval = compare(same, [ContextTally(1, 100, 20)] * MIN_CONTEXTS).cached_share_difference
    assert interval is not None
    assert (interval.estimate, interval.low, interval.high) == pytest.approx((0.2, 0.2, 0.2))


def test_a_context_on_both_arms_is_left_out() -> None:
    book = ComparisonBook()
    for n in range(40):
        book.add(NOON, Arm.ENFORCE, f"e{n}", 100, 50)
        book.add(NOON + HOUR_NS, Arm.HOLDOUT, f"h{n}", 100, 50)
    book.add(NOON + HOUR_NS, Arm.HOLDOUT, "e1", 100, 50)
    found = book.since(NOON)
    assert (found.enforce.contexts, found.holdout.contexts, found.mixed_contexts) == (39, 40, 1)
    assert book.since(NOON + HOUR_NS).holdout.contexts == 41


def test_many_contexts_are_drawn_and_each_drawn_one_is_whole() -> None:
    book = ComparisonBook()
    num = 3 * CONTEXTS_PER_HOUR
    for hour in range(2):
        for n in range(num if hour else CONTEXTS_PER_HOUR // 2):
            for _ in range(2):
                book.add(NOON + hour * HOUR_NS, Arm.ENFORCE, f"c{n}", 100, 10 * hour)
    assert book.num_contexts() == CONTEXTS_PER_HOUR + CONTEXTS_PER_HOUR // 2
    found = book.since(NOON).enforce
    assert found.contexts == CONTEXTS_PER_HOUR
    early = found.calls - 2 * found.contexts
    assert 0.8 < early / (2 * CONTEXTS_PER_HOUR / 6) < 1.2
    assert found.cached_tokens == 2 * 10 * found.contexts


def test_hours_are_forgotten() -> None:
    book = ComparisonBook()
    for hour in range(HOURS_KEPT + 5):
        book.add(NOON + hour * HOUR_NS, Arm.ENFORCE, "c", 100, 10)
    assert book.num_contexts() == HOURS_KEPT
    sizes = [book.since(NOON + hour * HOUR_NS).enforce.calls for hour in range(HOURS_KEPT)]
    assert all(a >= b for a, b in pairwise(sizes))
