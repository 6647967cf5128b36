"""Virtual time takes no time and is the same each time; real time goes as fast as it is told."""

import asyncio
import time

import pytest

from engine_bridge.sim.clock import NANOSECONDS, RealClock, VirtualClock, run_virtual


def test_virtual_hours_pass_in_order():
    async def main():
        clock, woke = VirtualClock(), []

        async def sleeper(name, seconds):
            await clock.sleep_until(seconds * NANOSECONDS)
            woke.append((name, clock.now_ns()))

        await asyncio.gather(sleeper("late", 7_200), sleeper("early", 3_600), asyncio.sleep(5_000))
        return woke

    assert run_virtual(main()) == [("early", 3_600 * NANOSECONDS), ("late", 7_200 * NANOSECONDS)]


def test_virtual_time_stands_still_while_something_is_ready():
    async def main():
        clock = VirtualClock()
        for _ in range(100):
            await asyncio.sleep(0)
        return clock.now_ns()

    assert run_virtual(main()) == 0


def test_timeouts_of_asyncio_are_virtual_too():
    async def main():
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(asyncio.Event().wait(), 60)
        return VirtualClock().now_ns()

    assert run_virtual(main()) == 60 * NANOSECONDS


def test_a_moment_that_has_passed_is_not_waited_for():
    async def main():
        await asyncio.sleep(2)
        await VirtualClock().sleep_until(NANOSECONDS)
        return VirtualClock().now_ns()

    assert run_virtual(main()) == 2 * NANOSECONDS


async def test_a_virtual_clock_needs_its_loop():
    with pytest.raises(RuntimeError, match="run_virtual"):
        VirtualClock().now_ns()


async def test_a_scaled_clock_runs_ahead_of_the_machine():
    clock = RealClock(speed=1_000.0)
    before, started = clock.now_ns(), time.monotonic_ns()
    await clock.sleep_until(before + 20 * NANOSECONDS)
    assert clock.now_ns() - before > time.monotonic_ns() - started


async def test_a_real_clock_starts_at_the_time_of_day():
    before = time.time_ns()
    clock = RealClock()
    assert before <= clock.now_ns() < before + 600 * NANOSECONDS


def test_time_does_not_stand_still():
    with pytest.raises(ValueError, match="above 0"):
        RealClock(speed=0)
