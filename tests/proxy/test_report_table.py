"""What a person reads: the alarm first, every group, and plain words where data is missing."""

import io
import random
from typing import Any

import msgspec
import pytest
from rich.console import Console

from lifecycle.projections.report_comparison import compare
from lifecycle.projections.report_counts import Counts
from proxy.report_table import amount, duration, report_table, share, size
from proxy.report_view import figures
from tests.lifecycle.projections.test_report_comparison import contexts

HARM = {
    "model": "m",
    "tenant": "t",
    "regretted_tokens": 5_120,
    "allowed_tokens": 1_000,
    "window_seconds": 3600.0,
    "exceeded": True,
    "demoted": True,
}


def document(**changes: Any) -> dict[str, Any]:
    counts = Counts(calls=7, prompt_tokens=70_000, dead_seen_tokens=2_048, freed_tokens=1_024)
    return {
        "asked_seconds": 86_400.0,
        "covered_seconds": 11_520.0,
        "from_ns": 1_764_000_000 * 10**9,
        "complete": True,
        "total": figures(counts),
        "by": "tenant",
        "groups": {"acme": figures(counts), "(unknown)": figures(Counts())},
        "dead_now": None,
        "comparison": msgspec.to_builtins(compare([], [])),
        "prefix_killers": [],
        "harm": [],
        "problems": [],
        **changes,
    }


def printed(width: int = 80, **changes: Any) -> str:
    console = Console(width=width, file=io.StringIO())
    with console.capture() as capture:
        console.print(report_table(document(**changes)))
    return capture.get()


def test_the_span_that_is_covered_is_said_first() -> None:
    assert printed().startswith("Asked for 1 d 0 h, covers 3 h 12 min, since 2025-11-24 16:00 UTC.")
    assert "not complete" in printed(complete=False)
    assert "nothing has been recorded yet" in printed(from_ns=0)


def test_the_alarm_stands_above_the_figures() -> None:
    text = printed(problems=["harm budget: too much"], harm=[HARM])
    assert text.index("harm budget: too much") < text.index("dead KV seen")
    assert "5,120 of 1,000 tokens, observes only" in " ".join(text.split())


def test_groups_and_shares_can_be_read_in_eighty_columns() -> None:
    text = printed()
    assert max(map(len, text.splitlines())) <= 80
    assert "…" not in text
    assert "acme" in text
    assert "50.0 % of the dead seen" in text
    assert "70.0k" in text


def test_what_kills_prefixes_is_named_where_it_costs() -> None:
    killers = [
        {"harness": "claude-code", "kind": "billing", "breaks": 1_200, "lost_tokens": 45_000_000},
        {"harness": "httpx", "kind": "shortened", "breaks": 3, "lost_tokens": 0},
    ]
    text = printed(prefix_killers=killers)
    assert "claude-code: billing, 1,200 times, 45.0M tokens" in text
    assert "shortened" not in text
    assert "Prompts that left" not in printed()


def test_little_data_is_said_and_much_has_an_interval() -> None:
    assert "not enough data: 0 contexts enforced, 30 needed" in " ".join(printed().split())
    rng = random.Random(5)
    found = compare(contexts(rng, 200, 0.6), contexts(rng, 60, 0.4))
    text = printed(300, comparison=msgspec.to_builtins(found))
    assert "Held out: 60 contexts" in text
    assert "points cached (+" in text


@pytest.mark.parametrize(
    ("number", "text"),
    [
        (0, "0"),
        (9_999, "9,999"),
        (10_000, "10.0k"),
        (123_456, "123k"),
        (1_225_000, "1.23M"),
        (12_345_678, "12.3M"),
        (5e11, "500G"),
    ],
)
def test_amounts_are_short(number: float, text: str) -> None:
    assert amount(number) == text
    assert len(text) <= 6


def test_units() -> None:
    assert [size(n) for n in (0, 1023, 1536, 5 << 30, 3 << 40)] == [
        "0 B",
        "1023 B",
        "1.5 KiB",
        "5.0 GiB",
        "3.0 TiB",
    ]
    assert [duration(n) for n in (0, 61, 7_320, 90_000)] == ["0 s", "1 min 1 s", "2 h 2 min", "1 d 1 h"]
    assert [share(n) for n in (None, 0.0, 0.0004, 0.5)] == ["-", "0.0 %", "0.040 %", "50.0 %"]
