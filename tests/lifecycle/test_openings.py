"""Contexts that begin while the event log is away."""

import asyncio

import pytest

from lifecycle.core.events import ContextCreated
from lifecycle.errors import LogUnavailable
from lifecycle.openings import open_for_call
from lifecycle.store.memory import MemoryEventLog
from tests.lifecycle.lives import AnswerLost, GatedLog, books, opened_at, replayed, started


@pytest.mark.parametrize("make", [GatedLog, AnswerLost])
async def test_a_new_context_of_a_call_waits_for_the_log_and_is_opened_once(make: type[GatedLog]) -> None:
    log = make(MemoryEventLog())
    tracker, clock = await started(log)
    log.away = LogUnavailable("away")
    opening = asyncio.ensure_future(open_for_call(tracker, opened_at(clock, "new"), None))
    await log.waiting.wait()
    for _ in range(20):
        await asyncio.sleep(0)
    assert "1 observations wait" in tracker.degraded
    assert not opening.done()
    log.away = None
    state = await opening
    assert (state.uid, state.open) == ("new", True)
    assert not tracker.degraded
    assert [type(r.event) async for r in log.read_all()] == [ContextCreated]
    assert books(tracker.contexts) == books(await replayed(log))
