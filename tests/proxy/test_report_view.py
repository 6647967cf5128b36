"""Shares follow from the amounts, and what cannot be told is null."""

from hypothesis import given
from hypothesis import strategies as st

from lifecycle.projections.report_counts import Counts
from proxy.report import DeadSample
from proxy.report_view import figures, sample_view

AMOUNTS = st.builds(Counts, **{name: st.integers(0, 10**12) for name in Counts.__struct_fields__})


@given(AMOUNTS)
def test_every_amount_is_there_and_every_share_is_of_something(counts: Counts) -> None:
    shown = figures(counts)
    assert all(shown[name] == getattr(counts, name) for name in counts.__struct_fields__)
    assert shown["computed_tokens"] == counts.counted_prompt_tokens - counts.cached_tokens
    for name, part, whole in (
        ("freed_share", counts.freed_tokens, counts.dead_seen_tokens),
        ("regretted_share", counts.regretted_tokens, counts.prompt_tokens),
        ("verified_share", counts.chunks_shown, counts.chunks_checked),
        ("cached_share", counts.cached_tokens, counts.counted_prompt_tokens),
    ):
        assert shown[name] == (part / whole if whole else None)


def test_nothing_has_no_share() -> None:
    assert {v for k, v in figures(Counts()).items() if k.endswith("_share")} == {None}
    sample = DeadSample(at_ns=1, dead_tokens=0, dead_bytes=0, resident_tokens=0, resident_bytes=0)
    assert sample_view(sample)["dead_share"] is None
