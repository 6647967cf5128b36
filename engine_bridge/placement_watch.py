"""Notices what leaves the cache behind our back: evictions, foreign deletes, restarts, lost events.

An event that a chunk was removed is no proof: another copy may live. So every such hint leads to a look into
the directory, and only what is in no tier any more is recorded as gone: it is then neither proven nor ours,
whoever stores it again. Only chunks that something refers to are looked at. The dead are the reclaimer's: it
deletes whether or not they are shown, for the last copy that a killed cache server made was never reported.

A directory proves absence only if it has seen every store. One that started anew has not: a coordinator keeps
it in memory. As long as the books are older than it, what it does not show may be there all the same,
unless it has shown it before.
"""

import asyncio
from collections.abc import Callable, Sequence
from typing import Protocol, runtime_checkable

import structlog

from engine_bridge.cache_events import BlocksRemoved, EventBatch, EventsMissed, IncarnationChanged
from engine_bridge.errors import CacheUnavailable
from lifecycle.core.events import ChunksConfirmed, ChunksGone, RecordedEvent
from lifecycle.core.ids import Namespace, split_keys
from lifecycle.errors import LogUnavailable
from lifecycle.ports import CacheControl
from lifecycle.tracker import Tracker
from lifecycle.vocabulary import Tier

log = structlog.get_logger(__name__)

GATHER_SECONDS = 1.0
"""Removals come in bursts; one look serves a burst."""

KEYS_PER_LOOK = 2_000


@runtime_checkable
class YoungDirectory(Protocol):
    """What a `CacheControl` has in addition if its directory may be younger than what the cache holds."""

    async def directory_began_ns(self) -> int:
        """When the directory began to hear of stores; 0 if it does not say. Raises `CacheUnavailable`."""
        ...


class PlacementWatch:
    """Turns hints into looks. `take` is called with every batch of the engine's event stream.

    `blind` says that the directory does not know everything that the books do. Of several processes on a log
    each looks, to know that, and only the one that `owns` says so of records what its looks show: whoever
    becomes it must `doubt`.
    """

    def __init__(
        self,
        tracker: Tracker,
        cache: CacheControl,
        owns: Callable[[], bool] = lambda: True,
        gather_seconds: float = GATHER_SECONDS,
    ) -> None:
        self._tracker = tracker
        self._cache = cache
        self._owns = owns
        self._gather_seconds = gather_seconds
        self._removed: set[bytes] = set()
        self._doubts = ""
        self._wake = asyncio.Event()
        self.blind = False
        self._began_ns = 0
        self._shown: set[bytes] = set()
        tracker.listeners.append(self._heard)

    def take(self, batch: EventBatch) -> None:
        """Remember what must be looked at."""
        for event in batch.events:
            match event:
                case BlocksRemoved(tier=Tier.L1, keys=keys) if keys:
                    self._removed.update(keys)
                case BlocksRemoved(tier=Tier.L1):
                    self._doubts = "chunks were removed and their whole keys are not told"
                case EventsMissed(first=first, last=last):
                    self._doubts = f"event batches {first} to {last} were lost"
                case IncarnationChanged():
                    self._doubts = "the engine started anew"
                case _:
                    continue
            self._wake.set()

    def doubt(self, reason: str) -> None:
        """Look at everything: what we believe of the cache may be wrong."""
        self._doubts = reason
        self._wake.set()

    async def run(self) -> None:
        """Until cancelled. A cache that cannot be asked is asked again."""
        while True:
            await self._wake.wait()
            await asyncio.sleep(self._gather_seconds)
            self._wake.clear()
            removed, self._removed = self._removed, set()
            doubts, self._doubts = self._doubts, ""
            try:
                await self._look(removed, doubts)
            except (CacheUnavailable, LogUnavailable) as error:
                log.warning("placement is looked at again", error=str(error))
                self._removed |= removed
                self._doubts = self._doubts or doubts
                self._wake.set()

    async def _look(self, removed: set[bytes], doubts: str) -> None:
        index = self._tracker.contexts.index
        for namespace in index.namespaces():
            if doubts:
                keys = index.verified_keys(namespace)
            else:
                told = b"".join(sorted(removed))
                unproven = set(index.unverified(namespace, told))
                keys = [key for key in sorted(removed) if key not in unproven]
            for start in range(0, len(keys), KEYS_PER_LOOK):
                batch = keys[start : start + KEYS_PER_LOOK]
                await self.look(namespace, batch, doubts or "the engine reported a removal")

    async def look(self, namespace: Namespace, keys: Sequence[bytes], reason: str) -> int:
        """Record which of these keys, shown by the cache before, are in no tier any more; answers how many.

        Raises `CacheUnavailable`, `LogUnavailable`.
        """
        index = self._tracker.contexts.index
        keys = [key for key in keys if index.references(namespace, key)]
        present = await self._cache.locate(namespace, keys) if keys else ()
        # After the look: a directory that started anew in between is found out.
        await self._ask_the_directorys_age()
        gone = [p.key for p in present if not p.tiers]
        if self.blind:
            gone = [key for key in gone if key in self._shown]
            self._shown |= {p.key for p in present if p.tiers}
        if not gone or not self._owns():
            return 0
        event = ChunksGone(
            at_ns=self._tracker.clock.now_ns(), namespace=namespace, keys=b"".join(gone), reason=reason
        )
        await self._tracker.record(namespace, [event])
        self._shown -= set(gone)
        log.info("chunks left the cache", chunks=len(gone), reason=reason)
        return len(gone)

    async def _ask_the_directorys_age(self) -> None:
        if not isinstance(self._cache, YoungDirectory):
            return
        began_ns = await self._cache.directory_began_ns()
        if began_ns != self._began_ns:
            self._shown.clear()
            if self._began_ns:
                log.warning("the directory started anew: what it does not show may be there all the same")
        self._began_ns = began_ns
        states = self._tracker.contexts.states.values()
        self.blind = any(state.created_ns < began_ns for state in states)
        if not self.blind:
            self._shown.clear()

    def _heard(self, batch: Sequence[RecordedEvent]) -> None:
        if self.blind:
            for recorded in batch:
                if isinstance(recorded.event, ChunksConfirmed):
                    self._shown.update(split_keys(recorded.event.keys))
