"""The table says what the outcomes are."""

import io

from rich.console import Console

from proxy.demo.results import CallResult, Outcome
from proxy.demo.table import difference, side_by_side


def outcome(title: str, cached: int, num_failed: int = 0) -> Outcome:
    calls = [
        CallResult(
            at_seconds=0,
            ttft_seconds=0.5,
            prompt_tokens=1000,
            cached_tokens=cached,
            output_tokens=1,
        )
    ]
    return Outcome(title=title, what="", samples=[], calls=calls, num_failed=num_failed)


def printed(*outcomes: Outcome) -> str:
    out = io.StringIO()
    Console(file=out, width=120).print(side_by_side(outcomes, "SIMULATED"))
    return out.getvalue()


def test_columns_stand_side_by_side_under_the_mark() -> None:
    text = printed(outcome("stock", 250), outcome("ours", 750))
    assert "SIMULATED" in text
    line = next(line for line in text.splitlines() if "found in the cache" in line)
    assert line.index("25.0 %") < line.index("75.0 %")


def test_failed_calls_are_not_hidden() -> None:
    assert "3 failed" in printed(outcome("ours", 1, num_failed=3))


def test_difference_is_ours_against_stock() -> None:
    found = difference(outcome("stock", 200), outcome("ours", 600))
    assert round(found["hit_points"]) == 40
    assert found["computed_share"] == -0.5
