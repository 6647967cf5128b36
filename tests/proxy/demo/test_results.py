"""The demo's figures."""

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.demo.results import CallResult, Outcome, Sample


def sample(at: float, resident: int, dead: int) -> Sample:
    return Sample(
        at_seconds=at,
        resident_tokens=resident,
        dead_tokens=dead,
        num_calls=0,
        prompt_tokens=0,
        cached_tokens=0,
    )


def call(prompt: int = 10, cached: int = 0, ttft: float = 1.0) -> CallResult:
    return CallResult(
        at_seconds=0.0,
        ttft_seconds=ttft,
        prompt_tokens=prompt,
        cached_tokens=cached,
        output_tokens=1,
    )


def outcome(samples: Sequence[Sample] = (), calls: Sequence[CallResult] = ()) -> Outcome:
    return Outcome(title="t", what="w", samples=samples, calls=calls)


def test_dead_share_is_weighted_by_how_long_it_lasted() -> None:
    samples = [sample(0, 100, 0), sample(3, 100, 50), sample(4, 100, 50)]
    assert outcome(samples).dead_share == pytest.approx(0.5 / 4)


def test_an_empty_cache_has_no_dead_share() -> None:
    assert outcome([sample(0, 0, 0), sample(5, 0, 0)]).dead_share == 0.0
    assert outcome().dead_share == 0.0


def test_shares_of_a_run_are_those_of_its_tokens() -> None:
    found = outcome(calls=[call(100, 80), call(300, 20)])
    assert (found.prompt_tokens, found.cached_tokens, found.hit_share) == (400, 100, 0.25)
    assert outcome().hit_share == 0.0


@given(st.lists(st.floats(0, 1000), min_size=1, max_size=50))
def test_percentiles_lie_within_the_calls_and_do_not_cross(times: list[float]) -> None:
    found = outcome(calls=[call(ttft=each) for each in times])
    low, high = found.ttft_seconds(50), found.ttft_seconds(95)
    assert min(times) - 1e-9 <= low <= high + 1e-9
    assert high <= max(times) + 1e-9
