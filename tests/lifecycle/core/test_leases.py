"""What the passing of time does."""

import pytest

from lifecycle.core.leases import lease_end_ns, next_deadline_ns
from lifecycle.core.observations import AppendMessages, DeclareWaiting, PinSpan
from lifecycle.vocabulary import LEASE_SECONDS, VersionState, WaitKind
from tests.lifecycle.core.story import SECOND, Story

MINUTES = {
    WaitKind.TOOL: 15,
    WaitKind.UNKNOWN: 30,
    WaitKind.HUMAN: 60,
    WaitKind.SUBAGENT: 60,
    WaitKind.DECODE: 30,
}


def test_every_wait_class_has_a_lease() -> None:
    assert set(LEASE_SECONDS) == set(WaitKind) == set(MINUTES)


@pytest.mark.parametrize("wait", MINUTES)
@pytest.mark.parametrize("declared", [True, False])
def test_silence_ends_a_context_by_what_it_waits_for(wait: WaitKind, declared: bool) -> None:
    story = Story()
    story.call("s0 u1", wait=WaitKind.UNKNOWN if declared else wait)
    if declared:
        story.do(DeclareWaiting, kind=wait)
    story.tick(MINUTES[wait] * 60 - 1)
    assert story.state.open
    story.tick(1)
    assert not story.state.open
    assert story.state.versions == {}


def test_a_context_that_never_called_ends_too() -> None:
    story = Story()
    story.tick(30 * 60)
    assert not story.state.open


def test_a_call_in_flight_keeps_its_context_however_long_it_takes() -> None:
    story = Story()
    story.arrive("s0 u1")
    story.map()
    story.tick(10 * 3600)
    assert story.state.open
    story.first()
    story.tick(10 * 3600)
    assert story.live()["s0 u1"] is VersionState.SUSPENDED
    story.end()
    story.tick(30 * 60 - 1)
    assert story.state.open


def test_a_pin_keeps_its_own_lease() -> None:
    story = Story()
    story.call("s0 u1", wait=WaitKind.TOOL)
    story.do(PinSpan, span=(0, 1), ttl=3600.0)
    story.tick(15 * 60)
    assert not story.state.open
    assert story.live() == {"s0": VersionState.PINNED}
    story.tick(46 * 60)
    assert story.state.versions == {}


def test_in_a_gap_silence_ends_a_context_only_after_the_longest_lease() -> None:
    story = Story()
    story.call("s0 u1", wait=WaitKind.TOOL)
    story.do(AppendMessages, seq=2, n=1)
    story.tick(6)
    assert story.state.gap
    story.tick(50 * 60)
    assert story.state.open
    story.tick(10 * 60)
    assert not story.state.open


def test_the_same_tick_twice_changes_nothing_the_second_time() -> None:
    story = Story()
    story.call("s0 u1 a1")
    story.do(PinSpan, span=(0, 1), ttl=5.0)
    story.call("s0 u9", "c2")
    story.do(AppendMessages, seq=5, n=1)
    story.tick(3600)
    assert story.seen
    assert story.tick() == []


def test_time_never_runs_backwards() -> None:
    story = Story()
    story.call("s0 u1")
    story.now -= 100 * SECOND
    story.arrive("s0 u1 a1", "c2")
    stamps = [e.at_ns for e in story.events]
    assert stamps == sorted(stamps)


def test_nothing_happens_before_the_deadline_and_something_at_it() -> None:
    story = Story()
    story.call("s0 u1 a1")
    story.do(PinSpan, span=(0, 1), ttl=1000.0)
    story.call("s0 u9", "c2")
    story.do(AppendMessages, seq=5, n=1)
    num_steps = 0
    while (deadline := next_deadline_ns(story.state)) is not None:
        story.now = deadline - 1
        assert story.tick() == []
        story.now = deadline
        assert story.tick()
        num_steps += 1
    assert story.state.versions == {}
    assert 3 <= num_steps <= 6


def test_the_lease_counts_from_the_last_sign_of_life() -> None:
    story = Story()
    story.call("s0 u1")
    assert lease_end_ns(story.state) == story.now + 1800 * SECOND
