"""Contexts that live through a tracker, as a test tool: a clock set by hand, agents, one digest of all."""

import asyncio
from collections.abc import AsyncIterator, Collection, Sequence

from lifecycle.core.digest import digest_all
from lifecycle.core.events import ChunksConfirmed, Event, RecordedEvent
from lifecycle.core.ids import ContextKey, Namespace
from lifecycle.core.observations import (
    CallArrival,
    CallEnding,
    CallMapping,
    CloseRequested,
    ContextOpened,
    FirstToken,
)
from lifecycle.core.state import ContextState
from lifecycle.ports import EventLog
from lifecycle.projections.contexts import Contexts
from lifecycle.store.memory import MemoryEventLog
from lifecycle.tracker import Tracker
from lifecycle.vocabulary import CallEnd, IdentityRung, Tier
from tests.lifecycle.core.story import NAMESPACE, NOW, SECOND, fact, keys_of, mapping_of, prompt_tokens


class ManualClock:
    """Time that passes when told."""

    def __init__(self) -> None:
        self.now = NOW

    def now_ns(self) -> int:
        return self.now

    def advance(self, seconds: float) -> None:
        self.now += int(seconds * SECOND)


class CountedIds:
    """Ids in order: `d-1`, `d-2`."""

    def __init__(self) -> None:
        self.count = 0

    def new(self, prefix: str) -> str:
        self.count += 1
        return f"{prefix}-{self.count:06}"


def books(contexts: Contexts) -> bytes:
    """Digest of everything that is true."""
    return digest_all(
        (
            contexts.states,
            contexts.stream_versions,
            contexts.directives,
            contexts.position,
            contexts.index.digest(),
        )
    )


async def replayed(log: EventLog) -> Contexts:
    """What is true by the log alone."""
    contexts = Contexts()
    await contexts.rebuild(log.read_all())
    return contexts


async def replayed_beside(tracker: Tracker, log: EventLog) -> Contexts:
    """What is true by the log of a tracker that others go on feeding, at the moment it has read as far."""
    while True:
        position, again = tracker.contexts.position, await replayed(log)
        if position == tracker.contexts.position == again.position:
            return again


def chain_of(words: str) -> bytes:
    """The run of chunk keys of a list's prompt."""
    return b"".join(keys_of([t for part in prompt_tokens(words.split()) for t in part]))


class Agent:
    """One context and what its data path would observe."""

    def __init__(self, tracker: Tracker, uid: str, name: str = "", namespace: Namespace = NAMESPACE) -> None:
        self.tracker = tracker
        self.uid = uid
        self.name = name or f"name of {uid}"
        self.namespace = namespace

    @property
    def state(self) -> ContextState:
        return self.tracker.contexts.states[self.uid]

    @property
    def now(self) -> int:
        return self.tracker.clock.now_ns()

    async def open(self, parent: "Agent | None" = None, one_off: bool = False) -> ContextState:
        """Open, or fork of `parent`. Where the name is known already, this agent is that context."""
        state = await self.tracker.open(
            ContextOpened(
                at_ns=self.now,
                uid=self.uid,
                tenant="t",
                context_id=self.name,
                namespace=self.namespace,
                rung=IdentityRung.EXPLICIT,
                fork=parent is not None,
                one_off=one_off,
            ),
            ContextKey("t", parent.name) if parent else None,
        )
        self.uid = state.uid
        return state

    async def arrive(self, words: str, call: str = "c1", num_choices: int = 1) -> Sequence[RecordedEvent]:
        return await self.tracker.observe(
            self.uid,
            CallArrival(
                at_ns=self.now,
                call_id=call,
                head=b"head",
                messages=tuple(fact(w) for w in words.split()),
                num_choices=num_choices,
            ),
        )

    async def map(self, words: str, call: str = "c1", attempt: int = 1) -> Sequence[RecordedEvent]:
        return await self.tracker.observe(
            self.uid,
            CallMapping(at_ns=self.now, call_id=call, attempt=attempt, mapping=mapping_of(words.split())),
        )

    async def first(self, call: str = "c1", attempt: int = 1) -> Sequence[RecordedEvent]:
        return await self.tracker.observe(self.uid, FirstToken(at_ns=self.now, call_id=call, attempt=attempt))

    async def end(
        self, call: str = "c1", attempt: int = 1, how: CallEnd = CallEnd.COMPLETED
    ) -> Sequence[RecordedEvent]:
        return await self.tracker.observe(
            self.uid, CallEnding(at_ns=self.now, call_id=call, attempt=attempt, end=how)
        )

    async def call(self, words: str, call: str = "c1", how: CallEnd = CallEnd.COMPLETED) -> None:
        """A whole call, mapped in time."""
        await self.arrive(words, call)
        attempt = self.state.attempts[call]
        await self.map(words, call, attempt)
        if how is not CallEnd.FAILED:
            await self.first(call, attempt)
        await self.end(call, attempt, how)

    async def close(self) -> None:
        await self.tracker.observe(self.uid, CloseRequested(at_ns=self.now, reason="test"))

    async def stored(self, keys: bytes) -> None:
        """The cache shows these keys, stored during our calls."""
        event = ChunksConfirmed(
            at_ns=self.now, namespace=self.namespace, keys=keys, tiers=(Tier.L1,), stored=True
        )
        await self.tracker.record(self.namespace, [event])


class GatedLog:
    """Appends wait in front of `inner` while `gate` is clear, and are refused while `away`."""

    def __init__(self, inner: EventLog) -> None:
        self.inner = inner
        self.gate = asyncio.Event()
        self.gate.set()
        self.waiting = asyncio.Event()
        self.away: Exception | None = None
        self.appended: list[str] = []

    async def append(
        self, stream: str, events: Sequence[Event], expected_version: int
    ) -> Sequence[RecordedEvent]:
        self.waiting.set()
        await self.gate.wait()
        if self.away is not None:
            raise self.away
        self.appended += [type(event).__name__ for event in events]
        return await self.inner.append(stream, events, expected_version)

    def read_stream(self, stream: str, after_version: int = 0) -> AsyncIterator[RecordedEvent]:
        return self.inner.read_stream(stream, after_version)

    def read_all(self, after_position: int = 0) -> AsyncIterator[RecordedEvent]:
        return self.inner.read_all(after_position)

    async def head(self) -> int:
        return await self.inner.head()

    async def first_position(self) -> int:
        return await self.inner.first_position()

    async def trim(self, through: int, streams: Collection[str]) -> int:
        return await self.inner.trim(through, streams)

    async def close(self) -> None:
        await self.inner.close()


class AnswerLost(GatedLog):
    """Appends land, and `away` is all that is heard of them."""

    async def append(
        self, stream: str, events: Sequence[Event], expected_version: int
    ) -> Sequence[RecordedEvent]:
        recorded = await self.inner.append(stream, events, expected_version)
        if self.away is not None:
            self.waiting.set()
            raise self.away
        return recorded


def opened_at(clock: ManualClock, uid: str) -> ContextOpened:
    return ContextOpened(
        at_ns=clock.now_ns(),
        uid=uid,
        tenant="t",
        context_id=uid,
        namespace=NAMESPACE,
        rung=IdentityRung.EXPLICIT,
    )


async def started(log: object = None) -> tuple[Tracker, ManualClock]:
    clock = ManualClock()
    tracker = Tracker(log if log is not None else MemoryEventLog(), clock)  # type: ignore[arg-type]
    await tracker.start()
    return tracker, clock
