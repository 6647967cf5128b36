"""What somebody does to the cache by hand is found by looking, and put right."""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import pytest

from engine_bridge.drift_watch import LOOKS_APART_NS, RETURN_WINDOW_NS, DriftWatch
from engine_bridge.errors import CacheUnavailable
from engine_bridge.placement_watch import PlacementWatch
from lifecycle.core.directives import Reclaim
from lifecycle.core.events import ChunksGone
from lifecycle.core.ids import Namespace, split_keys
from lifecycle.orphans import callers, end_orphans
from lifecycle.ports import Presence
from lifecycle.reclaimer import Reclaimer
from lifecycle.store.memory import MemoryEventLog
from lifecycle.tracker import Tracker
from lifecycle.vocabulary import Mode, Tier
from tests.lifecycle.core.story import NAMESPACE
from tests.lifecycle.fake_cache import BOTH, FakeCache
from tests.lifecycle.lives import Agent, CountedIds, ManualClock, books, chain_of, replayed

L1, L2 = frozenset({Tier.L1}), frozenset({Tier.L2})


class AskedCache(FakeCache):
    """Says when it was asked where chunks are."""

    def __init__(self) -> None:
        super().__init__()
        self.was_asked = asyncio.Event()

    async def locate(self, namespace: Namespace, keys: Sequence[bytes]) -> Sequence[Presence]:
        self.was_asked.set()
        return await super().locate(namespace, keys)


@dataclass
class Scene:
    tracker: Tracker
    log: MemoryEventLog
    clock: ManualClock
    cache: AskedCache
    watch: DriftWatch
    found: list[tuple[str, int]] = field(default_factory=list)
    modes: dict[str, Mode] = field(default_factory=dict)

    async def lived(self, uid: str, words: str) -> Agent:
        agent = Agent(self.tracker, uid)
        await agent.open()
        await agent.call(words)
        self.cache.store(chain_of(words))
        await agent.stored(chain_of(words))
        return agent

    async def until(self, holds: Callable[[], bool]) -> None:
        heard = asyncio.Event()
        self.tracker.listeners.append(lambda batch: heard.set())
        async with asyncio.timeout(10):
            while not holds():
                heard.clear()
                await heard.wait()

    async def freed(self, agent: Agent, words: str) -> None:
        await agent.close()
        records = self.tracker.contexts.directives
        await self.until(
            lambda: (
                not set(split_keys(chain_of(words))) & set(self.cache.chunks)
                and all(record.result for record in records.values())
            )
        )

    async def looked(self, times: int = 2) -> None:
        """Until the loop went round that often."""
        for _ in range(times):
            self.cache.was_asked.clear()
            await asyncio.wait_for(self.cache.was_asked.wait(), 10)


@asynccontextmanager
async def scene(keys_per_look: int = 1000) -> AsyncIterator[Scene]:
    log, clock, cache, ids = MemoryEventLog(), ManualClock(), AskedCache(), CountedIds()
    tracker = Tracker(log, clock)
    await tracker.start()
    modes: dict[str, Mode] = {}
    reclaimer = Reclaimer(tracker, cache, ids, lambda uid: modes.get(uid, Mode.ENFORCE), lambda ns: "")
    found: list[tuple[str, int]] = []
    watch = DriftWatch(
        tracker,
        cache,
        PlacementWatch(tracker, cache),
        reclaimer,
        ids,
        lambda what, number: found.append((what, number)),
        look_seconds=0.001,
        keys_per_look=keys_per_look,
    )
    tasks = [asyncio.ensure_future(each.run()) for each in (watch, reclaimer)]
    try:
        yield Scene(tracker, log, clock, cache, watch, found, modes)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def test_live_chunks_that_somebody_deleted_are_no_longer_called_stored() -> None:
    async with scene() as it:
        await it.lived("a", "s1 u1 a1 u2")
        keys = split_keys(chain_of("s1 u1 a1 u2"))
        for key in keys[1:3]:
            del it.cache.chunks[key]
        index = it.tracker.contexts.index
        await it.until(lambda: index.unverified(NAMESPACE, b"".join(keys)) == keys[1:3])
        assert it.found == [("gone", 2)]
        assert books(it.tracker.contexts) == books(await replayed(it.log))
        assert index.stats(NAMESPACE).live == len(keys)


async def test_every_context_has_its_turn_however_few_keys_a_look_takes() -> None:
    async with scene(keys_per_look=1) as it:
        for n in range(5):
            await it.lived(f"c{n}", f"s{n} u{n}")
        for n in range(5):
            keys = chain_of(f"s{n} u{n}")
            it.cache.chunks.pop(split_keys(keys)[0])
            await it.until(lambda keys=keys: len(it.tracker.contexts.index.unverified(NAMESPACE, keys)) == 1)
        assert it.found == [("gone", 1)] * 5


async def test_a_cache_that_is_away_is_met_again() -> None:
    async with scene() as it:
        await it.lived("a", "s1 u1")
        it.cache.unreachable = True
        await it.looked()
        it.cache.chunks.clear()
        it.cache.unreachable = False
        await it.until(lambda: it.found == [("gone", len(split_keys(chain_of("s1 u1"))))])


async def test_a_late_copy_of_what_was_freed_is_freed_again() -> None:
    async with scene() as it:
        await it.freed(await it.lived("a", "s1 u1"), "s1 u1")
        back = split_keys(chain_of("s1 u1"))[:2]
        it.cache.store(b"".join(back), L2)
        it.clock.advance(LOOKS_APART_NS / 1e9 + 1)
        await it.until(lambda: len(it.cache.asked) == 2 and not it.cache.chunks)
        again = it.cache.asked[1]
        assert isinstance(again, Reclaim)
        assert split_keys(again.keys) == back
        assert again.owners == (("a", 2),)
        assert it.found == [("returned", 2)]
        await it.until(lambda: all(r.result for r in it.tracker.contexts.directives.values()))
        assert books(it.tracker.contexts) == books(await replayed(it.log))


async def test_what_may_be_somebody_elses_stays() -> None:
    async with scene() as it:
        await it.freed(await it.lived("a", "s1 u1"), "s1 u1")
        await it.freed(await it.lived("b", "s2 u2"), "s2 u2")
        await it.freed(await it.lived("c", "s3 u3"), "s3 u3")
        it.modes["c"] = Mode.OBSERVE
        it.cache.store(chain_of("s1 u1"), BOTH)  # computed by somebody: it is in the upper tier
        await it.lived("d", "s2 u2")  # a context of ours refers to it again
        it.cache.store(chain_of("s3 u3"), L2)  # its owner is not enforced any more
        kept = set(it.cache.chunks)
        it.clock.advance(LOOKS_APART_NS / 1e9 + 1)
        await it.looked(6)
        assert set(it.cache.chunks) == kept
        assert it.found == []
        await it.tracker.untracked(NAMESPACE, "bypass")
        it.modes.clear()
        it.clock.advance(LOOKS_APART_NS / 1e9 + 1)
        await it.looked(6)
        assert set(it.cache.chunks) == kept, "somebody unseen may have put it there"


async def test_long_after_a_delete_nothing_counts_as_its_late_copy() -> None:
    async with scene() as it:
        await it.freed(await it.lived("a", "s1 u1"), "s1 u1")
        await it.lived("b", "s2 u2")
        it.clock.advance(RETURN_WINDOW_NS / 1e9 + 1)
        it.cache.store(chain_of("s1 u1"), L2)
        await it.looked(4)
        assert set(split_keys(chain_of("s1 u1"))) <= set(it.cache.chunks)
        gone = [r.event for r in [e async for e in it.log.read_all()] if isinstance(r.event, ChunksGone)]
        assert gone == []


async def cut_off(it: Scene, words: str, more: str) -> Tracker:
    """A context whose second call was computed and never proven, by a process that then died."""
    agent = await it.lived("a", words)
    await agent.arrive(more, "c2")
    await agent.map(more, "c2")
    await agent.first("c2")
    it.cache.store(chain_of(more))
    again = Tracker(it.log, it.clock)
    await again.start()
    await end_orphans(again, callers(again.contexts))
    return again


def watching(it: Scene, tracker: Tracker, found: list[tuple[str, int]]) -> DriftWatch:
    reclaimer = Reclaimer(tracker, it.cache, CountedIds(), lambda uid: Mode.ENFORCE, lambda ns: "")
    placement = PlacementWatch(tracker, it.cache)
    return DriftWatch(
        tracker, it.cache, placement, reclaimer, CountedIds(), lambda what, n: found.append((what, n))
    )


async def test_what_a_dead_process_left_unproven_behind_ours_is_ours() -> None:
    async with scene() as it:
        again = await cut_off(it, "s1 u1", "s1 u1 a1 u2")
        late = split_keys(chain_of("s1 u1 a1 u2"))[-1]
        del it.cache.chunks[late]
        found: list[tuple[str, int]] = []
        watch = watching(it, again, found)
        it.cache.unreachable = True
        with pytest.raises(CacheUnavailable):
            await watch.look()
        it.cache.unreachable = False
        await watch.look()
        assert again.contexts.index.unproven(NAMESPACE, chain_of("s1 u1 a1 u2")) == [late]
        it.cache.store(late)
        await watch.look()
        await watch.look()
        assert again.contexts.index.unproven(NAMESPACE, chain_of("s1 u1 a1 u2")) == []
        assert [what for what, _ in found] == ["proven", "proven"]
        assert again.cut_off == {}
        assert books(again.contexts) == books(await replayed(it.log))


async def test_what_may_have_been_there_before_us_or_be_somebodys_is_not_claimed() -> None:
    async with scene() as it:
        again = await cut_off(it, "s1 u1", "s1 u1 a1 u2")
        await again.untracked(NAMESPACE, "bypass")
        found: list[tuple[str, int]] = []
        await watching(it, again, found).look()
        assert found == []

    async with scene() as it:
        agent = Agent(it.tracker, "a")
        await agent.open()
        await agent.arrive("s1 u1")
        await agent.map("s1 u1")
        it.cache.store(chain_of("s1 u1"))
        again = Tracker(it.log, it.clock)
        await again.start()
        await end_orphans(again, callers(again.contexts))
        await watching(it, again, found).look()
        assert found == [], "nothing before it is known to be ours"
        assert again.cut_off == {}


async def test_what_was_ours_at_the_end_counts_even_if_it_is_freed_meanwhile() -> None:
    async with scene() as it:
        again = await cut_off(it, "s1 u1", "s1 u1 a1 u2")
        late = split_keys(chain_of("s1 u1 a1 u2"))[len(split_keys(chain_of("s1 u1"))) :]
        await again.record(
            NAMESPACE, [ChunksGone(at_ns=it.clock.now_ns(), namespace=NAMESPACE, keys=chain_of("s1 u1"))]
        )
        found: list[tuple[str, int]] = []
        await watching(it, again, found).look()
        assert sum(number for what, number in found if what == "proven") == len(late)
        assert again.contexts.index.unproven(NAMESPACE, b"".join(late)) == []


class OwingCache(AskedCache):
    """Parts of it were away while something was freed."""

    def __init__(self) -> None:
        super().__init__()
        self.owes = True

    async def collect_owed(self) -> None:
        self.owes = False


async def test_what_was_freed_while_a_part_was_away_is_freed_there_though_nothing_else_happens() -> None:
    async with scene() as it:
        it.cache = OwingCache()
        await watching(it, it.tracker, []).look()
        assert not it.cache.owes
