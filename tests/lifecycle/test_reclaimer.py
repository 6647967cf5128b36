"""The dead are asked for once each, by whose they were, and whatever fails is asked for again."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import pytest

from lifecycle.core.directives import Demote, Pin, Reclaim
from lifecycle.core.events import DirectiveProposed, DirectiveSettled
from lifecycle.core.ids import Namespace, split_keys
from lifecycle.core.observations import VerificationResult
from lifecycle.core.plan import UNKNOWN_HOLD_NS
from lifecycle.errors import LogUnavailable
from lifecycle.projections.chunk_index import RETRY_NS
from lifecycle.projections.contexts import DirectiveRecord
from lifecycle.reclaimer import Reclaimer
from lifecycle.store.memory import MemoryEventLog
from lifecycle.tracker import Tracker
from lifecycle.vocabulary import DirectiveOutcome, Mode, Tier
from tests.lifecycle.core.story import NAMESPACE, NOW
from tests.lifecycle.fake_cache import FakeCache
from tests.lifecycle.lives import Agent, CountedIds, GatedLog, ManualClock, books, chain_of, replayed

WORDS = "s1 u1 a1 u2"
KEYS = chain_of(WORDS)
SHARED = chain_of("s1 u1")


@dataclass
class Scene:
    tracker: Tracker
    cache: FakeCache
    reclaimer: Reclaimer
    clock: ManualClock
    log: GatedLog
    modes: dict[str, Mode] = field(default_factory=dict)
    objections: dict[Namespace, str] = field(default_factory=dict)

    def records(self) -> list[DirectiveRecord]:
        return list(self.tracker.contexts.directives.values())

    def outcomes(self) -> list[DirectiveOutcome]:
        return [r.result.outcome for r in self.records() if r.result is not None]

    async def settled(self, count: int) -> list[DirectiveRecord]:
        """Wait until that many directives have an outcome."""
        heard = asyncio.Event()
        self.tracker.listeners.append(lambda batch: heard.set())
        async with asyncio.timeout(10):
            while len(self.outcomes()) < count:
                heard.clear()
                await heard.wait()
        return self.records()

    async def lived(self, uid: str, words: str = WORDS) -> Agent:
        """A context that said something, stored during its call."""
        agent = Agent(self.tracker, uid)
        await agent.open()
        await agent.call(words)
        self.cache.store(chain_of(words))
        await agent.stored(chain_of(words))
        return agent

    async def later(self, seconds: float) -> None:
        self.clock.advance(seconds)
        self.reclaimer.wake()


async def scene(
    log: GatedLog | None = None, cache: FakeCache | None = None, ids: CountedIds | None = None
) -> Scene:
    log = log or GatedLog(MemoryEventLog())
    cache = cache or FakeCache()
    clock = ManualClock()
    tracker = Tracker(log, clock)
    await tracker.start()
    modes: dict[str, Mode] = {}
    objections: dict[Namespace, str] = {}
    reclaimer = Reclaimer(
        tracker,
        cache,
        ids or CountedIds(),
        lambda uid: modes.get(uid, Mode.ENFORCE),
        lambda namespace: objections.get(namespace, ""),
    )
    return Scene(tracker, cache, reclaimer, clock, log, modes, objections)


@asynccontextmanager
async def running(it: Scene) -> AsyncIterator[None]:
    task = asyncio.ensure_future(it.reclaimer.run())
    try:
        yield
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def test_what_a_closed_context_held_is_freed_once_and_the_books_forget_it() -> None:
    it = await scene()
    async with running(it):
        agent = await it.lived("a")
        assert not it.cache.asked
        await agent.close()
        (record,) = await it.settled(1)
        await it.later(3600)
        await agent.open()
    assert isinstance(record.directive, Reclaim)
    assert set(split_keys(record.directive.keys)) == set(split_keys(KEYS))
    assert it.cache.chunks == {}
    assert len(it.cache.asked) == 1
    assert it.tracker.contexts.index.stats(NAMESPACE).dead == 0
    assert books(it.tracker.contexts) == books(await replayed(it.log))


async def test_what_another_context_holds_stays() -> None:
    it = await scene()
    async with running(it):
        one = await it.lived("a")
        two = Agent(it.tracker, "b")
        await two.open()
        await two.call("s1 u1")
        await one.close()
        (record,) = await it.settled(1)
        assert set(it.cache.chunks) == set(split_keys(SHARED))
        await two.close()
        await it.settled(2)
    assert it.cache.chunks == {}
    assert isinstance(record.directive, Reclaim)
    assert not set(split_keys(record.directive.keys)) & set(split_keys(SHARED))


@pytest.mark.parametrize("mode", [Mode.OBSERVE, Mode.BYPASS])
async def test_the_mode_of_the_last_owner_decides(mode: Mode) -> None:
    it = await scene()
    it.modes["watched"] = mode
    async with running(it):
        watched = await it.lived("watched", "s1 u7")
        enforced = await it.lived("enforced", "s2 u8")
        await watched.close()
        await enforced.close()
        records = await it.settled(2)
    results = {
        frozenset(split_keys(r.directive.keys)): (r.result.outcome, r.result.reason)
        for r in records
        if isinstance(r.directive, Reclaim) and r.result is not None
    }
    assert results == {
        frozenset(split_keys(chain_of("s1 u7"))): (DirectiveOutcome.SUPPRESSED, "observe mode"),
        frozenset(split_keys(chain_of("s2 u8"))): (DirectiveOutcome.APPLIED, ""),
    }
    assert set(it.cache.chunks) == set(split_keys(chain_of("s1 u7")))
    assert len(it.cache.asked) == 1


async def test_an_objection_stops_everything_and_is_the_reason() -> None:
    it = await scene()
    it.objections[NAMESPACE] = "the self-test failed"
    async with running(it):
        await (await it.lived("a")).close()
        (record,) = await it.settled(1)
    assert record.result is not None
    assert record.result.outcome is DirectiveOutcome.SUPPRESSED
    assert record.result.reason == "the self-test failed"
    assert not it.cache.asked


async def test_what_the_cache_cannot_do_is_told_not_dropped() -> None:
    it = await scene(cache=FakeCache(frozenset({"admit"})))
    async with running(it):
        await (await it.lived("a")).close()
        (record,) = await it.settled(1)
    assert record.result is not None
    assert (record.result.outcome, record.result.reason) == (
        DirectiveOutcome.UNSUPPORTED,
        "fake cannot reclaim",
    )
    assert not it.cache.asked


async def test_untracked_inference_turns_reclaim_into_demote_until_it_is_long_ago() -> None:
    it = await scene()
    async with running(it):
        agent = await it.lived("a")
        await it.tracker.untracked(NAMESPACE, "bypass")
        await agent.close()
        (record,) = await it.settled(1)
        assert isinstance(record.directive, Demote)
        assert "untracked" in record.directive.reason
        await it.later(31 * 60)
        records = await it.settled(2)
    assert isinstance(records[1].directive, Reclaim)
    assert it.cache.chunks == {}


async def test_a_failing_cache_is_asked_again_later() -> None:
    it = await scene()
    it.cache.failing = RuntimeError("connection reset")
    async with running(it):
        await (await it.lived("a")).close()
        (record,) = await it.settled(1)
        assert record.result is not None
        assert record.result.outcome is DirectiveOutcome.FAILED
        assert record.result.reason == "RuntimeError: connection reset"
        it.cache.failing = None
        await it.later(RETRY_NS / 1e9 - 1)
        assert len(it.cache.asked) == 1
        await it.later(2)
        await it.settled(2)
    assert it.outcomes() == [DirectiveOutcome.FAILED, DirectiveOutcome.APPLIED]
    assert it.cache.chunks == {}


async def test_chunks_that_came_back_to_life_meanwhile_are_left_alone() -> None:
    it = await scene()
    it.cache.gate.clear()
    async with running(it):
        await (await it.lived("a")).close()
        await asyncio.wait_for(it.cache.reached.wait(), 10)
        back = Agent(it.tracker, "b")
        await back.open()
        await back.call("s1 u1")
        it.cache.gate.set()
        (record,) = await it.settled(1)
    assert set(it.cache.chunks) == set(split_keys(SHARED))
    assert record.result is not None
    assert record.result.skipped == len(split_keys(SHARED))


async def test_a_call_that_was_forwarded_but_is_not_in_the_books_holds_what_it_may_need() -> None:
    it = await scene()
    async with running(it):
        agent = await it.lived("a")
        it.tracker.arriving["call"] = (NAMESPACE, it.clock.now_ns())
        await agent.close()
        await it.later(2.0)
        other = await it.lived("b", "s9 u9")  # events enough for plans
        await other.close()
        assert not it.cache.asked
        del it.tracker.arriving["call"]
        await it.later(0.0)
        await it.settled(1)
    assert it.cache.chunks == {}


@pytest.mark.parametrize("kind", ["on its way", "not mapped"])
async def test_a_call_that_comes_before_the_delete_keeps_what_it_may_need(kind: str) -> None:
    it = await scene()
    it.cache.gate.clear()
    async with running(it):
        other = await it.lived("b", "s9 u9")
        await (await it.lived("a")).close()
        await asyncio.wait_for(it.cache.reached.wait(), 10)
        if kind == "on its way":
            it.tracker.arriving["call"] = (NAMESPACE, it.clock.now_ns())
        else:
            it.clock.advance(1)
            await other.arrive("s1 u1", "c2")
        it.cache.gate.set()
        (first,) = await it.settled(1)
    assert first.result is not None
    assert (first.result.applied, first.result.skipped) == (0, len(split_keys(KEYS)))
    assert set(split_keys(KEYS)) <= set(it.cache.chunks)


async def test_calls_that_never_cease_to_come_do_not_keep_what_died_long_before() -> None:
    """Under load there is always one on its way."""
    it = await scene()
    it.cache.gate.clear()
    async with running(it):
        await (await it.lived("a")).close()
        await asyncio.wait_for(it.cache.reached.wait(), 10)
        it.clock.advance(UNKNOWN_HOLD_NS / 1e9 + 1)
        it.tracker.arriving["call"] = (NAMESPACE, it.clock.now_ns())
        it.cache.gate.set()
        (first,) = await it.settled(1)
    assert first.result is not None
    assert (first.result.applied, first.result.skipped) == (len(split_keys(KEYS)), 0)
    assert not set(split_keys(KEYS)) & set(it.cache.chunks)


@pytest.mark.parametrize("doubt", ["untracked", "unmapped"])
async def test_a_doubt_that_begins_before_the_delete_makes_it_a_demotion(doubt: str) -> None:
    it = await scene()
    it.cache.gate.clear()
    async with running(it):
        other = await it.lived("b", "s9 u9")
        await (await it.lived("a")).close()
        await asyncio.wait_for(it.cache.reached.wait(), 10)
        if doubt == "untracked":
            await it.tracker.untracked(NAMESPACE, "bypass")
        else:
            unseen = VerificationResult(at_ns=it.clock.now_ns(), reason="no key showed up")
            await it.tracker.observe(other.uid, unseen)
        it.cache.gate.set()
        (first,) = await it.settled(1)
        assert isinstance(first.directive, Reclaim)
        assert first.result is not None
        assert (first.result.applied, first.result.skipped) == (0, len(split_keys(KEYS)))
        await it.later(RETRY_NS / 1e9 + 1)
        second = (await it.settled(2))[1]
    assert isinstance(second.directive, Demote)
    assert {it.cache.chunks[key] for key in split_keys(KEYS)} == {frozenset({Tier.L2})}


@pytest.mark.parametrize("kind", ["the log fails", "the self-test failed"])
async def test_nothing_is_deleted_once_nobody_knows_whether_it_may_be(kind: str) -> None:
    it = await scene()
    it.cache.gate.clear()
    async with running(it):
        other = await it.lived("b", "s9 u9")
        await (await it.lived("a")).close()
        await asyncio.wait_for(it.cache.reached.wait(), 10)
        if kind == "the log fails":
            it.log.away = LogUnavailable("away")
            await other.arrive("s1 u1", "c2")  # it may need what is about to be deleted
        else:
            it.objections[NAMESPACE] = kind
        it.cache.gate.set()
        await asyncio.wait_for(it.cache.done.wait(), 10)
        assert set(split_keys(KEYS)) <= set(it.cache.chunks)
        it.log.away = None
        await it.tracker.retry_waiting()


async def test_no_directive_is_sent_before_its_event_is_recorded() -> None:
    it = await scene()
    agent = await it.lived("a")
    await agent.close()
    it.log.gate.clear()
    it.log.waiting.clear()
    async with running(it):
        await asyncio.wait_for(it.log.waiting.wait(), 10)
        assert not it.cache.asked
        it.log.away = LogUnavailable("disk full")
        it.log.gate.set()
        await asyncio.sleep(0)
        assert not it.cache.asked
        it.log.away = None
        await it.settled(1)
    assert it.log.appended[-2:] == [DirectiveProposed.__name__, DirectiveSettled.__name__]
    assert len(it.cache.asked) == 1


async def test_nothing_is_reclaimed_while_observations_wait_for_the_log() -> None:
    it = await scene()
    agent = await it.lived("a")
    other = await it.lived("b", "s3 u3")
    await agent.close()
    it.log.away = LogUnavailable("away")
    await other.arrive("s3 u3 a3", "c2")
    assert it.tracker.degraded
    it.log.away = None
    async with running(it):
        it.reclaimer.wake()
        for _ in range(20):
            await asyncio.sleep(0)
        assert not it.cache.asked
        await it.tracker.retry_waiting()
        await other.map("s3 u3 a3", "c2")
        await it.settled(1)
    assert set(it.cache.chunks) == set(split_keys(chain_of("s3 u3")))


async def test_after_a_crash_between_append_and_dispatch_it_is_asked_for_again() -> None:
    it = await scene()
    agent = await it.lived("a")
    await agent.close()
    it.cache.gate.clear()
    async with running(it):
        await asyncio.wait_for(it.cache.reached.wait(), 10)
    assert it.outcomes() == []

    other_ids = CountedIds()
    other_ids.count = 1000
    again = await scene(it.log, FakeCache(), other_ids)
    again.cache.chunks = dict(it.cache.chunks)
    async with running(again):
        await again.settled(2)
    assert again.outcomes() == [DirectiveOutcome.EXPIRED, DirectiveOutcome.APPLIED]
    assert again.cache.chunks == {}
    assert books(again.tracker.contexts) == books(await replayed(it.log))


async def test_after_a_crash_no_directive_of_any_kind_stays_open() -> None:
    it = await scene()
    pin = Pin(
        directive_id="pin", namespace=NAMESPACE, reason="", pin_id="p", keys=KEYS, lease_until_ns=NOW + 1
    )
    await it.reclaimer.propose(pin)
    again = await scene(it.log)
    async with running(again):
        (record,) = await again.settled(1)
    assert record.result is not None
    assert record.result.outcome is DirectiveOutcome.EXPIRED
