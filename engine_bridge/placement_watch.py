"""Notices what leaves the cache behind our back: evictions, foreign deletes, restarts, lost events.

An event that a chunk was removed is no proof: another copy may live. So every such hint leads to a look into
the directory, and only what is in no tier any more is recorded as gone: it is then neither proven nor ours,
whoever stores it again.
"""

import asyncio
from collections.abc import Sequence

import structlog

from engine_bridge.cache_events import BlocksRemoved, EventBatch, EventsMissed, IncarnationChanged
from engine_bridge.errors import CacheUnavailable
from lifecycle.core.events import ChunksGone
from lifecycle.core.ids import KEY_BYTES, Namespace
from lifecycle.errors import LogUnavailable
from lifecycle.ports import CacheControl
from lifecycle.tracker import Tracker
from lifecycle.vocabulary import Tier

log = structlog.get_logger(__name__)

GATHER_SECONDS = 1.0
"""Removals come in bursts; one look serves a burst."""

KEYS_PER_LOOK = 2_000


class PlacementWatch:
    """Turns hints into looks. `take` is called with every batch of the engine's event stream."""

    def __init__(self, tracker: Tracker, cache: CacheControl, gather_seconds: float = GATHER_SECONDS) -> None:
        self._tracker = tracker
        self._cache = cache
        self._gather_seconds = gather_seconds
        self._removed: set[bytes] = set()
        self._doubts = ""
        self._wake = asyncio.Event()

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
                await self._record_gone(namespace, batch, doubts or "the engine reported a removal")

    async def _record_gone(self, namespace: Namespace, keys: Sequence[bytes], reason: str) -> None:
        gone = [p.key for p in await self._cache.locate(namespace, keys) if not p.tiers]
        if not gone:
            return
        event = ChunksGone(
            at_ns=self._tracker.clock.now_ns(), namespace=namespace, keys=b"".join(gone), reason=reason
        )
        await self._tracker.record(namespace, [event])
        log.info("chunks left the cache", chunks=len(event.keys) // KEY_BYTES, reason=reason)
