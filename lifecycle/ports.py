"""What the domain needs from the outside, as Protocols. Adapters live in `store/` and `engine_bridge/`."""

from collections.abc import AsyncIterator, Callable, Collection, Mapping, Sequence
from typing import Protocol

import msgspec

from lifecycle.core.directives import Directive, DirectiveResult
from lifecycle.core.events import Event, RecordedEvent
from lifecycle.core.ids import Namespace
from lifecycle.vocabulary import Tier


class Clock(Protocol):
    """Wall clock in nanoseconds since the epoch."""

    def now_ns(self) -> int: ...


class IdSource(Protocol):
    """Fresh, unguessable identifiers; `prefix` says of what."""

    def new(self, prefix: str) -> str: ...


class EventLog(Protocol):
    """Ordered, append-only. One stream a context, one a KV namespace.

    `append` is all or nothing and durable when it returns. It raises `VersionConflict` when
    `expected_version` is not the stream's last version (0 for a new stream), `LogUnavailable` when the
    store cannot take it. Reads raise `CorruptLog` for what cannot be decoded and for what is missing.

    The oldest events may be trimmed. A read that asks for them, or that a trim overtakes, goes on with the
    first one that is left: whoever must not miss any compares positions, and `first_position` beforehand.
    """

    async def append(
        self, stream: str, events: Sequence[Event], expected_version: int
    ) -> Sequence[RecordedEvent]: ...

    def read_stream(self, stream: str, after_version: int = 0) -> AsyncIterator[RecordedEvent]: ...

    def read_all(self, after_position: int = 0) -> AsyncIterator[RecordedEvent]: ...

    async def head(self) -> int:
        """Position of the last event ever recorded, 0 if there was none."""
        ...

    async def first_position(self) -> int:
        """Position of the first event that was not trimmed, or that will be the first: 1 in a new log."""
        ...

    async def trim(self, through: int, streams: Collection[str]) -> int:
        """Forget events at and below position `through`, oldest first; answers the new `first_position`.

        It may stop before `through`, to hold nobody up and to keep a batch whole: call it again until the
        answer stays. Each step is whole or does not happen. `streams` are those that go on: of them the
        version is kept even if all their events are gone, any other then counts as new.
        """
        ...

    async def close(self) -> None: ...


class StoredSnapshot(msgspec.Struct, frozen=True):
    """A snapshot of the books at a position of the log. What `manifest` says is not the store's business."""

    position: int
    manifest: bytes


class SnapshotStore(Protocol):
    """Snapshots beside an event log, as durable as it: a manifest each, and parts that several may share.

    One process writes at a time. Everything raises `LogUnavailable`; what was damaged is told by whoever
    reads the content.
    """

    async def put(self, parts: Mapping[str, bytes]) -> None:
        """Keep parts, each in the place of what has its name. They stay until a `commit` leaves them out."""
        ...

    async def commit(self, snapshot: StoredSnapshot, previous: int | None, parts: Collection[str]) -> None:
        """Make it the newest snapshot, and forget all but it and the one at position `previous`.

        `parts` are the names of both. Whole or not at all: until then the older ones stay as they are.
        """
        ...

    async def newest_first(self) -> Sequence[StoredSnapshot]:
        """Every snapshot, the one of the highest position first."""
        ...

    async def parts(self, names: Sequence[str]) -> Mapping[str, bytes]:
        """Content by name; what is not there is left out."""
        ...


class Ownership(Protocol):
    """Which of the processes on one log tells the cache what to do: one at a time, under a lease.

    The log refuses what only the owner may record (`Deposed`) from whoever does not own it any more.
    """

    @property
    def shared(self) -> bool:
        """Whether other processes may write to the log, too."""
        ...

    @property
    def lease_seconds(self) -> float:
        """How long an owner that is not heard of stays the owner, and a process counts as alive."""
        ...

    @property
    def holds(self) -> bool:
        """Whether this process is the owner, certainly and at this moment."""
        ...

    @property
    def owner(self) -> str:
        """Name of the owner as it was last heard, empty while there is none."""
        ...

    async def beat(self) -> None:
        """Say that this process lives; take the lease if it is free, keep it if it is ours.

        Raises `LogUnavailable`.
        """
        ...

    async def news(self, position: int) -> int:
        """Wait for events behind `position`, for about a second at most; answers the last one's position.

        Raises `LogUnavailable`.
        """
        ...

    async def silent(self, names: Collection[str]) -> frozenset[str]:
        """Which of these processes have not said for a lease's time that they live."""
        ...

    async def resign(self) -> None:
        """Let somebody else own the log; this process never will again. It goes on living."""
        ...

    async def leave(self) -> None:
        """Say that this process ends, and let go. Never raises."""
        ...


class Presence(msgspec.Struct, frozen=True):
    """Where one chunk lies, by the cache's own word. All ranks, groups and instances must hold it."""

    key: bytes
    tiers: frozenset[Tier]


class CacheCapabilities(msgspec.Struct, frozen=True, kw_only=True):
    """What a driver can execute, by directive name, and why it cannot execute the rest."""

    driver: str
    level: int
    supported: frozenset[str]
    unsupported: dict[str, str]


class SelfTest(msgspec.Struct, frozen=True, kw_only=True):
    """Result of the start-up test. `ok` False means observe only; each problem says what to do about it."""

    ok: bool
    problems: tuple[str, ...] = ()
    chunk_size: int = 0
    bytes_per_token: int = 0


class CacheControl(Protocol):
    """The narrow door to a KV cache. Only what a driver reports is true of the cache.

    `execute` never raises for what the cache did: it answers with an outcome. `still_dead` is asked right
    before each delete, so that a chunk that may be in use since the decision is left alone.
    `token_ids` gives the tokens of a chain to drivers whose cache addresses by token; None if unknown.
    """

    @property
    def capabilities(self) -> CacheCapabilities: ...

    async def self_test(self) -> SelfTest: ...

    async def locate(self, namespace: Namespace, keys: Sequence[bytes]) -> Sequence[Presence]:
        """Which tiers hold each key, in the order asked. Raises `CacheUnavailable`."""
        ...

    async def execute(
        self,
        directive: Directive,
        still_dead: Callable[[bytes], bool],
        token_ids: Callable[[], Sequence[int] | None],
    ) -> DirectiveResult: ...

    async def release_all(self) -> int:
        """Give back every hold of ours, also those of an earlier run; answers how many."""
        ...

    async def close(self) -> None: ...
