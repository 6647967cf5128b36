"""The event log in memory: nothing survives the process."""

from collections.abc import AsyncIterator, Collection, Sequence

from lifecycle.core.events import Event, RecordedEvent
from lifecycle.errors import LogUnavailable, VersionConflict
from lifecycle.store.codec import check_stream, decode, encode


class _Stream:
    """Positions of a stream's events behind the `trimmed` first ones."""

    def __init__(self) -> None:
        self.positions: list[int] = []
        self.trimmed = 0

    @property
    def version(self) -> int:
        """Of the last event, trimmed or not."""
        return self.trimmed + len(self.positions)


class MemoryEventLog:
    """The `EventLog` of tests and of a proxy that is told to forget.

    Events are kept encoded, so that what is read back is what a durable log would give back, and what a
    durable log would refuse is refused here. One thread, one event loop.
    """

    def __init__(self) -> None:
        self._log: list[tuple[str, int, bytes]] = []
        self._first = 1
        self._streams: dict[str, _Stream] = {}
        self._closed = False

    async def append(
        self, stream: str, events: Sequence[Event], expected_version: int
    ) -> Sequence[RecordedEvent]:
        """Record `events` behind `expected_version`, all or none. Raises as the port says."""
        self._check_open()
        check_stream(stream)
        payloads = [encode(event) for event in events]
        if not payloads:
            return ()
        there = self._streams.get(stream) or _Stream()
        if there.version != expected_version:
            raise VersionConflict(stream, expected_version, there.version)
        self._streams[stream] = there
        recorded = []
        for event, payload in zip(events, payloads, strict=True):
            self._log.append((stream, there.version + 1, payload))
            there.positions.append(self._head)
            recorded.append(RecordedEvent(stream, there.version, self._head, event))
        return tuple(recorded)

    async def read_stream(self, stream: str, after_version: int = 0) -> AsyncIterator[RecordedEvent]:
        """Events of one stream up to what it held when the read began."""
        self._check_open()
        there = self._streams.get(stream) or _Stream()
        for position in there.positions[max(after_version - there.trimmed, 0) :]:
            if position >= self._first:
                yield self._recorded(position)

    async def read_all(self, after_position: int = 0) -> AsyncIterator[RecordedEvent]:
        """Events of all streams up to what the log held when the read began."""
        self._check_open()
        for position in range(max(after_position + 1, self._first), self._head + 1):
            if position >= self._first:
                yield self._recorded(position)

    async def head(self) -> int:
        """Position of the last event ever recorded, 0 if there was none."""
        self._check_open()
        return self._head

    async def first_position(self) -> int:
        """Position of the first event that was not trimmed, or that will be the first."""
        self._check_open()
        return self._first

    async def trim(self, through: int, streams: Collection[str]) -> int:
        """Forget events at and below position `through`."""
        self._check_open()
        num_trimmed = max(min(through, self._head) - self._first + 1, 0)
        for stream, _, _ in self._log[:num_trimmed]:
            self._streams[stream].trimmed += 1
        del self._log[:num_trimmed]
        self._first += num_trimmed
        for stream, there in list(self._streams.items()):
            there.positions = [p for p in there.positions if p >= self._first]
            if not there.positions and stream not in streams:
                del self._streams[stream]
        return self._first

    async def close(self) -> None:
        """Forget nothing, but take and give no more."""
        self._closed = True

    @property
    def _head(self) -> int:
        return self._first - 1 + len(self._log)

    def _recorded(self, position: int) -> RecordedEvent:
        stream, version, payload = self._log[position - self._first]
        return RecordedEvent(stream, version, position, decode(payload))

    def _check_open(self) -> None:
        if self._closed:
            raise LogUnavailable("the event log is closed")
