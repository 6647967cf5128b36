"""Snapshots and trims change nothing that is true: the whole log, a snapshot and its tail, what is left."""

import asyncio
import os
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lifecycle.errors import LogUnavailable
from lifecycle.log_keeper import LogKeeper, Reader
from lifecycle.ports import SnapshotStore
from lifecycle.snapshots import read_manifest
from lifecycle.store.memory import MemoryEventLog
from lifecycle.store.snapshots import MemorySnapshots
from lifecycle.tracker import Tracker
from tests.lifecycle.lives import Agent
from tests.lifecycle.random_books import (
    KEEP_RECURRING_SECONDS,
    OPERATIONS,
    RETENTION_SECONDS,
    RandomBooks,
    all_agree,
    busy,
    facts,
    from_zero,
    lived,
)

STEPS = st.lists(st.sampled_from([*OPERATIONS, "snapshot", "snapshot", "trim", "later"]), max_size=120)


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
        "from tests.lifecycle.random_books import all_agree, busy, lived\n"
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


async def until(condition: Callable[[], bool]) -> None:
    for _ in range(20_000):
        if condition():
            return
        await asyncio.sleep(0.001)
    raise TimeoutError


class FailingSnapshots(MemorySnapshots):
    """Refuses what is put while `away`."""

    def __init__(self) -> None:
        super().__init__()
        self.away = False

    async def put(self, parts: Mapping[str, bytes]) -> None:
        if self.away:
            raise LogUnavailable("no room is left on its disk")
        await super().put(parts)


async def begun(snapshots: SnapshotStore | None = None, readers: Sequence[Reader] = ()) -> RandomBooks:
    it = RandomBooks(MemoryEventLog(), snapshots or MemorySnapshots(), seed=1)
    it.keeper = LogKeeper(it.tracker, it.log, readers)
    return await it.start()


async def spoken(it: RandomBooks, num_calls: int = 3) -> int:
    """Something happens; answers the position after it."""
    for step in ("open", *["call"] * num_calls):
        await it.step(step)
    return await it.log.head()


async def test_nothing_is_trimmed_before_two_snapshots_tell_of_it_and_it_is_old() -> None:
    it = await begun()
    first = await spoken(it)
    await it.step("snapshot")
    await it.step("later")
    await it.step("trim")
    assert await it.log.first_position() == 1, "one snapshot may turn out to be damaged"
    await spoken(it)
    await it.step("snapshot")
    await it.step("trim")
    assert await it.log.first_position() == first + 1 == it.keeper.first_position
    await spoken(it)
    await it.step("snapshot")
    await it.step("trim")
    assert await it.log.first_position() == first + 1, "the rest is young"
    await it.step("later")
    await it.step("trim")
    assert await it.log.first_position() > first + 1


async def test_nothing_is_trimmed_that_a_reader_has_not_dealt_with() -> None:
    needed: dict[str, int | None] = {"one": 2, "two": None}

    async def one() -> int | None:
        return needed["one"]

    async def two() -> int | None:
        return needed["two"]

    it = await begun(readers=(one, two))
    position = await spoken(it)
    for step in ("snapshot", "call", "snapshot", "later", "trim"):
        await it.step(step)
    assert await it.log.first_position() == 3
    needed["one"], needed["two"] = position + 100, 4
    await it.step("trim")
    assert await it.log.first_position() == 5
    needed["two"] = None
    await it.step("trim")
    assert await it.log.first_position() == position + 1


async def test_a_restart_trims_no_further_than_the_older_snapshot_that_it_can_read() -> None:
    snapshots = MemorySnapshots()
    it = await begun(snapshots)
    older = await spoken(it)
    await it.step("snapshot")
    await spoken(it)
    await it.step("snapshot")
    await it.step("later")
    newest, kept = await snapshots.newest_first()
    assert kept.position == older
    for manifest, first in ((b"damaged", 1), (kept.manifest, older + 1)):
        await snapshots.commit(newest, older, set(read_manifest(newest).parts()))
        snapshots._snapshots[older] = manifest
        again = LogKeeper(Tracker(it.log, it.clock, RETENTION_SECONDS, KEEP_RECURRING_SECONDS), it.log)
        await again.start(snapshots)
        assert again.position == newest.position
        await again.trim()
        assert await it.log.first_position() == first


async def test_what_lands_while_the_books_rest_is_applied_after_it_and_in_order() -> None:
    it = await begun()
    await spoken(it)
    agent = it.agents[0]
    before = facts(it.tracker.contexts)
    async with it.tracker.at_rest() as contexts:
        arriving = asyncio.ensure_future(agent.arrive("s1 u1", "during"))
        stored = asyncio.ensure_future(it.step("store"))
        for _ in range(50):
            await asyncio.sleep(0)
        assert await it.log.head() > contexts.position, "it is recorded at once"
        assert facts(contexts) == before
        assert not arriving.done()
    await arriving
    await stored
    assert "during" in agent.state.attempts
    assert [r.position for r in it.recorded] == list(range(1, await it.log.head() + 1))
    assert facts(await from_zero(it.recorded)) == facts(it.tracker.contexts)


async def test_a_store_that_fails_is_told_counted_and_tried_again() -> None:
    snapshots = FailingSnapshots()
    it = await begun(snapshots)
    for _ in range(30):
        await spoken(it, 20)
    snapshots.away = True
    running = asyncio.ensure_future(it.keeper.run(look_seconds=0.001))
    await until(lambda: it.keeper.num_failures > 0)
    assert "no room is left on its disk" in it.keeper.problem
    assert it.keeper.position == 0
    snapshots.away = False
    await until(lambda: it.keeper.position > 0 and not it.keeper.problem)
    running.cancel()
    assert it.keeper.size_bytes > 0
    assert it.keeper.taken_ns == it.clock.now_ns()


async def test_the_last_snapshot_makes_the_next_start_read_nothing() -> None:
    snapshots = FailingSnapshots()
    it = await begun(snapshots)
    position = await spoken(it)
    snapshots.away = True
    await it.keeper.close()
    assert list(await snapshots.newest_first()) == [], "a failure at the end holds nobody up"
    snapshots.away = False
    await it.keeper.close()
    (kept,) = await snapshots.newest_first()
    assert kept.position == position
    await LogKeeper(it.tracker, it.log).close()


async def test_a_proxy_that_runs_for_long_neither_grows_nor_forgets_what_goes_on() -> None:
    it = await begun()
    await spoken(it)
    lasting = it.agents[0]
    await lasting.call("s1 u1", "first")
    sizes = []
    for _ in range(6):
        for number in range(25):
            agent = Agent(it.tracker, it.fresh("u"))
            await agent.open()
            await agent.call("s1 u2", f"c{number}")
            await agent.close()
        await lasting.call("s1 u1 a1", it.fresh("c"))
        it.clock.advance(RETENTION_SECONDS / 2)
        await it.step("snapshot")
        await it.step("trim")
        contexts = it.tracker.contexts
        log = it.log
        assert isinstance(log, MemoryEventLog)
        num_events = await log.head() + 1 - await log.first_position()
        sizes.append((len(contexts.states), len(contexts.stream_versions), num_events, len(log._streams)))
    assert lasting.uid in contexts.states
    assert sizes[-1] <= sizes[3], sizes
    assert (await lasting.arrive("s1 u1 a1 u2", "last"))[0].version > 1
