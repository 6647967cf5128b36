"""The writing side of the SQLite event log: blocking, one transaction a group, for one worker thread.

Kept off the asynchronous driver, which crosses threads three times a statement: one crossing a group makes an
append three times as fast. Appends speak to the driver itself: the general layer above took more than half
of an append's CPU time, during which the event loop waits for the interpreter.
"""

import sqlite3
from collections.abc import Collection, Iterator, Sequence
from itertools import islice
from typing import Any, TypeAlias, cast

from sqlalchemy import Engine
from sqlalchemy.pool import PoolProxiedConnection

from lifecycle.core.events import Event, RecordedEvent
from lifecycle.errors import VersionConflict
from lifecycle.store.codec import checksum, encode, tag_of
from lifecycle.store.database import naming_failures

_STREAMS_ASKED = 500
"""Streams whose versions one statement asks for; SQLite takes at most 32,766 parameters."""

_HEADS = """
WITH asked (stream) AS (VALUES {values})
SELECT
  stream,
  coalesce(
    (SELECT max(version) FROM events WHERE events.stream = asked.stream),
    (SELECT version FROM trimmed_streams WHERE trimmed_streams.stream = asked.stream),
    0
  ) AS version,
  coalesce((SELECT seq FROM sqlite_sequence WHERE name = 'events'), 0) AS last_position
FROM asked
"""
"""Last version of each stream (two index seeks at most), and the last position ever given out."""

_INSERT = """
INSERT INTO events (position, stream, version, type, at_ns, payload, checksum) VALUES (?, ?, ?, ?, ?, ?, ?)
"""

TRIM_STEP = 1_000
"""Events that one transaction trims: appends wait for it, some 10 ms."""

_BOUNDS = """
SELECT
  coalesce((SELECT trimmed_through FROM log_start), 0) AS trimmed_through,
  coalesce((SELECT seq FROM sqlite_sequence WHERE name = 'events'), 0) AS last_position
"""

_TRIM = (
    """
    INSERT INTO trimmed_streams (stream, version)
    SELECT stream, max(version) FROM events WHERE position <= ? GROUP BY stream
    ON CONFLICT (stream) DO UPDATE SET version = excluded.version
    """,
    "DELETE FROM events WHERE position <= ?",
    "INSERT INTO log_start (trimmed_through) VALUES (?)",
)

_EMPTY_STREAMS = """
SELECT stream FROM trimmed_streams
WHERE NOT EXISTS (SELECT 1 FROM events WHERE events.stream = trimmed_streams.stream)
"""

Outcome: TypeAlias = Sequence[RecordedEvent] | VersionConflict
"""What became of one batch in a group that was committed."""


class Batch:
    """Events for one stream, encoded: all of them or none. Raises `InvalidObservation`."""

    def __init__(self, stream: str, events: Sequence[Event], expected_version: int) -> None:
        self.stream = stream
        self.events = tuple(events)
        self.payloads = tuple(encode(event) for event in self.events)
        self.expected_version = expected_version

    def recorded(self, position: int) -> tuple[RecordedEvent, ...]:
        """The batch as it lies when `position` is the last one given out before it."""
        return tuple(
            RecordedEvent(self.stream, self.expected_version + i, position + i, event)
            for i, event in enumerate(self.events, start=1)
        )

    def rows(self, position: int) -> Iterator[tuple[Any, ...]]:
        """The rows of `recorded(position)`, as `_INSERT` takes them."""
        for recorded, payload in zip(self.recorded(position), self.payloads, strict=True):
            yield (
                recorded.position,
                self.stream,
                recorded.version,
                tag_of(recorded.event),
                recorded.event.at_ns,
                payload,
                checksum(self.stream, recorded.version, payload),
            )


class SqlWriter:
    """Commits groups of batches. Every method belongs to one thread and blocks it."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._held: PoolProxiedConnection | None = None

    def commit(self, group: Sequence[Batch]) -> list[Outcome]:
        """Judge each batch on its own, in order, and write those that pass; on disk when it returns.

        Raises `LogUnavailable` or `CorruptLog`; then nothing of the whole group was recorded.
        """
        try:
            with naming_failures(self._engine.url):
                return _commit(self._connection(), group)
        except BaseException:
            self._let_go()
            raise

    def trim(self, through: int, streams: Collection[str]) -> int:
        """Forget at most `TRIM_STEP` events, none above position `through`; answers the first one's position.

        The last step also forgets the versions of streams that have no events left and are not in `streams`.
        Raises `LogUnavailable` or `CorruptLog`; then nothing was forgotten.
        """
        with naming_failures(self._engine.url), self._engine.connect() as connection:
            connection.exec_driver_sql("BEGIN IMMEDIATE")
            trimmed, head = connection.exec_driver_sql(_BOUNDS).one()
            wanted = max(trimmed, min(through, head))
            last = min(wanted, trimmed + TRIM_STEP)
            if last > trimmed:
                connection.exec_driver_sql("DELETE FROM log_start")
                for statement in _TRIM:
                    connection.exec_driver_sql(statement, (last,))
            if last == wanted:
                empty = connection.exec_driver_sql(_EMPTY_STREAMS).scalars()
                over = [(stream,) for stream in empty if stream not in streams]
                if over:
                    connection.exec_driver_sql("DELETE FROM trimmed_streams WHERE stream = ?", over)
            connection.commit()
        return int(last) + 1

    def close(self) -> None:
        """Let go of the file."""
        self._let_go()
        self._engine.dispose()

    def _connection(self) -> sqlite3.Connection:
        """The driver's own connection, kept from append to append."""
        if self._held is None:
            self._held = self._engine.raw_connection()
        return cast(sqlite3.Connection, self._held.driver_connection)

    def _let_go(self) -> None:
        """Close the connection, which undoes what was not committed; the next append opens another."""
        held, self._held = self._held, None
        if held is not None:
            held.invalidate()


def _commit(connection: sqlite3.Connection, group: Sequence[Batch]) -> list[Outcome]:
    connection.execute("BEGIN IMMEDIATE")
    versions, position = _heads(connection, sorted({batch.stream for batch in group}))
    rows: list[tuple[Any, ...]] = []
    outcomes: list[Outcome] = []
    for batch in group:
        version = versions[batch.stream]
        if version != batch.expected_version:
            outcomes.append(VersionConflict(batch.stream, batch.expected_version, version))
            continue
        rows += batch.rows(position)
        outcomes.append(batch.recorded(position))
        versions[batch.stream] += len(batch.events)
        position += len(batch.events)
    if rows:
        connection.executemany(_INSERT, rows)
    connection.execute("COMMIT" if rows else "ROLLBACK")
    return outcomes


def _heads(connection: sqlite3.Connection, streams: Sequence[str]) -> tuple[dict[str, int], int]:
    versions: dict[str, int] = {}
    last_position = 0
    remaining = iter(streams)
    while asked := tuple(islice(remaining, _STREAMS_ASKED)):
        query = _HEADS.format(values=", ".join(["(?)"] * len(asked)))
        for stream, version, position in connection.execute(query, asked):
            versions[stream], last_position = version, position
    return versions, last_position
