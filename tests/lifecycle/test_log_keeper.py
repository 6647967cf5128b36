"""Snapshots and trims change nothing that is true: the whole log, a snapshot and its tail, what is left."""

import asyncio
import os
import subprocess
import sys
from collections.abc import AsyncIterator, Iterable

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lifecycle.core.events import RecordedEvent
from lifecycle.projections.contexts import Contexts
from lifecycle.store.memory import MemoryEventLog
from lifecycle.store.snapshots import MemorySnapshots
from lifecycle.tracker import Tracker
from tests.lifecycle.random_books import OPERATIONS, RETENTION_SECONDS, RandomBooks, busy, facts, plans

STEPS = st.lists(st.sampled_from([*OPERATIONS, "snapshot", "snapshot", "trim", "later"]), max_size=120)


async def each(recorded: Iterable[RecordedEvent]) -> AsyncIterator[RecordedEvent]:
    for one in recorded:
        yield one


async def from_zero(recorded: list[RecordedEvent]) -> Contexts:
    contexts = Contexts(RETENTION_SECONDS)
    await contexts.rebuild(each(recorded))
    return contexts


async def lived(seed: int, steps: Iterable[str]) -> tuple[RandomBooks, MemorySnapshots]:
    """A life with snapshots and trims, each of which is a chance to be wrong."""
    log, snapshots = MemoryEventLog(), MemorySnapshots()
    it = RandomBooks(log, snapshots, seed)
    await it.start()
    for step in steps:
        await it.step(step)
    return it, snapshots


async def all_agree(it: RandomBooks, snapshots: MemorySnapshots) -> bytes:
    """Live state, replay from zero, and a restart on what is left are the same, and plan the same."""
    now = it.clock.now_ns()
    live = it.tracker.contexts
    whole = await from_zero(it.recorded)
    assert facts(whole) == facts(live)
    again = Tracker(it.log, it.clock, RETENTION_SECONDS)
    await again.start(snapshots)
    assert facts(again.contexts) == facts(whole)
    assert plans(again.contexts, now) == plans(whole, now) == plans(live, now)
    for namespace in live.index.namespaces():
        assert again.contexts.index.stats(namespace) == live.index.stats(namespace)
    return facts(whole)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(seed=st.integers(0, 1 << 16), steps=STEPS)
def test_any_life_is_the_same_from_zero_from_a_snapshot_and_from_what_a_trim_left(
    seed: int, steps: list[str]
) -> None:
    async def play() -> None:
        it, snapshots = await lived(seed, steps)
        await all_agree(it, snapshots)

    asyncio.run(play())


@pytest.mark.parametrize("seed", range(6))
async def test_busy_lives_are_the_same_too(seed: int) -> None:
    it, snapshots = await lived(seed, busy(seed, 200))
    await all_agree(it, snapshots)
    assert await it.log.first_position() > 1


def test_a_restart_is_the_same_under_any_hash_seed() -> None:
    code = (
        "import asyncio\n"
        "from tests.lifecycle.random_books import busy\n"
        "from tests.lifecycle.test_log_keeper import all_agree, lived\n"
        "async def main():\n"
        "    it, snapshots = await lived(3, busy(3, 120))\n"
        "    print((await all_agree(it, snapshots)).hex(), it.keeper.position, it.keeper.size_bytes)\n"
        "asyncio.run(main())\n"
    )
    printed = {
        subprocess.run(
            [sys.executable, "-c", code],
            env={**os.environ, "PYTHONHASHSEED": seed},
            capture_output=True,
            check=True,
            text=True,
        ).stdout
        for seed in ("0", "1", "4242")
    }
    assert len(printed) == 1
