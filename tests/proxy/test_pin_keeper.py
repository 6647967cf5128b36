"""The cache holds what is pinned: no more, no less, and again after whatever failed."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from lifecycle.core.ids import Namespace
from lifecycle.core.observations import OperationReceived, PinsDropped, PinSpan, ReplaceMessages, UnpinSpan
from lifecycle.errors import LogUnavailable
from lifecycle.reclaimer import Reclaimer
from lifecycle.store.memory import MemoryEventLog
from lifecycle.tracker import Tracker
from lifecycle.vocabulary import DirectiveOutcome, Mode
from proxy.pin_keeper import PinKeeper
from tests.lifecycle.fake_cache import FakeCache
from tests.lifecycle.lives import Agent, CountedIds, GatedLog, ManualClock, chain_of


class Scene:
    def __init__(self, log: GatedLog | None = None) -> None:
        self.log = log or GatedLog(MemoryEventLog())
        self.clock = ManualClock()
        self.tracker = Tracker(self.log, self.clock)
        self.cache = FakeCache()
        self.mode = Mode.ENFORCE
        self.objection = ""
        ids = CountedIds()
        reclaimer = Reclaimer(self.tracker, self.cache, ids, self.mode_of, self.objects)
        self.keeper = PinKeeper(self.tracker, reclaimer, ids, self.mode_of, self.objects, {})

    def mode_of(self, uid: str) -> Mode:
        return self.mode

    def objects(self, namespace: Namespace) -> str:
        return self.objection

    async def declare(self, operation: object) -> None:
        await self.tracker.observe(
            "uid",
            OperationReceived(at_ns=self.clock.now, source="s", operation=operation),  # type: ignore[arg-type]
        )

    async def settled(self, count: int) -> list[DirectiveOutcome]:
        heard = asyncio.Event()
        self.tracker.listeners.append(lambda batch: heard.set())
        async with asyncio.timeout(10):
            while True:
                records = self.tracker.contexts.directives.values()
                done = [r.result.outcome for r in records if r.result is not None]
                if len(done) >= count:
                    return done
                heard.clear()
                await heard.wait()


async def started(log: GatedLog | None = None) -> Scene:
    it = Scene(log)
    await it.tracker.start()
    return it


@asynccontextmanager
async def running(it: Scene) -> AsyncIterator[None]:
    task = asyncio.ensure_future(it.keeper.run())
    try:
        yield
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def called(it: Scene, words: str = "s1 u1 a1", call: str = "c1") -> Agent:
    agent = Agent(it.tracker, "uid", "a")
    await agent.open()
    await agent.call(words, call)
    return agent


def pin(seq: int = 1, ttl: float = 300.0) -> PinSpan:
    return PinSpan(seq=seq, ctx="a", span=(0, 2), ttl=ttl)


async def test_a_pin_is_held_and_given_back() -> None:
    it = await started()
    async with running(it):
        await called(it)
        await it.declare(pin())
        assert await it.settled(1) == [DirectiveOutcome.APPLIED]
        (keys,) = it.cache.holds.values()
        assert chain_of("s1 u1").startswith(keys)
        assert keys
        await it.declare(UnpinSpan(seq=2, ctx="a", span=(0, 2)))
        await it.settled(2)
        assert it.cache.holds == {}


async def test_a_renewed_pin_and_a_moved_one_stay_one_hold() -> None:
    it = await started()
    async with running(it):
        await called(it)
        await it.declare(PinSpan(seq=1, ctx="a", span=(2, 3), ttl=300.0))
        await it.settled(1)
        it.clock.advance(1)
        await it.declare(PinSpan(seq=2, ctx="a", span=(2, 3), ttl=300.0))
        await it.settled(2)
        assert len(it.cache.holds) == 1
        before = dict(it.cache.holds)
        await it.declare(ReplaceMessages(seq=3, ctx="a", span=(1, 2), n=1))
        await called(it, "s1 u9 a1", "c2")
        await it.settled(4)
        assert it.cache.holds.keys() <= before.keys()


async def test_a_lease_that_ran_out_is_given_back() -> None:
    it = await started()
    async with running(it):
        await called(it)
        await it.declare(pin(ttl=10))
        await it.settled(1)
        it.clock.advance(11)
        await it.tracker.tick()
        await it.settled(2)
        assert it.cache.holds == {}


async def test_observe_and_an_objection_send_nothing() -> None:
    for mode, objection in ((Mode.OBSERVE, ""), (Mode.ENFORCE, "the self-test failed")):
        it = await started()
        it.mode, it.objection = mode, objection
        async with running(it):
            await called(it)
            await it.declare(pin())
            assert await it.settled(1) == [DirectiveOutcome.SUPPRESSED]
            assert it.cache.asked == []


async def test_what_was_not_sent_is_sent_when_nothing_stands_against_it_any_more() -> None:
    it = await started()
    it.mode = Mode.OBSERVE
    async with running(it):
        await called(it)
        await it.declare(pin())
        assert await it.settled(1) == [DirectiveOutcome.SUPPRESSED]
        it.mode = Mode.ENFORCE
        assert await it.settled(2) == [DirectiveOutcome.SUPPRESSED, DirectiveOutcome.APPLIED]
        (keys,) = it.cache.holds.values()
        assert chain_of("s1 u1").startswith(keys)
        await it.declare(UnpinSpan(seq=2, ctx="a", span=(0, 2)))
        await it.settled(3)
        assert it.cache.holds == {}


async def test_a_pin_that_ended_before_it_was_sent_is_never_sent() -> None:
    it = await started()
    it.mode = Mode.OBSERVE
    async with running(it):
        await called(it)
        await it.declare(pin())
        await it.settled(1)
        await it.declare(UnpinSpan(seq=2, ctx="a", span=(0, 2)))
        await it.settled(2)
        it.mode = Mode.ENFORCE
        await it.declare(PinSpan(seq=3, ctx="a", span=(0, 1), ttl=300.0))
        assert (await it.settled(3))[-1] is DirectiveOutcome.APPLIED
        assert len(it.cache.holds) == 1


async def test_after_a_restart_every_pin_is_held_again_and_can_be_given_back() -> None:
    it = await started()
    await called(it)
    await it.declare(pin())
    again = await started(it.log)
    async with running(again):
        assert await again.settled(1) == [DirectiveOutcome.APPLIED]
        assert len(again.cache.holds) == 1
        await again.tracker.observe("uid", PinsDropped(at_ns=again.clock.now, reason="release all"))
        await again.settled(2)
        assert again.cache.holds == {}


async def test_a_pin_waits_for_the_log_and_is_not_lost() -> None:
    it = await started()
    async with running(it):
        await called(it)
        await it.declare(pin())
        it.log.away = LogUnavailable("disk full")
        for _ in range(10):
            await asyncio.sleep(0)
        assert it.cache.holds == {}
        it.log.away = None
        assert await it.settled(1) == [DirectiveOutcome.APPLIED]
        assert len(it.cache.holds) == 1


async def test_who_does_not_keep_the_pins_remembers_and_waits_for_nothing() -> None:
    it = await started()
    await called(it)
    await it.declare(pin())
    assert not it.keeper.changing("uid")
    async with asyncio.timeout(4):
        await it.keeper.settled()
    async with running(it):
        assert await it.settled(1) == [DirectiveOutcome.APPLIED]
        it.log.gate.clear()
        it.log.waiting.clear()
        unpinning = asyncio.ensure_future(it.declare(UnpinSpan(seq=2, ctx="a", span=(0, 2))))
        await it.log.waiting.wait()
        it.log.waiting.clear()
        it.log.gate.set()
        await unpinning
    assert not it.keeper.changing("uid"), "whoever comes next begins anew"
    async with asyncio.timeout(4):
        await it.keeper.settled()
