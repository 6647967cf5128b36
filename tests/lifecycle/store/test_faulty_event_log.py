"""The misbehaving log misbehaves as told, and only then."""

import asyncio

import pytest

from lifecycle.core.events import ListGrown
from lifecycle.errors import LogUnavailable, VersionConflict
from lifecycle.store.memory import MemoryEventLog
from tests.lifecycle.store.faulty_event_log import FaultyEventLog

EVENTS = [ListGrown(at_ns=1, num_new=1)]


async def test_a_dropped_append_is_not_recorded_and_can_be_repeated() -> None:
    log = FaultyEventLog(MemoryEventLog())
    log.drop_next = 1
    with pytest.raises(LogUnavailable):
        await log.append("ctx/a", EVENTS, 0)
    assert await log.head() == 0
    assert (await log.append("ctx/a", EVENTS, 0))[0].version == 1


async def test_after_a_lost_answer_repeating_is_a_conflict_that_tells_the_truth() -> None:
    log = FaultyEventLog(MemoryEventLog())
    log.forget_next = 1
    with pytest.raises(LogUnavailable):
        await log.append("ctx/a", EVENTS, 0)
    with pytest.raises(VersionConflict) as conflict:
        await log.append("ctx/a", EVENTS, 0)
    assert conflict.value.actual == await log.head() == 1


async def test_appends_wait_at_the_gate() -> None:
    log = FaultyEventLog(MemoryEventLog())
    log.gate.clear()
    waiting = asyncio.ensure_future(log.append("ctx/a", EVENTS, 0))
    await asyncio.sleep(0)
    assert await log.head() == 0
    log.gate.set()
    await waiting
    assert await log.head() == 1
