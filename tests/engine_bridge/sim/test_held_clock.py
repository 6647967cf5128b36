"""Simulated time passes only while nothing is on its way between an agent and the engine."""

import asyncio

import pytest

from engine_bridge.sim.held_clock import NANOSECONDS, HeldClock


async def spend(clock: HeldClock) -> int:
    """Some real time, and how much simulated time it was."""
    before = clock.now_ns()
    await asyncio.sleep(0.01)
    return clock.now_ns() - before


async def test_time_runs_faster_than_the_machine_s() -> None:
    assert await spend(HeldClock(1000)) >= 0.01 * 1000 * NANOSECONDS * 0.9


async def test_time_stands_while_a_call_is_on_its_way() -> None:
    num_inside = 0
    clock = HeldClock(1000, lambda: num_inside)
    with clock.call():
        assert await spend(clock) == 0
        num_inside = 1
        clock.now_ns()
        assert await spend(clock) > 0
        with clock.call():
            assert await spend(clock) == 0
        num_inside = 0
        clock.now_ns()
        assert await spend(clock) == 0
    assert await spend(clock) > 0


async def test_a_failing_call_does_not_stop_time_for_ever() -> None:
    clock = HeldClock(1000)
    with pytest.raises(ValueError, match="failed"), clock.call():
        raise ValueError("failed")
    assert await spend(clock) > 0


async def test_who_waits_wakes_when_that_time_has_come_however_long_it_stood() -> None:
    clock = HeldClock(1000)
    due = clock.now_ns() + 5 * NANOSECONDS
    waiting = asyncio.ensure_future(clock.sleep_until(due))
    with clock.call():
        await asyncio.sleep(0.02)
        assert not waiting.done()
    await asyncio.wait_for(waiting, 10)
    assert clock.now_ns() >= due
    await clock.wait_until(clock.now_seconds() - 1)


def test_a_clock_that_goes_backwards_is_refused() -> None:
    with pytest.raises(ValueError, match="above 0"):
        HeldClock(-1)
