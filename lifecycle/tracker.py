"""The only writer of a process: observation in, decided, appended, applied. Everything else reads.

One context is decided by one task at a time; different contexts go on side by side. An append that loses
against another writer is decided again on what that writer wrote. When the log cannot take events, the
observations wait in memory in their order, and `degraded` says so: as long as it does, nothing is reclaimed.
"""

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from functools import partial
from weakref import WeakValueDictionary

import msgspec
import structlog

from lifecycle.core.decide import decide, open_context
from lifecycle.core.events import Event, NamespaceEvent, RecordedEvent, UntrackedForwarded
from lifecycle.core.ids import ContextKey, Namespace, context_stream
from lifecycle.core.observations import (
    CallArrival,
    CloseRequested,
    ContextOpened,
    Observation,
    Tick,
)
from lifecycle.core.state import ContextState
from lifecycle.deadlines import Deadlines
from lifecycle.errors import CorruptLog, LogUnavailable, UnknownContext, VersionConflict
from lifecycle.ports import Clock, EventLog, SnapshotStore
from lifecycle.projections.contexts import RETENTION_SECONDS, Contexts
from lifecycle.snapshots import Manifest, newest_usable

log = structlog.get_logger(__name__)

NUM_CONFLICTS_BORNE = 16
"""Lost appends in a row after which a writer gives up: somebody else owns the stream."""

NUM_TURNS_BORNE = 8
"""Turns of the event loop for which a batch waits for an earlier one of ours that landed with it: a log may
tell its callers in another order. After that the missing one is read from the log."""

UNTRACKED_INTERVAL_NS = 60 * 10**9

FLUSH_SECONDS = 0.2
"""Pause between attempts to record what waits, at an end."""

MAX_WAITING = 10_000
"""Observations that may wait in memory for the log to come back."""


class Tracker:
    """Owns the state. `listeners` are called, on the event loop, with every batch that became true."""

    def __init__(
        self,
        event_log: EventLog,
        clock: Clock,
        retention_seconds: float = RETENTION_SECONDS,
        keep_recurring_seconds: float = 0.0,
        name: str = "",
    ) -> None:
        self._empty_books = partial(Contexts, retention_seconds, keep_recurring_seconds)
        self.contexts = self._empty_books()
        self.clock = clock
        self.name = name
        """Of this process: the calls it takes in are recorded under it."""
        self.shared = False
        """Whether other processes write to the log, too."""
        self.listeners: list[Callable[[Sequence[RecordedEvent]], None]] = []
        self.own_listeners: list[Callable[[Sequence[RecordedEvent]], None]] = []
        """Called with what this process recorded, once it is in the books: for who counts everything once."""
        self._torn = ""
        self._log = event_log
        # Weak: a lock lives as long as somebody holds it or waits for it.
        self._locks: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
        self._apply_lock = asyncio.Lock()
        self._landed: dict[int, Sequence[RecordedEvent]] = {}
        self._deadlines = Deadlines()
        self._waiting: deque[tuple[str, Observation]] = deque()
        self._untracked: dict[Namespace, str] = {}
        self.num_opening = 0
        """Contexts that wait for the log to begin."""
        self._doubtful: dict[str, tuple[Observation, int, Sequence[Event]]] = {}
        """By stream: the last append of which nobody knows whether it was recorded."""
        self._unread = True
        self.read = asyncio.Event()
        """Set when the books tell what the log tells."""
        self.retention_seconds = retention_seconds
        self._began_with: Manifest | None = None
        self.arriving: dict[object, tuple[Namespace, int]] = {}
        """Calls that were forwarded and are not in the books yet, and since when: they may need any chunk."""
        self._applying = asyncio.Event()
        self._applying.set()
        self.cut_off: dict[tuple[Namespace, bytes], int] = {}
        """Chunks behind ours that were computed when their call was cut off, and since when they wait for a
        proof: a process of this log ended, or a client hung up."""

    @property
    def degraded(self) -> str:
        """Why the books may lag behind what happened; empty when they do not."""
        if self._unread:
            return "the event log has not been read yet"
        if self._torn:
            return self._torn
        return f"{self.num_waiting} observations wait for the event log" if self.num_waiting else ""

    @property
    def num_waiting(self) -> int:
        """Observations that wait for the log."""
        return len(self._waiting) + len(self._untracked) + self.num_opening

    @property
    def oldest_waiting_ns(self) -> int:
        """When the one was made that waits longest, 0 if none does."""
        return self._waiting[0][1].at_ns if self._waiting else 0

    def oldest_arriving_ns(self, namespace: Namespace) -> int | None:
        """Since when a call is under way to this cache that the books do not know yet; None if none is."""
        since = [at for other, at in self.arriving.values() if other.cache == namespace.cache]
        return min(since, default=None)

    async def start(self, snapshots: SnapshotStore | None = None) -> Manifest | None:
        """Rebuild what is true from the newest snapshot that can be read, if any, and the log behind it.

        Answers the snapshot's manifest. Raises `CorruptLog`, also where the log was trimmed and no snapshot
        says what was there before, and `LogUnavailable`: then try again.
        """
        first = await self._log.first_position()
        if snapshots is not None and not self.contexts.position:
            head = await self._log.head()
            usable = await newest_usable(snapshots, first, head, self._empty_books)
            if usable is not None:
                self.contexts, self._began_with = usable
        if self.contexts.position < first - 1:
            raise CorruptLog(
                f"the event log begins at position {first}, what was before it was trimmed, and no snapshot "
                "that tells of it can be read"
            )
        await self.contexts.rebuild(self._log.read_all(self.contexts.position))
        self._unread = False
        self.read.set()
        return self._began_with

    @asynccontextmanager
    async def at_rest(self) -> AsyncIterator[Contexts]:
        """The books, unchanged as long as the block runs: what lands meanwhile is applied after it."""
        async with self._apply_lock:
            self._applying.clear()
            try:
                yield self.contexts
            finally:
                self._applying.set()

    async def open(self, observation: ContextOpened, parent: ContextKey | None) -> ContextState:
        """Begin a context, or answer the one that is there. Raises `LogUnavailable`."""
        key = ContextKey(observation.tenant, observation.context_id)
        async with self._lock(f"name {key}"):
            stream = context_stream(observation.uid)
            for _ in range(NUM_CONFLICTS_BORNE):
                known = self.contexts.find(key, observation.namespace)
                if known is None and self.shared:
                    await self.catch_up()
                    known = self.contexts.find(key, observation.namespace)
                if known is not None:
                    return known
                parent_state = self.contexts.find(parent, observation.namespace) if parent else None
                try:
                    await self._append_once(stream, open_context(observation, parent_state))
                except VersionConflict:
                    # It may be there already: an append whose answer was lost, and which is made again.
                    await self.catch_up()
                else:
                    break
            else:
                raise LogUnavailable(f"stream {stream!r} is written by somebody else all the time")
            named = self.contexts.find(key, observation.namespace)
        if named is None or named.uid == observation.uid:
            return self.contexts.states[observation.uid]
        # Another process gave the name away at the same time, and before us.
        reason = "its name was taken at the same time"
        await self.observe(observation.uid, CloseRequested(at_ns=observation.at_ns, reason=reason))
        return named

    async def observe(self, uid: str, observation: Observation) -> Sequence[RecordedEvent]:
        """Decide and record. Empty when nothing follows, or when the log is away and the observation waits.

        Raises `UnknownContext` and whatever `decide` raises for what cannot be true.
        """
        if isinstance(observation, CallArrival):
            observation = msgspec.structs.replace(observation, proxy=self.name)
        async with self._lock(uid):
            if self._waiting:
                self._wait(uid, observation)
                return ()
            try:
                return await self._decide_and_append(uid, observation)
            except LogUnavailable as error:
                log.warning("event log unavailable", error=str(error))
                self._wait(uid, observation)
                return ()

    async def record(self, namespace: Namespace, events: Sequence[NamespaceEvent]) -> None:
        """Record facts of a KV namespace. Raises `LogUnavailable`: then they are not true yet."""
        async with self._lock(namespace.stream()):
            await self._append(namespace.stream(), events)

    async def untracked(self, namespace: Namespace, reason: str) -> None:
        """Inference goes to this namespace without being tracked; recorded at most once a minute."""
        last = self.contexts.index.last_untracked_ns(namespace)
        now = self.clock.now_ns()
        if namespace in self._untracked or (last is not None and now - last < UNTRACKED_INTERVAL_NS):
            return
        self._untracked[namespace] = reason
        await self._record_untracked()

    async def retry_waiting(self) -> None:
        """Record what waited for the log, in order; what still fails goes on waiting.

        What turns out to be impossible is dropped, and its namespace counts as used by somebody untracked.
        """
        await self._record_untracked()
        while self._waiting:
            uid, observation = self._waiting[0]
            async with self._lock(uid):
                try:
                    await self._decide_and_append(uid, observation)
                except LogUnavailable:
                    return
                except Exception as error:
                    log.exception("an observation that waited is dropped", uid=uid)
                    self._give_up_on(uid, f"an observation was dropped: {type(error).__name__}")
                self._doubtful.pop(context_stream(uid), None)
                self._waiting.popleft()
        await self._record_untracked()

    async def flushed(self) -> None:
        """Until nothing waits for the log any more; a log that was never read takes nothing."""
        while not self._unread and (self._waiting or self._untracked):
            await self.retry_waiting()
            await asyncio.sleep(FLUSH_SECONDS if self.degraded else 0)

    async def tick(self) -> None:
        """Let time pass where a deadline is over; it stands still while the log is away."""
        if self._waiting:
            return
        now = self.clock.now_ns()
        for uid in await self._deadlines.due(self.contexts.states, now):
            with suppress(UnknownContext):
                await self.observe(uid, Tick(at_ns=now))

    def rest(self) -> None:
        """Time is another process' to let pass: nothing is kept for it."""
        self._deadlines = Deadlines()

    async def _record_untracked(self) -> None:
        for namespace, reason in list(self._untracked.items()):
            event = UntrackedForwarded(at_ns=self.clock.now_ns(), namespace=namespace, reason=reason)
            try:
                await self.record(namespace, [event])
            except LogUnavailable as error:
                log.warning("event log unavailable", error=str(error))
                return
            self._untracked.pop(namespace, None)

    async def _decide_and_append(self, uid: str, observation: Observation) -> Sequence[RecordedEvent]:
        stream = context_stream(uid)
        for _ in range(NUM_CONFLICTS_BORNE):
            if (landed := await self._landed_after_all(stream, observation)) is not None:
                return landed
            state = self.contexts.states.get(uid)
            if state is None:
                raise UnknownContext(uid)
            events = decide(state, observation)
            if not events:
                return ()
            version = self.contexts.version_of(stream)
            try:
                return await self._append_once(stream, events)
            except VersionConflict:
                await self.catch_up()
            except LogUnavailable:
                self._doubtful[stream] = (observation, version, events)
                raise
        raise LogUnavailable(f"stream {stream!r} is written by somebody else all the time")

    async def _landed_after_all(
        self, stream: str, observation: Observation
    ) -> Sequence[RecordedEvent] | None:
        """What an append recorded whose answer was lost; None if it recorded nothing.

        Deciding anew would make another attempt of the same call.
        """
        doubtful = self._doubtful.get(stream)
        if doubtful is None or doubtful[0] is not observation:
            return None
        _, version, events = doubtful
        found = [r async for r in self._log.read_stream(stream, version)][: len(events)]
        if [r.event for r in found] != list(events):
            return None
        await self.catch_up()
        del self._doubtful[stream]
        _tell(self.own_listeners, found)
        return found

    async def _append(self, stream: str, events: Sequence[Event]) -> None:
        for _ in range(NUM_CONFLICTS_BORNE):
            try:
                await self._append_once(stream, events)
            except VersionConflict:
                await self.catch_up()
            else:
                return
        raise LogUnavailable(f"stream {stream!r} is written by somebody else all the time")

    async def _append_once(self, stream: str, events: Sequence[Event]) -> Sequence[RecordedEvent]:
        """Append, then apply in the order of positions: a later batch waits for the earlier one."""
        recorded = await self._log.append(stream, events, self.contexts.version_of(stream))
        if not recorded:
            return recorded
        self._landed[recorded[0].position] = recorded
        await self._until_applied(recorded[-1].position)
        _tell(self.own_listeners, recorded)
        return recorded

    async def _until_applied(self, position: int) -> None:
        for _ in range(NUM_TURNS_BORNE):
            await self._applying.wait()
            self._apply_landed()
            if position <= self.contexts.position:
                return
            await asyncio.sleep(0)
        await self.catch_up(position)

    def _apply_landed(self) -> None:
        while (batch := self._landed.pop(self.contexts.position + 1, None)) is not None:
            self._apply(batch)

    async def catch_up(self, until: int | None = None) -> None:
        """Apply everything that landed since, ours and others', or at least what landed up to `until`.

        Raises `LogUnavailable` and `CorruptLog`.
        """
        async with self._apply_lock:
            begun = self.contexts.position
            if until is not None and begun >= until:
                return
            batch = [r async for r in self._log.read_all(begun)]
            if batch and batch[0].position != begun + 1:
                self._torn = (
                    f"the log was trimmed beyond event {begun}, which this proxy read last: restart it"
                )
                raise CorruptLog(self._torn)
            self._apply([r for r in batch if r.position > self.contexts.position])
            self._landed = {p: b for p, b in self._landed.items() if p > self.contexts.position}

    def _apply(self, batch: Sequence[RecordedEvent]) -> None:
        for recorded in batch:
            self.contexts.apply(recorded)
        if batch:
            _tell(self.listeners, batch)

    def _wait(self, uid: str, observation: Observation) -> None:
        if len(self._waiting) >= MAX_WAITING:
            self._give_up_on(uid, "observations were lost while the event log was unavailable")
        else:
            self._waiting.append((uid, observation))

    def _give_up_on(self, uid: str, reason: str) -> None:
        """Something about this context will never be known: its namespace is not ours alone for a while."""
        state = self.contexts.states.get(uid)
        if state is not None:
            self._untracked.setdefault(state.namespace, reason)

    def _lock(self, name: str) -> asyncio.Lock:
        lock = self._locks.get(name)
        if lock is None:
            lock = self._locks[name] = asyncio.Lock()
        return lock


def _tell(
    listeners: Sequence[Callable[[Sequence[RecordedEvent]], None]], batch: Sequence[RecordedEvent]
) -> None:
    for listener in list(listeners):
        try:
            listener(batch)
        except Exception:
            log.exception("a listener failed")
