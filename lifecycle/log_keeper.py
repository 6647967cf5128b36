"""Keeps the event log short: snapshots of the books, and trims of what they stand for.

A snapshot is taken in two steps. While the books rest, what may change is copied: calls go on, what they
append is applied a moment later. Then the copy is encoded and written in slices, between which everybody else
runs. The log is trimmed up to the older of two snapshots, as far as its events are older than the retention
and nobody who reads it needs them any more.
"""

import asyncio
from collections.abc import Awaitable, Callable, Sequence

import structlog

from lifecycle.errors import LifecycleError
from lifecycle.ports import EventLog, SnapshotStore, StoredSnapshot
from lifecycle.projections.index_facts import Mismatch
from lifecycle.snapshots import (
    Capture,
    Manifest,
    Unreadable,
    captured,
    encoded,
    read_manifest,
    stored,
)
from lifecycle.tracker import Tracker

log = structlog.get_logger(__name__)

MIN_EVENTS = 500
"""Events between two snapshots, at least."""

RUNS_PER_EVENT = 8
"""Events between two snapshots grow with the books: one for so many runs of the chunk index. What a snapshot
costs grows with them too, so it stays a small part of what the events themselves cost."""

LOOK_SECONDS = 5.0
MAX_PAUSE_SECONDS = 300.0
"""Longest pause after failures."""

LAST_SECONDS = 5.0

SLICE_SECONDS = 0.001
"""Work between two breaths of the event loop."""

REST_PER_SLICE = 4.0
"""Rest after each slice of encoding, as a multiple of the time it took."""

PUT_BYTES = 1 << 20
"""Parts are written in batches of about so many bytes: appends wait for one."""

EVENTS_PER_LOOK = 20_000
"""Events whose age is looked at in one trim."""

Reader = Callable[[], Awaitable[int | None]]
"""Answers the last position that a reader of the log has dealt with; None if it needs nothing of the log."""


class LogKeeper:
    """One loop for one log, of the process that owns it: nobody else snapshots and trims it.

    `readers` are whoever must have read an event before it is trimmed. Events are kept as long as the tracker
    keeps closed contexts.
    """

    def __init__(self, tracker: Tracker, event_log: EventLog, readers: Sequence[Reader] = ()) -> None:
        self.problem = ""
        """Why the last attempt came to nothing; empty if it did not."""
        self.num_failures = 0
        self.size_bytes = 0
        """Bytes that the last snapshot wrote."""
        self.taken_ns = 0
        """When the last snapshot of this process was taken; 0 before the first."""
        self.rest_seconds = 0.0
        """How long the books rested for it."""
        self.first_position = 1
        self.tracker = tracker
        self._log = event_log
        self._snapshots: SnapshotStore | None = None
        self._readers = readers
        self._newest: tuple[int, frozenset[str]] | None = None
        self._older: int | None = None
        self._old = 0
        self._next_ns = 0
        self._busy = asyncio.Lock()

    @property
    def position(self) -> int:
        """Position of the newest snapshot, 0 without one."""
        return self._newest[0] if self._newest is not None else 0

    @property
    def warnings(self) -> tuple[str, ...]:
        """The problem, if there is one. Neither calls nor control suffer from it."""
        return (self.problem,) if self.problem else ()

    async def start(self, snapshots: SnapshotStore) -> None:
        """Start the tracker from the newest of `snapshots` that can be read, and keep later ones there.

        Raises as `Tracker.start`.
        """
        manifest = await self.tracker.start(snapshots)
        if manifest is not None:
            await self._go_on_from(manifest, snapshots)
        self.first_position = await self._log.first_position()
        self._snapshots = snapshots

    async def take_over(self) -> None:
        """Go on from the snapshots that others wrote meanwhile. Raises `LogUnavailable`."""
        store = self._snapshots
        if store is None:
            return
        for snapshot in await store.newest_first():
            if _readable(snapshot):
                await self._go_on_from(read_manifest(snapshot), store)
                break
        self.first_position = await self._log.first_position()

    async def _go_on_from(self, manifest: Manifest, snapshots: SnapshotStore) -> None:
        self._newest, self._older = (manifest.position, frozenset(manifest.parts())), None
        for snapshot in await snapshots.newest_first():
            if snapshot.position < manifest.position and _readable(snapshot):
                self._older = snapshot.position
                return

    async def run(self, look_seconds: float = LOOK_SECONDS) -> None:
        """Until cancelled. Whatever fails is tried again, ever more rarely; it never ends the loop."""
        pause = look_seconds
        while True:
            await asyncio.sleep(pause)
            try:
                if self._due():
                    await self.snapshot()
                await self.trim()
            except (LifecycleError, Mismatch) as error:
                pause = min(2 * pause, MAX_PAUSE_SECONDS)
                self.num_failures += 1
                self.problem = (
                    f"the event log grows, for it has no new snapshot or cannot be trimmed: {error}"
                )
                log.warning("snapshot or trim failed", error=str(error))
            else:
                self.problem, pause = "", look_seconds

    async def close(self) -> None:
        """Write a last snapshot, if `LAST_SECONDS` are enough for it: the next start is faster then."""
        try:
            async with asyncio.timeout(LAST_SECONDS):
                await self.snapshot(in_a_hurry=True)
        except (LifecycleError, Mismatch, TimeoutError) as error:
            log.warning("no last snapshot: the next start reads more of the log", error=repr(error))

    def _due(self) -> bool:
        contexts = self.tracker.contexts
        num_runs = sum(contexts.index.stats(n).runs for n in contexts.index.namespaces())
        return contexts.position - self.position >= max(MIN_EVENTS, num_runs // RUNS_PER_EVENT)

    async def snapshot(self, *, in_a_hurry: bool = False) -> None:
        """Write a snapshot of the books as they are now, if they moved since the last one.

        In a hurry it takes no rests: others run, but less. Raises `LogUnavailable`, and `Mismatch` where the
        books contradict themselves.
        """
        async with self._busy:
            store = self._snapshots
            if store is None or self.tracker.contexts.position == self.position:
                return
            capture = await self._captured()
            newest, known = self._newest or (None, frozenset[str]())
            manifest = await self._written(store, capture, known, 0.0 if in_a_hurry else REST_PER_SLICE)
            names = frozenset(manifest.parts())
            await store.commit(stored(manifest), newest, names | known)
            self._newest, self._older = (manifest.position, names), newest
            self.taken_ns = self.tracker.clock.now_ns()

    async def _captured(self) -> Capture:
        clock = asyncio.get_running_loop().time
        async with self.tracker.at_rest() as contexts:
            began = clock()
            for step in captured(contexts):
                self.rest_seconds = clock() - began
                if step is not None:
                    return step
                await asyncio.sleep(0)
        raise Mismatch("the books cannot be captured")

    async def _written(
        self, store: SnapshotStore, capture: Capture, known: frozenset[str], rest: float
    ) -> Manifest:
        """Write the parts that are not known; answers the manifest, which is not written yet."""
        clock = asyncio.get_running_loop().time
        batch: dict[str, bytes] = {}
        num_bytes = self.size_bytes = 0
        began = clock()
        for step in encoded(capture, known):
            if isinstance(step, Manifest):
                await store.put(batch)
                return step
            if step is not None:
                name, content = step
                batch[name] = content
                num_bytes += len(content)
                self.size_bytes += len(content)
            if num_bytes >= PUT_BYTES:
                await store.put(batch)
                batch, num_bytes, began = {}, 0, clock()
            elif (took := clock() - began) >= SLICE_SECONDS:
                await asyncio.sleep(rest * took)
                began = clock()
        raise Mismatch("the capture has no manifest")

    # -- trims --------------------------------------------------------------------------------------------

    async def trim(self) -> None:
        """Trim what is old, told by two snapshots, and read by every reader. Raises `LogUnavailable`."""
        through = self._older or 0
        for reader in self._readers:
            needed = await reader()
            through = through if needed is None else min(through, needed)
        first = await self._log.first_position()
        through = min(through, await self._old_through(first, through))
        if through < first:
            return
        streams = frozenset(self.tracker.contexts.stream_versions)
        async with self._busy:
            while (now_first := await self._log.trim(through, streams)) != first:
                first = now_first
        self.first_position = first

    async def _old_through(self, first: int, through: int) -> int:
        """Position up to which every event is older than the retention, as far as `through` and a look go."""
        until_ns = self.tracker.clock.now_ns() - int(self.tracker.retention_seconds * 1e9)
        self._old = max(self._old, first - 1)
        if self._old >= through or self._next_ns > until_ns:
            return self._old
        stop = min(through, self._old + EVENTS_PER_LOOK)
        async for recorded in self._log.read_all(self._old):
            if recorded.event.at_ns > until_ns:
                self._next_ns = recorded.event.at_ns
                break
            self._old = recorded.position
            if self._old >= stop:
                break
        return self._old


def _readable(snapshot: StoredSnapshot) -> bool:
    try:
        read_manifest(snapshot)
    except Unreadable:
        return False
    return True
