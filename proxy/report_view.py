"""The report as plain JSON: the units stand in the names, a share that cannot be told is null."""

from collections.abc import Mapping
from typing import Any

import msgspec

from lifecycle.projections.report_counts import Counts, Dimension, killers
from proxy.report import DeadSample, ReportKeeper

NS_PER_SECOND = 1e9

NUM_KILLERS = 10


def report_view(keeper: ReportKeeper, start_ns: int, now_ns: int, by: Dimension) -> dict[str, Any]:
    """The whole report of a span, grouped by one dimension."""
    span = keeper.report.since(start_ns, now_ns)
    demoted = keeper.demotions
    return {
        "asked_seconds": (now_ns - start_ns) / NS_PER_SECOND,
        "from_ns": span.from_ns,
        "to_ns": now_ns,
        "covered_seconds": max(now_ns - span.from_ns, 0) / NS_PER_SECOND if span.from_ns else 0.0,
        "complete": keeper.complete,
        "total": figures(span.total()),
        "by": by,
        "groups": {name: figures(counts) for name, counts in span.by(by).items()},
        "prefix_killers": [
            {
                "harness": harness,
                "kind": left,
                "breaks": counts.prefix_breaks + counts.head_breaks,
                "lost_tokens": counts.prefix_lost_tokens + counts.head_lost_tokens,
            }
            for harness, left, counts in killers(span.cells)[:NUM_KILLERS]
        ],
        "verified_share": {"model": _verified(span.by("model")), "harness": _verified(span.by("harness"))},
        "dead_now": sample_view(keeper.samples[-1]) if keeper.samples else None,
        "comparison": msgspec.to_builtins(span.comparison),
        "harm": [
            {**msgspec.to_builtins(harm), "demoted": (harm.model, harm.tenant) in demoted}
            for harm in span.harm
        ],
        "problems": keeper.problems,
    }


def figures(counts: Counts) -> dict[str, Any]:
    """The amounts, and what follows from them."""
    computed = counts.counted_prompt_tokens - counts.cached_tokens
    return {
        **msgspec.to_builtins(counts),
        "computed_tokens": computed,
        "cached_share": _share(counts.cached_tokens, counts.counted_prompt_tokens),
        "avoidable_share": _share(counts.avoidable_tokens, computed),
        "verified_share": _share(counts.chunks_shown, counts.chunks_checked),
        "freed_share": _share(counts.freed_tokens, counts.dead_seen_tokens),
        "would_free_share": _share(counts.would_free_tokens, counts.dead_seen_tokens),
        "regretted_share": _share(counts.regretted_tokens, counts.prompt_tokens),
        "would_regret_share": _share(counts.would_regret_tokens, counts.prompt_tokens),
    }


def samples_view(keeper: ReportKeeper, start_ns: int) -> dict[str, Any]:
    """What lay dead over time: each second where that is still kept, each minute before."""
    fine = list(keeper.samples)
    began = fine[0].at_ns if fine else 0
    samples = [s for s in keeper.coarse_samples if s.at_ns < began] + fine
    return {"samples": [sample_view(s) for s in samples if s.at_ns >= start_ns]}


def sample_view(sample: DeadSample) -> dict[str, Any]:
    """One sample with its share."""
    dead_share = _share(sample.dead_tokens, sample.resident_tokens)
    return {**msgspec.to_builtins(sample), "dead_share": dead_share}


def _verified(groups: Mapping[str, Counts]) -> dict[str, float | None]:
    return {
        name: _share(counts.chunks_shown, counts.chunks_checked)
        for name, counts in groups.items()
        if counts.chunks_checked
    }


def _share(part: int, whole: int) -> float | None:
    return part / whole if whole else None
