"""An event log that may be opened later than those who write to it begin."""

from collections.abc import AsyncIterator, Collection, Sequence

from lifecycle.core.events import Event, RecordedEvent
from lifecycle.errors import LogUnavailable
from lifecycle.ports import EventLog


class LateEventLog:
    """The `EventLog` of a process that starts before its log can be opened.

    Closed at first: everything raises `LogUnavailable`. `open_for_reading` gives it the log, so that what is
    true can be rebuilt; it takes events only after `open_for_writing`, for whoever writes must know first
    what is there. Closing it closes the log.
    """

    def __init__(self) -> None:
        self.reason = "the event log has not been opened yet"
        self._inner: EventLog | None = None
        self._writable = False

    def open_for_reading(self, inner: EventLog) -> None:
        """Read from `inner` from now on."""
        self._inner = inner

    def open_for_writing(self) -> None:
        """Take events from now on."""
        self._writable = True

    async def append(
        self, stream: str, events: Sequence[Event], expected_version: int
    ) -> Sequence[RecordedEvent]:
        """Record, once the log takes events."""
        if not self._writable:
            raise LogUnavailable(self.reason)
        return await self._opened().append(stream, events, expected_version)

    def read_stream(self, stream: str, after_version: int = 0) -> AsyncIterator[RecordedEvent]:
        """Events of one stream."""
        return self._opened().read_stream(stream, after_version)

    def read_all(self, after_position: int = 0) -> AsyncIterator[RecordedEvent]:
        """Events of all streams."""
        return self._opened().read_all(after_position)

    async def head(self) -> int:
        """Position of the last event."""
        return await self._opened().head()

    async def first_position(self) -> int:
        """Position of the first event that was not trimmed."""
        return await self._opened().first_position()

    async def trim(self, through: int, streams: Collection[str]) -> int:
        """Forget the oldest events."""
        if not self._writable:
            raise LogUnavailable(self.reason)
        return await self._opened().trim(through, streams)

    async def close(self) -> None:
        """Close what was opened; then nothing is read or taken any more."""
        inner, self._inner = self._inner, None
        if inner is not None:
            await inner.close()

    def _opened(self) -> EventLog:
        if self._inner is None:
            raise LogUnavailable(self.reason)
        return self._inner
