"""The budget rolls with the hour, forgives one call, and has an allowance in quiet times."""

from lifecycle.projections.report_counts import MINUTE_NS
from lifecycle.projections.report_harm import MAX_PAIRS, Harm, HarmBook, HarmBudget

NOON = 500_000 * 60 * MINUTE_NS


def only(book: HarmBook, now_ns: int = NOON) -> Harm:
    (harm,) = book.all(now_ns)
    return harm


def test_a_tenth_of_a_per_cent_of_an_hours_prompts() -> None:
    book = HarmBook(HarmBudget())
    for minute in range(60):
        book.prompted(NOON + minute * MINUTE_NS, "m", "t", 100_000)
    now = NOON + 59 * MINUTE_NS
    for _ in range(3):
        book.regretted(now, "m", "t", 2_000)
    assert not only(book, now).exceeded
    book.regretted(now, "m", "t", 1)
    assert only(book, now).exceeded
    assert only(book, now).allowed_tokens == 6_000


def test_one_call_never_exceeds_it_and_a_quiet_hour_has_an_allowance() -> None:
    book = HarmBook(HarmBudget())
    book.regretted(NOON, "m", "t", 500_000)
    assert not only(book).exceeded
    other = HarmBook(HarmBudget())
    for _ in range(4):
        other.regretted(NOON, "m", "t", 250)
    assert only(other).regretted_tokens == only(other).allowed_tokens
    assert not only(other).exceeded
    other.regretted(NOON, "m", "t", 1)
    assert only(other).exceeded


def test_the_window_rolls_and_pairs_stand_apart() -> None:
    book = HarmBook(HarmBudget(window_seconds=600))
    for _ in range(3):
        book.regretted(NOON, "m", "t", 5_000)
    book.regretted(NOON, "m", "other", 5_000)
    assert [h.exceeded for h in book.all(NOON)] == [False, True]
    assert [h.exceeded for h in book.all(NOON + 600 * 10**9)] == [False, True]
    assert book.all(NOON + 661 * 10**9) == []


def test_rearming_begins_anew() -> None:
    book = HarmBook(HarmBudget())
    for _ in range(3):
        book.regretted(NOON, "m", "t", 5_000)
    book.rearmed("m", "t")
    assert book.all(NOON) == []
    book.regretted(NOON, "m", "t", 5_000)
    assert not only(book).exceeded


def test_names_without_end_cost_no_memory() -> None:
    book = HarmBook(HarmBudget())
    for n in range(MAX_PAIRS + 10):
        book.prompted(NOON, "m", f"t{n}", 1)
    assert len(book.all(NOON)) == MAX_PAIRS
