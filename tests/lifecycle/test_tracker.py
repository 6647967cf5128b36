"""The one writer: append first, in order, exactly once, and nothing lost while the log is away."""

import asyncio
import gc
import random
from collections.abc import Sequence
from pathlib import Path

import pytest

from lifecycle.core.events import CallArrived, RecordedEvent, UntrackedForwarded
from lifecycle.core.observations import CallMapping
from lifecycle.errors import InvalidObservation, LogUnavailable, UnknownContext
from lifecycle.store.memory import MemoryEventLog
from lifecycle.store.sql import SqlEventLog
from lifecycle.tracker import MAX_WAITING, Tracker
from lifecycle.vocabulary import CallEnd
from tests.lifecycle.core.story import NAMESPACE, mapping_of
from tests.lifecycle.lives import (
    Agent,
    AnswerLost,
    GatedLog,
    ManualClock,
    books,
    replayed,
    started,
)
from tests.lifecycle.store.faulty_event_log import FaultyEventLog

LISTS = ["u1", "u1 a1 u2", "u1 a1 u3", "u1 a1 u2 a2 t1", "s1 u1", "u9"]
HOW = [CallEnd.COMPLETED, CallEnd.COMPLETED, CallEnd.ABORTED, CallEnd.FAILED]


async def test_nothing_is_true_before_the_append_returned() -> None:
    log = GatedLog(MemoryEventLog())
    tracker, _ = await started(log)
    heard: list[RecordedEvent] = []
    tracker.listeners.append(heard.extend)
    agent = Agent(tracker, "a")
    await agent.open()
    before = books(tracker.contexts)
    num_heard = len(heard)
    log.gate.clear()
    log.waiting.clear()
    arriving = asyncio.ensure_future(agent.arrive("u1"))
    await log.waiting.wait()
    assert books(tracker.contexts) == before
    assert len(heard) == num_heard
    log.gate.set()
    recorded = await arriving
    assert [type(r.event) for r in recorded] == [CallArrived]
    assert agent.state.flights
    assert heard[num_heard:] == list(recorded)


async def test_nobody_waits_for_a_log_that_was_never_read() -> None:
    log = GatedLog(MemoryEventLog())
    tracker = Tracker(log, ManualClock())
    log.away = LogUnavailable("it is no database")
    await tracker.untracked(NAMESPACE, "nothing is followed")
    assert tracker.num_waiting == 1
    await asyncio.wait_for(tracker.flushed(), 10)


async def test_what_happens_to_a_context_is_decided_in_the_order_it_was_observed() -> None:
    log = FaultyEventLog(MemoryEventLog(), hops=5)
    tracker, _ = await started(log)
    agents = [Agent(tracker, uid) for uid in "abc"]
    await asyncio.gather(*(a.open() for a in agents))
    calls = [f"c{n}" for n in range(20)]
    await asyncio.gather(*(a.arrive("u1", call) for call in calls for a in agents))
    for agent in agents:
        stream = [r async for r in log.read_stream(f"ctx/{agent.uid}")]
        assert [r.event.call_id for r in stream if isinstance(r.event, CallArrived)] == calls


async def test_a_name_is_opened_once_however_many_ask_at_the_same_time() -> None:
    tracker, _ = await started(FaultyEventLog(MemoryEventLog(), hops=3))
    agents = [Agent(tracker, f"uid{n}", "the name") for n in range(10)]
    await asyncio.gather(*(a.open() for a in agents))
    assert len({a.uid for a in agents}) == 1
    assert len(tracker.contexts.states) == 1


async def test_two_writers_on_one_log_decide_again_and_agree() -> None:
    log = MemoryEventLog()
    one, _ = await started(FaultyEventLog(log, hops=2))
    await Agent(one, "a").open()
    two, _ = await started(log)
    here, there = Agent(one, "a"), Agent(two, "a")
    await asyncio.gather(*(agent.call("u1", f"{n}") for n, agent in enumerate([here, there] * 5)))
    for n, tracker in enumerate((one, two)):
        # Whoever appends has read what the other wrote.
        await Agent(tracker, f"last {n}").open()
        assert books(tracker.contexts) == books(await replayed(log))
    assert set(here.state.attempts) == {str(n) for n in range(10)}
    assert not here.state.flights


async def test_observations_wait_for_the_log_in_order_and_nothing_is_reclaimed_meanwhile() -> None:
    log = GatedLog(MemoryEventLog())
    tracker, clock = await started(log)
    one, two = Agent(tracker, "one"), Agent(tracker, "two")
    await one.open()
    await two.open()
    assert not tracker.degraded
    log.away = LogUnavailable("disk full")
    assert not await one.arrive("u1")
    log.away = None
    # Whatever comes behind waits too, though the log would take it by now.
    assert not await one.map("u1")
    assert not await two.arrive("u2")
    assert "3 observations" in tracker.degraded
    log.away = LogUnavailable("still full")
    await tracker.retry_waiting()
    assert "3 observations" in tracker.degraded
    clock.advance(24 * 3600)
    await tracker.tick()
    assert "3 observations" in tracker.degraded
    log.away = None
    log.appended.clear()
    await tracker.retry_waiting()
    assert log.appended == ["CallArrived", "CallMapped", "CallArrived"]
    assert not tracker.degraded
    assert books(tracker.contexts) == books(await replayed(log))


async def test_an_arrival_whose_append_landed_unheard_is_no_second_attempt() -> None:
    log = AnswerLost(MemoryEventLog())
    tracker, _ = await started(log)
    agent = Agent(tracker, "a")
    await agent.open()
    log.away = LogUnavailable("the answer was lost")
    assert not await agent.arrive("u1")
    assert not await agent.end()
    log.away = None
    await tracker.retry_waiting()
    assert not tracker.degraded
    arrived = [r.event async for r in log.read_all() if isinstance(r.event, CallArrived)]
    assert [event.attempt for event in arrived] == [1]
    assert not agent.state.flights
    assert books(tracker.contexts) == books(await replayed(log))


async def test_a_lost_answer_of_the_log_is_found_again() -> None:
    log = FaultyEventLog(MemoryEventLog())
    tracker, _ = await started(log)
    agent = Agent(tracker, "a")
    await agent.open()
    await agent.arrive("u1")
    log.forget_next = 1
    await agent.map("u1")
    await tracker.retry_waiting()
    assert not tracker.degraded
    assert agent.state.flights[0].mapping_known
    assert books(tracker.contexts) == books(await replayed(log))


async def test_what_cannot_be_true_is_told_at_once_and_dropped_where_it_waited() -> None:
    log = GatedLog(MemoryEventLog())
    tracker, clock = await started(log)
    agent = Agent(tracker, "a")
    await agent.open()
    await agent.arrive("u1 a1")
    wrong = CallMapping(at_ns=clock.now, call_id="c1", attempt=1, mapping=mapping_of(["u1"]))
    with pytest.raises(InvalidObservation):
        await tracker.observe("a", wrong)
    with pytest.raises(UnknownContext):
        await tracker.observe("nobody", wrong)
    log.away = LogUnavailable("away")
    await agent.first()
    await tracker.observe("a", wrong)
    await agent.map("u1 a1")
    log.away = None
    await tracker.retry_waiting()
    assert not tracker.degraded
    assert agent.state.flights[0].mapping_known
    assert tracker.contexts.index.last_untracked_ns(NAMESPACE) is not None


async def test_more_than_can_wait_makes_the_namespace_untracked_not_the_books_wrong() -> None:
    log = GatedLog(MemoryEventLog())
    tracker, _ = await started(log)
    agent = Agent(tracker, "a")
    await agent.open()
    log.away = LogUnavailable("away")
    await agent.arrive("u1")
    for _ in range(MAX_WAITING + 5):
        await agent.first()
    log.away = None
    assert tracker.degraded
    await tracker.retry_waiting()
    assert not tracker.degraded
    assert tracker.contexts.index.last_untracked_ns(NAMESPACE) is not None
    assert books(tracker.contexts) == books(await replayed(log))


async def test_untracked_inference_is_recorded_once_a_minute_and_survives_an_absent_log() -> None:
    log = GatedLog(MemoryEventLog())
    tracker, clock = await started(log)

    def recorded() -> int:
        return log.appended.count(UntrackedForwarded.__name__)

    await asyncio.gather(*(tracker.untracked(NAMESPACE, "bypass") for _ in range(20)))
    assert recorded() == 1
    clock.advance(61)
    log.away = LogUnavailable("away")
    await asyncio.gather(*(tracker.untracked(NAMESPACE, "bypass") for _ in range(20)))
    assert tracker.degraded
    log.away = None
    await tracker.retry_waiting()
    assert not tracker.degraded
    assert recorded() == 2


async def test_a_listener_that_fails_harms_nobody() -> None:
    tracker, _ = await started()
    heard: list[RecordedEvent] = []

    def failing(batch: Sequence[RecordedEvent]) -> None:
        raise RuntimeError("a bug")

    tracker.listeners += [failing, heard.extend]
    agent = Agent(tracker, "a")
    await agent.open()
    await agent.call("u1")
    assert [r.position for r in heard] == list(range(1, tracker.contexts.position + 1))


async def test_time_ends_a_context_that_says_nothing() -> None:
    tracker, clock = await started()
    agent = Agent(tracker, "a")
    await agent.open()
    await agent.call("u1")
    position = tracker.contexts.position
    await tracker.tick()
    assert tracker.contexts.position == position
    clock.advance(3601)
    await tracker.tick()
    assert not agent.state.versions
    assert agent.state.closed


async def test_locks_live_no_longer_than_somebody_needs_them() -> None:
    def locks() -> int:
        gc.collect()
        return sum(isinstance(each, asyncio.Lock) for each in gc.get_objects())

    tracker, _ = await started()
    before = locks()
    for n in range(50):
        agent = Agent(tracker, f"u{n}")
        await agent.open()
        await agent.call("u1")
    assert locks() == before


async def _live(agent: Agent, seed: int, parent: Agent | None) -> None:
    random_ = random.Random(seed)
    await agent.open(parent)
    for n in range(6):
        await agent.call(random_.choice(LISTS), f"c{random_.randrange(4)}", random_.choice(HOW))
        if n == 8 and random_.random() < 0.3:
            await agent.close()


@pytest.mark.parametrize("seed", range(1))
async def test_many_contexts_over_one_database_are_applied_in_order_exactly_once(
    tmp_path: Path, seed: int
) -> None:
    log = await SqlEventLog.open(f"sqlite:///{tmp_path / 'log.db'}")
    try:
        tracker, _ = await started(log)
        positions: list[int] = []
        tracker.listeners.append(lambda batch: positions.extend(r.position for r in batch))
        agents = [Agent(tracker, f"u{n}", f"n{n % 14}") for n in range(20)]
        await asyncio.gather(
            *(
                _live(agent, seed * 100 + n, agents[n - 3] if n > 10 else None)
                for n, agent in enumerate(agents)
            )
        )
        assert positions == list(range(1, await log.head() + 1))
        assert books(tracker.contexts) == books(await replayed(log))
        again, _ = await started(log)
        assert books(again.contexts) == books(tracker.contexts)
    finally:
        await log.close()


async def test_closing_everything_leaves_no_reference() -> None:
    tracker, _ = await started()
    agents = [Agent(tracker, f"u{n}") for n in range(8)]
    for n, agent in enumerate(agents):
        await _live(agent, n, agents[n - 1] if n % 2 else None)
    for agent in agents:
        await agent.close()
    assert tracker.contexts.index.stats(NAMESPACE).live == 0
