"""The event log in memory: nothing survives the process."""

from collections.abc import AsyncIterator, Sequence

from lifecycle.core.events import Event, RecordedEvent
from lifecycle.errors import LogUnavailable, VersionConflict
from lifecycle.store.codec import check_stream, decode, encode


class MemoryEventLog:
    """The `EventLog` of tests and of a proxy that is told to forget.

    Events are kept encoded, so that what is read back is what a durable log would give back, and what a
    durable log would refuse is refused here. One thread, one event loop.
    """

    def __init__(self) -> None:
        self._log: list[tuple[str, int, bytes]] = []
        self._streams: dict[str, list[int]] = {}
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
        actual = len(self._streams.get(stream, ()))
        if actual != expected_version:
            raise VersionConflict(stream, expected_version, actual)
        positions = self._streams.setdefault(stream, [])
        recorded = []
        for event, payload in zip(events, payloads, strict=True):
            positions.append(len(self._log) + 1)
            self._log.append((stream, len(positions), payload))
            recorded.append(RecordedEvent(stream, len(positions), positions[-1], event))
        return tuple(recorded)

    async def read_stream(self, stream: str, after_version: int = 0) -> AsyncIterator[RecordedEvent]:
        """Events of one stream up to what it held when the read began."""
        self._check_open()
        for position in self._streams.get(stream, [])[max(after_version, 0) :]:
            yield self._recorded(position)

    async def read_all(self, after_position: int = 0) -> AsyncIterator[RecordedEvent]:
        """Events of all streams up to what the log held when the read began."""
        self._check_open()
        for position in range(max(after_position, 0) + 1, len(self._log) + 1):
            yield self._recorded(position)

    async def head(self) -> int:
        """Position of the last event, 0 for an empty log."""
        self._check_open()
        return len(self._log)

    async def close(self) -> None:
        """Forget nothing, but take and give no more."""
        self._closed = True

    def _recorded(self, position: int) -> RecordedEvent:
        stream, version, payload = self._log[position - 1]
        return RecordedEvent(stream, version, position, decode(payload))

    def _check_open(self) -> None:
        if self._closed:
            raise LogUnavailable("the event log is closed")
