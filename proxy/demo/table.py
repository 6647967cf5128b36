"""The demo's table: while it runs in the terminal, and at its end."""

from collections.abc import Callable, Mapping, Sequence

import msgspec
from rich.table import Table

from proxy.demo.results import Outcome


class Row(msgspec.Struct, frozen=True):
    """One line of the table."""

    name: str
    text: Callable[[Outcome], str]


def _count(value: int) -> str:
    return f"{value:,}"


ROWS: Sequence[Row] = (
    Row("calls", lambda o: _count(len(o.calls)) + (f" ({o.num_failed} failed)" if o.num_failed else "")),
    Row("prompt tokens", lambda o: _count(o.prompt_tokens)),
    Row("found in the cache", lambda o: f"{o.hit_share * 100:.1f} %"),
    Row("computed again or anew", lambda o: _count(o.prompt_tokens - o.cached_tokens)),
    Row("dead share of the cache, over time", lambda o: f"{o.dead_share * 100:.1f} %"),
    Row("dead tokens, most at once", lambda o: _count(o.peak_dead_tokens)),
    Row("chunks freed because dead", lambda o: _count(o.num_reclaimed_chunks)),
    Row("tokens freed and needed again", lambda o: _count(o.num_regretted_tokens)),
    Row("one-offs kept out of the store", lambda o: _count(o.num_bypassed_calls)),
    Row("time to first token, median", lambda o: f"{o.ttft_seconds(50):.2f} s"),
    Row("time to first token, 95th percentile", lambda o: f"{o.ttft_seconds(95):.2f} s"),
)


def side_by_side(outcomes: Sequence[Outcome], badge: str) -> Table:
    """All columns; the title says whether the times are simulated."""
    table = Table(title=f"{badge}", title_justify="left", title_style="bold yellow", expand=False)
    table.add_column("")
    for outcome in outcomes:
        table.add_column(outcome.title, justify="right")
    for row in ROWS:
        table.add_row(row.name, *(row.text(outcome) for outcome in outcomes))
    return table


def difference(stock: Outcome, ours: Outcome) -> Mapping[str, float]:
    """What changed from the first column to the last, as the last line of the demo says it."""
    computed = stock.prompt_tokens - stock.cached_tokens
    again = ours.prompt_tokens - ours.cached_tokens
    return {
        "hit_points": (ours.hit_share - stock.hit_share) * 100,
        "dead_points": (ours.dead_share - stock.dead_share) * 100,
        "computed_share": again / computed - 1 if computed else 0.0,
    }
