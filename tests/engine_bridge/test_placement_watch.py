"""What leaves the cache behind our back is noticed, and only a look makes it true."""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager

from engine_bridge.cache_events import BlocksRemoved, CacheEvent, EventBatch, EventsMissed, IncarnationChanged
from engine_bridge.drivers.noop import NoCacheControl
from engine_bridge.errors import CacheUnavailable
from engine_bridge.placement_watch import PlacementWatch
from lifecycle.core.events import ChunksConfirmed, ChunksGone, RecordedEvent
from lifecycle.core.ids import KEY_BYTES, Namespace, split_keys
from lifecycle.core.observations import (
    CallArrival,
    CallEnding,
    CallMapping,
    CloseRequested,
    ContextOpened,
    MessageFact,
    PromptMapping,
)
from lifecycle.ports import Presence
from lifecycle.store.memory import MemoryEventLog
from lifecycle.tracker import Tracker
from lifecycle.vocabulary import CallEnd, IdentityRung, MappingKind, Tier

NS = Namespace("m")
KEYS = [bytes([n]) * KEY_BYTES for n in range(1, 5)]


class Clock:
    def now_ns(self) -> int:
        return 10**18


class Directory(NoCacheControl):
    """A cache whose content the test decides; it may be away, and have begun at any time."""

    def __init__(self, present: set[bytes]) -> None:
        super().__init__()
        self.present = present
        self.away = 0
        self.asked: list[bytes] = []
        self.began_ns = 0

    async def directory_began_ns(self) -> int:
        return self.began_ns

    async def locate(self, namespace: Namespace, keys: Sequence[bytes]) -> Sequence[Presence]:
        if self.away:
            self.away -= 1
            raise CacheUnavailable("away")
        self.asked += keys
        return [Presence(k, frozenset({Tier.L1} if k in self.present else ())) for k in keys]


@asynccontextmanager
async def watching(
    directory: Directory,
    owns: Callable[[], bool] = lambda: True,
) -> AsyncIterator[tuple[Tracker, PlacementWatch, asyncio.Queue[bytes]]]:
    """A tracker that has proven `KEYS`, a running watch, and the queue of keys recorded as gone."""
    tracker = Tracker(MemoryEventLog(), Clock())
    opened = ContextOpened(
        at_ns=1, uid="c", tenant="t", context_id="x", namespace=NS, rung=IdentityRung.EXPLICIT
    )
    await tracker.open(opened, None)
    facts = (MessageFact(b"d" * 16, "user"),)
    await tracker.observe("c", CallArrival(at_ns=2, call_id="1", head=b"h", messages=facts))
    mapping = PromptMapping(
        kind=MappingKind.EXACT,
        num_tokens=4,
        message_ends=(4,),
        chunk_size=1,
        chunk_keys=b"".join(KEYS),
    )
    await tracker.observe("c", CallMapping(at_ns=3, call_id="1", attempt=1, mapping=mapping))
    await tracker.record(
        NS, [ChunksConfirmed(at_ns=4, namespace=NS, keys=b"".join(KEYS), tiers=(Tier.L1,), stored=True)]
    )
    gone: asyncio.Queue[bytes] = asyncio.Queue()

    def heard(batch: Sequence[RecordedEvent]) -> None:
        for recorded in batch:
            if isinstance(recorded.event, ChunksGone):
                for key in split_keys(recorded.event.keys):
                    gone.put_nowait(key)

    tracker.listeners.append(heard)
    watch = PlacementWatch(tracker, directory, owns, gather_seconds=0.0)
    running = asyncio.ensure_future(watch.run())
    try:
        yield tracker, watch, gone
    finally:
        running.cancel()


def batch(*events: CacheEvent) -> EventBatch:
    return EventBatch(incarnation=1, sequence=1, at_ns=1, events=events)


def removed(*keys: bytes) -> BlocksRemoved:
    return BlocksRemoved(tier=Tier.L1, hashes=tuple(range(len(keys))), keys=keys)


async def within(queue: asyncio.Queue[bytes]) -> bytes:
    return await asyncio.wait_for(queue.get(), 5)


async def test_a_removal_counts_only_when_no_tier_shows_the_chunk() -> None:
    directory = Directory({KEYS[1]})
    async with watching(directory) as (tracker, watch, gone):
        watch.take(batch(removed(KEYS[0], KEYS[1])))
        assert await within(gone) == KEYS[0]
        assert tracker.contexts.index.unverified(NS, b"".join(KEYS)) == [KEYS[0]]
        assert sorted(directory.asked) == sorted(KEYS[:2])


async def test_removals_of_chunks_that_are_not_in_the_books_cost_no_look() -> None:
    directory = Directory(set(KEYS[:3]))
    async with watching(directory) as (_, watch, gone):
        watch.take(batch(removed(b"z" * KEY_BYTES)))
        watch.take(batch(removed(KEYS[3])))
        assert await within(gone) == KEYS[3]
        assert directory.asked == [KEYS[3]]


async def test_lost_events_and_new_engines_make_everything_be_looked_at() -> None:
    for event in (EventsMissed(first=3, last=9), IncarnationChanged(incarnation=2)):
        directory = Directory(set(KEYS[:3]))
        async with watching(directory) as (_, watch, gone):
            watch.take(batch(event))
            assert await within(gone) == KEYS[3]
            assert sorted(directory.asked) == sorted(KEYS)


async def test_a_cache_that_cannot_be_asked_is_asked_again() -> None:
    directory = Directory(set(KEYS[1:]))
    directory.away = 2
    async with watching(directory) as (_, watch, gone):
        watch.take(batch(removed(KEYS[0])))
        assert await within(gone) == KEYS[0]


async def test_a_directory_that_started_anew_proves_absence_only_of_what_it_has_shown() -> None:
    directory = Directory(set())
    async with watching(directory) as (tracker, watch, gone):
        directory.began_ns = 10  # younger than the context
        assert await watch.look(NS, KEYS, "a look") == 0
        assert watch.blind
        directory.present = {KEYS[0]}
        assert await watch.look(NS, KEYS, "a look") == 0
        confirmed = ChunksConfirmed(at_ns=20, namespace=NS, keys=KEYS[1], tiers=(Tier.L1,), stored=True)
        await tracker.record(NS, [confirmed])
        directory.present = set()
        assert await watch.look(NS, KEYS, "a look") == 2
        assert {gone.get_nowait(), gone.get_nowait()} == set(KEYS[:2])

        directory.present = set(KEYS[2:])
        assert await watch.look(NS, KEYS[2:], "a look") == 0
        directory.began_ns = 30
        directory.present = set()
        assert await watch.look(NS, KEYS[2:], "a look") == 0, "that was shown by another directory"


async def test_a_directory_older_than_all_contexts_is_believed() -> None:
    directory = Directory(set(KEYS[1:]))
    directory.began_ns = 1
    async with watching(directory) as (_, watch, gone):
        watch.doubt("the proxy was restarted")
        assert await within(gone) == KEYS[0]
        assert not watch.blind


async def test_dead_chunks_are_left_to_whoever_deletes_them() -> None:
    directory = Directory(set())
    async with watching(directory) as (tracker, watch, _):
        ended = CallEnding(at_ns=5, call_id="1", attempt=1, end=CallEnd.COMPLETED)
        await tracker.observe("c", ended)
        await tracker.observe("c", CloseRequested(at_ns=6, reason="test"))
        index = tracker.contexts.index
        assert index.stats(NS).dead == len(KEYS)
        assert await watch.look(NS, KEYS, "a look") == 0
        assert directory.asked == []
        assert index.stats(NS).dead == len(KEYS)


async def test_who_does_not_own_the_log_looks_and_records_nothing_until_it_does() -> None:
    directory = Directory(set(KEYS[1:]))
    owners: list[str] = []
    async with watching(directory, lambda: bool(owners)) as (_, watch, gone):
        assert await watch.look(NS, KEYS, "a look") == 0
        assert directory.asked == KEYS
        assert gone.empty()
        owners.append("this one")
        watch.doubt("this proxy took over")
        assert await within(gone) == KEYS[0]
