"""What an entry of a Redis stream says: a batch in the feed, an event in a stream of the log."""

from collections.abc import Mapping
from typing import NamedTuple

from lifecycle.core.events import RecordedEvent
from lifecycle.errors import CorruptLog
from lifecycle.store.codec import checksum, decode


class Run(NamedTuple):
    """Events that stand together in a stream and in the feed. Versions and positions count from 1."""

    stream: str
    first_version: int
    first_position: int
    num_events: int

    @property
    def last_version(self) -> int:
        """Version of the last event."""
        return self.first_version + self.num_events - 1

    def part(self, start: int, at_most: int) -> "Run":
        """What follows the first `start` events, `at_most` so many."""
        num_events = min(self.num_events - start, at_most)
        return Run(self.stream, self.first_version + start, self.first_position + start, num_events)


def number(entry_id: bytes) -> int:
    """What the id counts: a version in a stream, a position in the feed."""
    return int(entry_id.partition(b"-")[0])


def feed_run(entry_id: bytes, fields: Mapping[bytes, bytes]) -> Run:
    """The batch that an entry of the feed names. Raises `CorruptLog`."""
    try:
        num_events = int(fields[b"n"])
        first_position = number(entry_id) - num_events + 1
        return Run(fields[b"s"].decode(), int(fields[b"v"]), first_position, num_events)
    except (KeyError, ValueError) as error:
        raise CorruptLog(f"entry {entry_id.decode()} of the feed is none of ours: {error!r}") from error


def recorded_event(
    stream: str, version: int, entry: tuple[bytes, Mapping[bytes, bytes]], position: int = 0
) -> RecordedEvent:
    """The event of an entry that should be `version` of its stream, at `position` if that is known.

    Raises `CorruptLog`.
    """
    entry_id, fields = entry
    place = f"stream {stream!r}, version {version}"
    if entry_id != b"%d-0" % version:
        raise CorruptLog(f"{place} is missing; entry {entry_id.decode()} is there")
    try:
        payload, there = fields[b"e"], int(fields[b"p"])
        if fields[b"c"] != b"%d" % checksum(stream, version, payload):
            raise CorruptLog("it has been altered: its checksum does not match")
        if position and there != position:
            raise CorruptLog(f"it names position {there}, the feed names {position}")
        return RecordedEvent(stream, version, there, decode(payload))
    except (KeyError, ValueError) as error:
        raise CorruptLog(f"{place} is none of ours: {error!r}") from error
    except CorruptLog as error:
        raise CorruptLog(f"{place}: {error}") from error
