"""Two proxies on one log before one cache: together they are as one, and one of them frees what is dead."""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Callable, Collection
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

from lifecycle.core.events import (
    CallArrived,
    CallEnded,
    ContextCreated,
    DirectiveProposed,
    DirectiveSettled,
    OperationApplied,
    RecordedEvent,
)
from lifecycle.log_keeper import LogKeeper
from lifecycle.store.memory import MemoryEventLog
from lifecycle.store.opening import OpenLog, open_log
from lifecycle.tracker import Tracker
from proxy.ownership import Office
from tests.lifecycle.fake_cache import FakeCache
from tests.lifecycle.lives import Agent, GatedLog, ManualClock, books, replayed
from tests.lifecycle.store.redis_process import place_in_shared_redis
from tests.proxy.toy_model import CHUNK
from tests.proxy.whole_proxy import SECONDS, Message, Whole, assistant, lifecycle, system, user, whole_proxy

LEASE_SECONDS = 10.0
"""Longer than a busy machine keeps both from saying that they live. Nobody waits for it: who ends resigns."""

BEGIN = [system("a system prompt that fills a chunk or two by itself"), user("the first thing that is asked")]


def on(words: str, *, behind: list[Message]) -> list[Message]:
    return [*behind, assistant("ok"), user(words)]


async def _opened(url: str) -> OpenLog:
    """As in production, with a lease that outlives the start of a second proxy beside the first."""
    opened = await open_log(url)
    return opened._replace(join=partial(opened.join, lease_seconds=LEASE_SECONDS))  # type: ignore[call-arg]


class Two:
    """Proxies `one` and `two`, the first of which came first."""

    def __init__(self, cache: FakeCache, url: str, place: Path) -> None:
        self.cache = cache
        self.url = url
        self.place = place
        self.stacks: dict[str, AsyncExitStack] = {}

    async def start(self, name: str, **changes: Any) -> Whole:
        stack = self.stacks[name] = AsyncExitStack()
        proxy = whole_proxy(self.place, cache=self.cache, log_url=self.url, opener=_opened, **changes)
        it = await stack.enter_async_context(proxy)
        await self.until(it, lambda: bool(it.runtime.office.owner))
        return it

    async def stop(self, name: str) -> None:
        await self.stacks.pop(name).aclose()

    async def until(self, it: Whole, holds: Any) -> None:
        """Until something holds, looked at whenever something is recorded, and now and then."""
        async with asyncio.timeout(SECONDS):
            while not holds():  # noqa: ASYNC110 - leases end without an event
                await asyncio.sleep(0.02)

    async def agree(self, *proxies: Whole) -> list[Any]:
        """Until each has read what all recorded; answers the log's events."""
        async with asyncio.timeout(SECONDS):
            while True:
                for proxy in proxies:
                    await proxy.runtime.tracker.catch_up()
                again = await replayed(proxies[0].runtime.event_log)
                # They can be compared where all are at one place: nothing is awaited between the looks.
                read = [again, *(proxy.runtime.tracker.contexts for proxy in proxies)]
                if len({contexts.position for contexts in read}) == 1:
                    break
        assert len({books(contexts) for contexts in read}) == 1
        return [r.event for r in await proxies[0].recorded()]


@asynccontextmanager
async def two_proxies(place: Path) -> AsyncIterator[tuple[Two, Whole, Whole]]:
    them = Two(FakeCache(chunk_size=CHUNK), await place_in_shared_redis(place), place)
    try:
        one = await them.start("one")
        two = await them.start("two")
        yield them, one, two
    finally:
        for name in list(them.stacks):
            await them.stop(name)


async def owns(it: Whole) -> bool:
    return bool((await it.admin.get("/readyz")).json()["owns"])


async def test_a_context_goes_on_at_whichever_proxy_and_one_of_them_frees_what_it_lets_go(
    tmp_path: Path,
) -> None:
    async with two_proxies(tmp_path) as (them, one, two):
        assert await owns(one)
        assert not await owns(two)
        # Nobody says whose call it is: the list tells, at the other proxy, too.
        first = await one.chat(BEGIN)
        await them.agree(one, two)
        second = await two.chat(on("and more of it, long enough for a chunk", behind=BEGIN))
        assert second.headers["x-kv-context"] == first.headers["x-kv-context"]
        name = first.headers["x-kv-context"]
        await them.agree(one, two)
        longer = on("still more", behind=on("and more of it, long enough for a chunk", behind=BEGIN))
        third = await one.chat(longer)
        assert third.headers["x-kv-context"] == name
        await them.until(one, lambda: not one.context(name).flights)
        # Operations of one source arrive in turns.
        for seq, proxy in enumerate((two, one, two), start=1):
            (answer,) = await proxy.ops({"op": "waiting", "seq": seq, "ctx": name, "kind": "tool"})
            assert answer["status"] == "applied"
        await them.until(two, lambda: them.cache.chunks)
        (answer,) = await two.ops({"op": "close", "seq": 4, "ctx": name})
        assert answer["status"] == "applied"
        await them.until(one, lambda: not them.cache.chunks)
        told = await them.agree(one, two)
        by_kind = Counter(type(e) for e in told)
        assert by_kind[ContextCreated] == 1
        assert by_kind[CallArrived] == by_kind[CallEnded] == 3
        assert by_kind[OperationApplied] == 4
        arrived = [e.proxy for e in told if isinstance(e, CallArrived)]
        assert arrived == [one.runtime.office.name, two.runtime.office.name, one.runtime.office.name]
        metrics = [(await p.admin.get("/metrics")).text for p in (one, two)]
        ends = [
            float(line.split()[-1])
            for m in metrics
            for line in m.splitlines()
            if line.startswith('kvtether_calls_total{end="completed"}')
        ]
        assert sorted(ends) == [1.0, 2.0], "each call is counted by the proxy that took it"


async def test_a_name_that_both_give_away_at_once_is_one_context(tmp_path: Path) -> None:
    async with two_proxies(tmp_path) as (them, one, two):
        names = [f"n{n}" for n in range(4)]
        await asyncio.gather(
            *(p.chat(BEGIN, lifecycle(ctx=n, call=c)) for n in names for p, c in ((one, "1"), (two, "2")))
        )
        await them.agree(one, two)
        for name in names:
            assert set(one.context(name).attempts) == set(two.context(name).attempts) == {"1", "2"}
            assert one.context(name).uid == two.context(name).uid
        open_ones = [s for s in one.runtime.tracker.contexts.states.values() if s.open]
        assert sorted(s.key.context_id for s in open_ones) == names


async def test_an_operation_right_behind_the_call_that_began_its_context_finds_it(tmp_path: Path) -> None:
    async with two_proxies(tmp_path) as (_, one, two):
        for n in range(3):
            await one.chat(BEGIN, lifecycle(ctx=f"c{n}", call="1"))
            (answer,) = await two.ops({"op": "close", "seq": 1, "ctx": f"c{n}"})
            assert answer["status"] == "applied", answer


async def test_when_the_owner_ends_the_other_one_frees_what_died(tmp_path: Path) -> None:
    async with two_proxies(tmp_path) as (them, one, two):
        await one.chat(BEGIN, lifecycle(ctx="a", call="1"))
        await two.chat(
            [system("another system prompt, as long as a chunk"), user("b")], lifecycle(ctx="b", call="1")
        )
        await them.agree(one, two)
        await them.until(one, lambda: len(them.cache.chunks) > 1)
        await them.stop("one")
        await them.until(two, lambda: two.runtime.office.holds)
        (answer,) = await two.ops({"op": "close", "seq": 1, "ctx": "a"})
        assert answer["status"] == "applied"
        alive = set(two.toy.keys([system("another system prompt, as long as a chunk"), user("b")]))
        await them.until(two, lambda: set(them.cache.chunks) == alive)
        three = await them.start("three")
        assert three.context("b").open
        assert not await owns(three)
        told = await them.agree(two, three)
        proposed = {e.directive.directive_id for e in told if isinstance(e, DirectiveProposed)}
        settled = {e.directive_id for e in told if isinstance(e, DirectiveSettled)}
        assert proposed == settled


async def test_who_does_not_own_asks_nothing_of_the_cache_and_says_who_does(tmp_path: Path) -> None:
    async with two_proxies(tmp_path) as (them, one, two):
        await two.chat(BEGIN, lifecycle(ctx="a", call="1"))
        await them.agree(one, two)
        answer = (await two.admin.delete("/kv/v1/tenants/default")).json()
        assert not answer["erased"]
        assert any(one.runtime.office.name in reason for reason in answer["reasons"]), answer
        answer = (await one.admin.delete("/kv/v1/tenants/default")).json()
        assert not answer["left"], answer
        await them.until(one, lambda: not them.cache.chunks)


class Lease:
    """An `Ownership` in the test's hands: `held` says whose the lease is, and `told` is the feed's head."""

    shared = True
    lease_seconds = 0.05

    def __init__(self, log: MemoryEventLog) -> None:
        self.log = log
        self.held = True
        self.holds = False
        self.owner = "me"
        self.gone: frozenset[str] = frozenset()
        self.asked = asyncio.Semaphore(0)
        self.beats = 0

    async def beat(self) -> None:
        self.holds = self.held
        self.beats += 1

    async def news(self, position: int) -> int:
        await self.asked.acquire()
        return await self.log.head()

    async def silent(self, names: Collection[str]) -> frozenset[str]:
        return self.gone & frozenset(names)

    async def resign(self) -> None:
        self.held = self.holds = False

    async def leave(self) -> None:
        await self.resign()


class SlowToRead(GatedLog):
    """Reads begin when `readable` is set."""

    def __init__(self, inner: MemoryEventLog) -> None:
        super().__init__(inner)
        self.readable = asyncio.Event()
        self.readable.set()
        self.reading = asyncio.Event()

    async def read_all(self, after_position: int = 0) -> AsyncIterator[RecordedEvent]:
        self.reading.set()
        await self.readable.wait()
        async for recorded in self.inner.read_all(after_position):
            yield recorded


class Scene:
    """One office with its loops, a log that another process writes to, and a clock set by hand."""

    def __init__(self) -> None:
        self.inner = MemoryEventLog()
        self.log = SlowToRead(self.inner)
        self.now = 100.0
        self.lease = Lease(self.inner)
        self.tracker = Tracker(self.log, ManualClock(), name="me")
        self.other = Tracker(self.inner, ManualClock(), name="other")
        self.settling = asyncio.Event()
        self.settled = asyncio.Event()
        keeper = LogKeeper(self.tracker, self.log)
        self.office = Office(self.tracker, keeper, self._settle, lambda: self.now)

    async def _settle(self) -> None:
        self.settling.set()
        await self.settled.wait()

    async def calls_left_behind(self, number: int) -> None:
        for n in range(number):
            agent = Agent(self.other, f"c{n}")
            await agent.open()
            await agent.arrive("u1")

    def in_flight(self) -> int:
        return sum(len(s.flights) for s in self.tracker.contexts.states.values())

    async def until(self, holds: Callable[[], bool]) -> None:
        async with asyncio.timeout(SECONDS):
            while not holds():  # noqa: ASYNC110 - beats are no events
                await asyncio.sleep(0.005)


@asynccontextmanager
async def office(*, num_calls: int = 0) -> AsyncIterator[Scene]:
    it = Scene()
    await it.other.start()
    await it.calls_left_behind(num_calls)
    await it.tracker.start()
    await it.office.join(it.lease)
    loops = [asyncio.ensure_future(loop()) for loop in (it.office.follow, it.office.keep)]
    try:
        yield it
    finally:
        for loop in loops:
            loop.cancel()
        await asyncio.gather(*loops, return_exceptions=True)


async def test_what_is_recorded_while_an_owner_reads_is_not_taken_for_read() -> None:
    async with office() as it:
        assert it.office.holds
        it.log.readable.clear()
        it.log.reading.clear()
        await it.calls_left_behind(1)
        it.lease.asked.release()
        await asyncio.wait_for(it.log.reading.wait(), SECONDS)
        it.now += 10.0
        it.log.readable.set()
        await it.until(lambda: it.in_flight() == 1)
        for _ in range(10):
            await asyncio.sleep(0)
        assert not it.office.holds, "what others recorded in these ten seconds is not known"
        it.lease.asked.release()
        await it.until(lambda: it.office.holds)


async def test_an_owner_that_ends_what_others_left_behind_still_says_that_it_lives() -> None:
    async with office(num_calls=100) as it:
        assert it.in_flight() == 100
        it.log.gate.clear()
        it.log.waiting.clear()
        it.lease.gone = frozenset({"other"})
        while not it.log.waiting.is_set():
            it.now += 1.0
            await asyncio.sleep(0.005)
        beats = it.lease.beats
        await it.until(lambda: it.lease.beats > beats + 2)
        assert it.in_flight() == 100
        it.log.gate.set()
        await it.until(lambda: not it.in_flight())


async def test_an_owner_that_loses_the_lease_ends_nobodys_calls_any_more() -> None:
    async with office(num_calls=200) as it:
        it.log.gate.clear()
        it.log.waiting.clear()
        it.lease.gone = frozenset({"other"})
        while not it.log.waiting.is_set():
            it.now += 1.0
            await asyncio.sleep(0.005)
        it.lease.held = False
        beats = it.lease.beats
        await it.until(lambda: it.lease.beats > beats + 2)
        it.log.gate.set()
        await it.until(lambda: it.lease.beats > beats + 6)
        assert it.in_flight() == 200
        assert not it.office.holds


async def test_a_lease_that_was_lost_while_taking_over_is_taken_over_anew() -> None:
    async with office() as it:
        it.lease.held = False
        await it.until(lambda: not it.office.holds)
        it.log.readable.clear()
        it.log.reading.clear()
        it.lease.held = True
        await asyncio.wait_for(it.log.reading.wait(), SECONDS)
        it.lease.held = False
        await it.until(lambda: not it.lease.holds)
        it.lease.held = True
        await it.until(lambda: it.lease.holds)
        it.log.reading.clear()
        it.log.readable.set()
        await asyncio.wait_for(it.log.reading.wait(), SECONDS)
        it.lease.asked.release()
        await it.until(lambda: it.office.holds)


async def test_who_does_not_own_resigns_without_waiting_for_the_owners_directives() -> None:
    async with office() as it:
        it.lease.held = False
        await it.until(lambda: not it.office.holds)
        await it.office.resign()
        assert not it.settling.is_set()


async def test_each_takeover_is_told() -> None:
    async with office() as it:
        told: list[bool] = []
        it.office.taken_over.append(lambda: told.append(it.office.in_office))
        for number in (1, 2):
            it.lease.held = False
            await it.until(lambda: not it.office.in_office)
            it.lease.held = True
            await it.until(partial(lambda n: len(told) == n, number))
        assert told == [True, True]
