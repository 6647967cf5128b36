"""The report for a terminal: the alarm first, then the totals, whose they are, what holding out showed."""

from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

Figures = Mapping[str, Any]

_SCALES = ((1e9, "G"), (1e6, "M"), (1e3, "k"))
_COLUMNS = ("calls", "prompt", "cached", "dead", "freed", "would\nfree", "regret", "would\nregret", "shown")


def report_table(document: Mapping[str, Any]) -> RenderableType:
    """The document of `/kv/v1/report` as rich text. Amounts are rounded, shares are of what they name."""
    parts: list[RenderableType] = [_headline(document)]
    parts += [Text(f"! {problem}", style="bold red") for problem in document["problems"]]
    parts += [_totals(document), _groups(document)]
    parts += [Text(line) for line in _killers(document["prefix_killers"])]
    parts += [Text(line) for line in _comparison(document["comparison"])]
    parts += [Text(line) for line in _harm(document["harm"])]
    return Group(*parts)


def amount(number: float) -> str:
    """A number in at most six signs."""
    if number < 10_000:
        return f"{number:,.0f}"
    limit, unit = next(each for each in _SCALES if number >= each[0])
    scaled = number / limit
    return f"{scaled:.{0 if scaled >= 100 else 1 if scaled >= 10 else 2}f}{unit}"


def size(num_bytes: float) -> str:
    """Bytes as people read them."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if num_bytes < 1024:
            return f"{num_bytes:.0f} {unit}" if unit == "B" else f"{num_bytes:.1f} {unit}"
        num_bytes /= 1024
    return f"{num_bytes:.1f} TiB"


def share(part: float | None) -> str:
    """A share in per cent; a dash where it cannot be told."""
    if part is None:
        return "-"
    return f"{100 * part:.3f} %" if 0 < part < 0.001 else f"{100 * part:.1f} %"


def duration(seconds: float) -> str:
    """A span in its two largest units."""
    days, rest = divmod(int(seconds), 86400)
    hours, rest = divmod(rest, 3600)
    minutes, left = divmod(rest, 60)
    named = [(days, "d"), (hours, "h"), (minutes, "min"), (left, "s")]
    first = next((at for at, (number, _) in enumerate(named) if number), 3)
    return " ".join(f"{number} {unit}" for number, unit in named[first : first + 2])


def _headline(document: Mapping[str, Any]) -> Text:
    asked, covered = duration(document["asked_seconds"]), duration(document["covered_seconds"])
    if not document["from_ns"]:
        return Text(f"Asked for {asked}: nothing has been recorded yet.", style="bold")
    began = datetime.fromtimestamp(document["from_ns"] / 1e9, UTC)
    text = f"Asked for {asked}, covers {covered}, since {began:%Y-%m-%d %H:%M} UTC."
    if not document["complete"]:
        text += " The log is still being read: figures are not complete."
    return Text(text, style="bold")


def _totals(document: Mapping[str, Any]) -> Table:
    total: Figures = document["total"]
    table = Table(box=None, pad_edge=False)
    table.add_column("")
    table.add_column("tokens", justify="right")
    table.add_column("bytes", justify="right")
    table.add_column("share")
    for name, key, of in (
        ("prompted", "prompt_tokens", ""),
        ("found in the cache", "cached_tokens", f"{share(total['cached_share'])} of what engines counted"),
        ("dead KV seen", "dead_seen_tokens", ""),
        ("  freed", "freed_tokens", f"{share(total['freed_share'])} of the dead seen"),
        ("  would be freed", "would_free_tokens", f"{share(total['would_free_share'])} of the dead seen"),
        ("regretted", "regretted_tokens", f"{share(total['regretted_share'])} of what was prompted"),
        ("would be regretted", "would_regret_tokens", f"{share(total['would_regret_share'])}"),
        ("computed again", "recomputed_tokens", ""),
        (
            "  avoidable",
            "avoidable_tokens",
            f"at most {share(total['avoidable_share'])} of what was computed",
        ),
    ):
        bytes_key = key.replace("_tokens", "_bytes")
        table.add_row(name, amount(total[key]), size(total[bytes_key]) if bytes_key in total else "", of)
    dead = document["dead_now"]
    if dead is not None:
        of = f"{share(dead['dead_share'])} of what is known to lie there"
        table.add_row("dead in the cache now", amount(dead["dead_tokens"]), size(dead["dead_bytes"]), of)
    shown, checked = total["chunks_shown"], total["chunks_checked"]
    verified = (
        f"{share(total['verified_share'])}: {amount(shown)} of {amount(checked)} chunks shown by the cache"
    )
    table.add_row("verified", "", "", verified)
    return table


def _groups(document: Mapping[str, Any]) -> Table:
    table = Table(box=SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    table.add_column(document["by"], overflow="fold")
    for name in _COLUMNS:
        table.add_column(name, justify="right", no_wrap=True)
    for name, figures in document["groups"].items():
        table.add_row(
            name,
            amount(figures["calls"]),
            amount(figures["prompt_tokens"]),
            share(figures["cached_share"]),
            amount(figures["dead_seen_tokens"]),
            amount(figures["freed_tokens"]),
            amount(figures["would_free_tokens"]),
            amount(figures["regretted_tokens"]),
            amount(figures["would_regret_tokens"]),
            share(figures["verified_share"]),
        )
    return table


def _comparison(comparison: Mapping[str, Any]) -> Iterator[str]:
    if comparison["missing"]:
        yield f"Held out against enforced: not enough data: {comparison['missing']}."
        return
    for arm, name in (("enforce", "Enforced"), ("holdout", "Held out")):
        figures = comparison[arm]
        yield (
            f"{name}: {amount(figures['contexts'])} contexts, {share(figures['cached_share'])} cached, "
            f"{amount(figures['computed_tokens_per_call'])} tokens computed a call."
        )
    cached = comparison["cached_share_difference"]
    points = [100 * cached[end] for end in ("estimate", "low", "high")]
    computed = comparison["computed_tokens_per_call_difference"]
    yield (
        f"Enforced minus held out, with 95 % intervals: {points[0]:+.1f} points cached "
        f"({points[1]:+.1f} to {points[2]:+.1f}), {computed['estimate']:+,.0f} tokens computed a call "
        f"({computed['low']:+,.0f} to {computed['high']:+,.0f})."
    )


def _killers(found: list[Mapping[str, Any]]) -> Iterator[str]:
    costly = [entry for entry in found if entry["lost_tokens"]]
    if costly:
        yield "Prompts that left the one before them, what it kept from being found (docs/lint.md):"
    for entry in costly:
        yield (
            f"  {entry['harness']}: {entry['kind']}, {entry['breaks']:,} times, "
            f"{amount(entry['lost_tokens'])} tokens"
        )


def _harm(harm: list[Mapping[str, Any]]) -> Iterator[str]:
    for entry in harm:
        state = "observes only" if entry["demoted"] else "within" if not entry["exceeded"] else "EXCEEDED"
        yield (
            f"Harm budget of model {entry['model']}, tenant {entry['tenant']}, last "
            f"{duration(entry['window_seconds'])}: {entry['regretted_tokens']:,} of "
            f"{entry['allowed_tokens']:,} tokens, {state}."
        )
