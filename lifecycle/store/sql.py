"""The event log in SQLite.

Writes. Appends that arrive while another is being written wait and then share one transaction and one fsync
(group commit). The transaction begins with `BEGIN IMMEDIATE`: from then on no other process can write, so the
versions read inside it are the truth, each append is judged on its own against them, and only those that pass
are inserted. `UNIQUE (stream, version)` guards the same rule against anybody who writes without asking.

Order. Positions are given out inside that transaction, and SQLite admits one writer at a time: who commits
later has the higher positions. A reader that has seen position p has therefore seen everything at or below p
that will ever be there; nothing can appear behind it.

Trims. `log_start` and `trimmed_streams` change in the transaction that deletes the events, so a reader that
finds something missing can tell what was trimmed from what was lost.
"""

import asyncio
from collections.abc import AsyncIterator, Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Self

from sqlalchemy import Row, Select, func, select
from sqlalchemy.ext.asyncio import AsyncEngine

from lifecycle.core.events import Event, RecordedEvent
from lifecycle.errors import CorruptLog, LogUnavailable, VersionConflict
from lifecycle.store.codec import check_stream, checksum, decode
from lifecycle.store.database import blocking_engine, naming_failures, open_database
from lifecycle.store.sql_writer import Batch, Outcome, SqlWriter
from lifecycle.store.tables import events as table
from lifecycle.store.tables import log_start, trimmed_streams

_PAGE = 256
"""Rows fetched at once: a reader holds no connection while its caller works on a page."""


class _Group:
    """Batches that share one transaction, and where each one's outcome appears."""

    def __init__(self) -> None:
        self.batches: list[Batch] = []
        self.outcomes: list[asyncio.Future[Outcome | LogUnavailable | CorruptLog]] = []
        self.settled = asyncio.Event()

    def join(self, batch: Batch) -> asyncio.Future[Outcome | LogUnavailable | CorruptLog]:
        """Take the batch along."""
        self.batches.append(batch)
        self.outcomes.append(asyncio.get_running_loop().create_future())
        return self.outcomes[-1]

    def settle(self, outcomes: Sequence[Outcome | LogUnavailable | CorruptLog]) -> None:
        """Tell every caller that is still there and was not told before."""
        self.settled.set()
        for future, outcome in zip(self.outcomes, outcomes, strict=True):
            if not future.done():
                future.set_result(outcome)


class SqlEventLog:
    """The durable `EventLog`; several may be open on one file, in one process or in several.

    `engine` reads, and is open to others who keep their tables in the same database; `close` disposes of it.
    A read ends at what the log held when it began, and may be abandoned at any point.
    """

    def __init__(self, engine: AsyncEngine, writer: SqlWriter) -> None:
        self.engine = engine
        self._writer = writer
        self._writing = asyncio.Lock()
        self._worker = ThreadPoolExecutor(max_workers=1, thread_name_prefix="event-log")
        self._group: _Group | None = None
        self._closed = False

    @classmethod
    async def open(cls, url: str, busy_timeout_s: float = 5.0) -> Self:
        """The log at `url` (`sqlite:///path`), created or brought to the current schema first.

        `busy_timeout_s` bounds the wait for another process's transaction. Raises as `open_database`.
        """
        engine = await open_database(url, busy_timeout_s)
        return cls(engine, SqlWriter(blocking_engine(engine.url, busy_timeout_s)))

    async def append(
        self, stream: str, events: Sequence[Event], expected_version: int
    ) -> Sequence[RecordedEvent]:
        """Record `events` behind `expected_version`, all or none; on disk when it returns.

        A caller that is cancelled meanwhile does not stop the write: it lands whole or not at all.
        Raises as the port says, `InvalidObservation` for what cannot be encoded, `CorruptLog` when the file
        is damaged.
        """
        self._check_open()
        check_stream(stream)
        batch = Batch(stream, events, expected_version)
        if not batch.events:
            return ()
        if self._group is None:
            group = self._group = _Group()
            settled = group.join(batch)
            await asyncio.shield(self._write(group))
        else:
            settled = self._group.join(batch)
        outcome = await settled
        if isinstance(outcome, VersionConflict):
            raise outcome
        if isinstance(outcome, LogUnavailable | CorruptLog):
            raise type(outcome)(str(outcome)) from outcome  # the whole group shares the one underneath
        return outcome

    async def read_stream(self, stream: str, after_version: int = 0) -> AsyncIterator[RecordedEvent]:
        """Events of one stream in order. Raises `CorruptLog` also where a version is missing."""
        check_stream(stream)
        version = max(after_version, 0)
        until = await self.head()
        query = select(table).where(table.c.stream == stream, table.c.position <= until)
        query = query.order_by(table.c.version).limit(_PAGE)
        while page := await self._fetch(query.where(table.c.version > version)):
            for row in page:
                if row.version != version + 1 and row.version > await self._trimmed_version(stream) + 1:
                    raise CorruptLog(f"stream {stream!r} lacks version {version + 1}; {row.version} is there")
                version = row.version
                yield _recorded(row)

    async def read_all(self, after_position: int = 0) -> AsyncIterator[RecordedEvent]:
        """Events of all streams by position. Raises `CorruptLog` also where a position is missing."""
        position = max(after_position, await self.first_position() - 1)
        until = await self.head()
        query = select(table).where(table.c.position <= until).order_by(table.c.position).limit(_PAGE)
        while page := await self._fetch(query.where(table.c.position > position)):
            for row in page:
                if row.position != position + 1:
                    position = max(position, await self.first_position() - 1)  # overtaken by a trim
                    if row.position > position + 1:
                        raise CorruptLog(f"position {position + 1} is missing; {row.position} is there")
                position = row.position
                yield _recorded(row)

    async def head(self) -> int:
        """Position of the last event ever recorded, 0 if there was none."""
        trimmed = select(log_start.c.trimmed_through).scalar_subquery()
        (row,) = await self._fetch(select(func.coalesce(func.max(table.c.position), trimmed, 0)))
        return int(row[0])

    async def first_position(self) -> int:
        """Position of the first event that was not trimmed, or that will be the first."""
        rows = await self._fetch(select(log_start.c.trimmed_through))
        return int(rows[0][0]) + 1 if rows else 1

    async def trim(self, through: int, streams: Collection[str]) -> int:
        """Forget events at and below position `through`, a step of them. Raises as `append` does."""
        self._check_open()
        async with self._writing:
            self._check_open()
            loop = asyncio.get_running_loop()
            return await loop.run_in_executor(self._worker, self._writer.trim, through, streams)

    async def close(self) -> None:
        """Let appends that have begun end, then let go of the file. Twice changes nothing."""
        if self._closed:
            return
        self._closed = True
        if self._group is not None:
            await self._group.settled.wait()
        async with self._writing:
            await asyncio.get_running_loop().run_in_executor(self._worker, self._writer.close)
            self._worker.shutdown(wait=False)
            await self.engine.dispose()

    async def _fetch(self, query: Select[Any]) -> Sequence[Row[Any]]:
        self._check_open()
        with naming_failures(self.engine.url):
            async with self.engine.connect() as connection:
                rows: Sequence[Row[Any]] = (await connection.execute(query)).all()
        return rows

    async def _trimmed_version(self, stream: str) -> int:
        query = select(trimmed_streams.c.version).where(trimmed_streams.c.stream == stream)
        rows = await self._fetch(query)
        return int(rows[0][0]) if rows else 0

    async def _write(self, group: _Group) -> None:
        """Write the group once the one before it is done; whoever arrives until then has joined it."""
        try:
            async with self._writing:
                self._group = None
                loop = asyncio.get_running_loop()
                group.settle(await loop.run_in_executor(self._worker, self._writer.commit, group.batches))
        except (LogUnavailable, CorruptLog) as failure:
            group.settle([failure] * len(group.outcomes))
        finally:
            if self._group is group:
                self._group = None
            lost = LogUnavailable("the event log stopped during the append: it may or may not be recorded")
            group.settle([lost] * len(group.outcomes))  # nobody is left to hear it, but for a broken loop

    def _check_open(self) -> None:
        if self._closed:
            raise LogUnavailable("the event log is closed")


def _recorded(row: Row[Any]) -> RecordedEvent:
    try:
        intact = isinstance(row.payload, bytes)
        if not intact or checksum(row.stream, row.version, row.payload) != row.checksum:
            raise CorruptLog(f"{row.type} has been altered: its checksum does not match")
        event = decode(row.payload)
    except CorruptLog as error:
        place = f"position {row.position}, stream {row.stream!r}, version {row.version}"
        raise CorruptLog(f"{place}: {error}") from error
    return RecordedEvent(row.stream, row.version, row.position, event)
