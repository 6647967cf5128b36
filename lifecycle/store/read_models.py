"""The read models: rows that events write, and the position up to which they tell, in one transaction.

The position in the database is the truth. Events at or below it are passed over, so it does not matter how
often they come or who brings them: two writers take turns by the lock on the one row that holds it. A batch
that would leave a gap is refused.
"""

from collections import defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from contextlib import asynccontextmanager
from typing import Any, NamedTuple, Self

from sqlalchemy import ColumnElement, Row, Table, and_, bindparam, delete, func, select, update
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine

from lifecycle.core.events import RecordedEvent
from lifecycle.errors import CorruptLog, LogUnavailable, ReadModelsUnavailable
from lifecycle.ports import EventLog
from lifecycle.projections.read_rows import KEYS, Change, changes, merged
from lifecycle.store.read_model_database import naming_failures, open_read_model_database, place_of
from lifecycle.store.read_model_tables import ROWS, metadata, status

PAGE = 100
"""Events that are written at once: about 3 ms in which nobody else on the event loop gets a turn."""

Progress = Callable[[int], Awaitable[None]]
"""Hears the position that a rebuild has reached, and may hold it up."""

_NAME = "operator"


class Status(NamedTuple):
    """How far the rows tell, of which log, what is wrong with them, and whether only a rebuild mends it."""

    log_id: str
    position: int
    stale: str
    rebuild: bool


class Rebuilt(NamedTuple):
    """What a rebuild did. Rows that began before `first_position` cannot be made again: `kept` stay."""

    num_events: int
    position: int
    first_position: int
    kept: int


class ReadModels:
    """Rows about one log in one database. Several processes may have it open."""

    def __init__(self, engine: AsyncEngine) -> None:
        self._engine = engine

    @classmethod
    async def open(cls, url: str, timeout_s: float = 5.0) -> Self:
        """The read models at `url`. Raises as `open_read_model_database`."""
        return cls(await open_read_model_database(url, timeout_s))

    @property
    def place(self) -> str:
        """Where they lie, in words without a password."""
        return place_of(self._engine.url)

    async def status(self) -> Status | None:
        """How far they tell; None if they never told of a log. Raises `ReadModelsUnavailable`."""
        async with self._transaction() as connection:
            return await _status(connection)

    async def attach(self, log_id: str) -> Status:
        """Their status, begun at position 0 where there is none.

        Raises `ReadModelsUnavailable`, also when the rows tell of another log than `log_id`: to make them
        tell of this one throws the others away, which a person must ask for.
        """
        async with self._transaction() as connection:
            await _begin(connection, log_id)
            found = await _status(connection)
        assert found is not None
        if found.log_id != log_id:
            raise ReadModelsUnavailable(
                f"the read models at {self.place} tell of another event log: give this one a database of its "
                "own, or stop whoever writes there and let `kvtether rebuild` replace its rows"
            )
        return found

    async def write(self, batch: Sequence[RecordedEvent]) -> int:
        """Take in events that follow each other, and answer the position that the rows tell up to.

        What they tell already is passed over. A batch that begins behind the next position is not taken: the
        answer is then below its first event's. Rows that were stale for what could not be read are so no
        more. Raises `ReadModelsUnavailable`, and what else the database says if the rows do not fit it.
        """
        async with self._transaction() as connection:
            found = await _status(connection)
            if found is None or found.rebuild:
                return found.position if found else 0
            news = [recorded for recorded in batch if recorded.position > found.position]
            if not news or news[0].position != found.position + 1:
                return found.position
            await _write_rows(connection, news)
            await connection.execute(update(status).values(position=news[-1].position, stale=""))
            return news[-1].position

    async def mark_stale(self, reason: str, rebuild: bool) -> None:
        """Say why the rows are not to be trusted. Raises `ReadModelsUnavailable`."""
        async with self._transaction() as connection:
            values: dict[str, Any] = {"stale": reason}
            if rebuild:
                values["rebuild"] = True
            await connection.execute(update(status).values(values))

    async def mark_current(self) -> None:
        """Nothing is left to be read, so nothing is wrong. Raises `ReadModelsUnavailable`."""
        async with self._transaction() as connection:
            await connection.execute(update(status).where(status.c.rebuild.is_(False)).values(stale=""))

    async def rebuild(self, event_log: EventLog, log_id: str, progress: Progress | None = None) -> Rebuilt:
        """Replace every row that `event_log` tells of. One transaction: until then readers see the old ones.

        Rows of another log go. Rows that began before the first event which the log still holds stay as they
        are, brought forward by the events that are left. Whoever else writes waits meanwhile. `progress`
        hears the position reached. Raises as `write`, and as the log does.
        """
        async with self._transaction() as connection:
            await connection.run_sync(metadata.create_all)
            await _begin(connection, log_id)
            found = await _status(connection)
            assert found is not None
            first = await event_log.first_position()
            kept = 0
            for table in ROWS.values():
                since = first if found.log_id == log_id else 0
                await connection.execute(delete(table).where(table.c.position >= since))
                kept += await connection.scalar(select(func.count()).select_from(table)) or 0
            position, num_events = first - 1, 0
            async for page in pages(event_log.read_all(position)):
                if page[0].position != position + 1:
                    raise LogUnavailable(
                        "the event log was trimmed while it was read; the rebuild begins anew"
                    )
                await _write_rows(connection, page)
                position, num_events = page[-1].position, num_events + len(page)
                if progress is not None:
                    await progress(position)
            values = {"log_id": log_id, "position": position, "stale": "", "rebuild": False}
            await connection.execute(update(status).values(values))
        return Rebuilt(num_events, position, first, kept)

    async def close(self) -> None:
        """Let go of the database."""
        await self._engine.dispose()

    @asynccontextmanager
    async def _transaction(self) -> AsyncIterator[AsyncConnection]:
        """A transaction. SQLite admits one at a time; in PostgreSQL the row of the status is locked first."""
        with naming_failures(self._engine.url):
            async with self._engine.begin() as connection:
                yield connection


async def pages(events: AsyncIterator[RecordedEvent]) -> AsyncIterator[list[RecordedEvent]]:
    """The same events, `PAGE` at a time; those before one that cannot be read come before the error."""
    page: list[RecordedEvent] = []
    try:
        async for recorded in events:
            page.append(recorded)
            if len(page) == PAGE:
                yield page
                page = []
    except CorruptLog:
        if page:
            yield page
        raise
    if page:
        yield page


async def _status(connection: AsyncConnection) -> Status | None:
    row: Row[Any] | None = (await connection.execute(select(status).with_for_update())).one_or_none()
    return Status(row.log_id, row.position, row.stale, row.rebuild) if row is not None else None


async def _begin(connection: AsyncConnection, log_id: str) -> None:
    values = {"name": _NAME, "log_id": log_id, "position": 0, "stale": "", "rebuild": False}
    insert = _insert(connection, status).values(values)
    await connection.execute(insert.on_conflict_do_nothing())


async def _write_rows(connection: AsyncConnection, batch: Iterable[RecordedEvent]) -> None:
    whole: dict[str, list[dict[str, Any]]] = defaultdict(list)
    partial: dict[tuple[str, tuple[str, ...]], list[dict[str, Any]]] = defaultdict(list)
    for change in merged(c for recorded in batch for c in changes(recorded)):
        if change.whole:
            whole[change.table].append(dict(change.values))
        else:
            columns = tuple(sorted(set(change.values) - set(KEYS[change.table])))
            partial[change.table, columns].append(_parameters(change))
    for name, rows in whole.items():
        insert = _insert(connection, ROWS[name])
        replaced = {c.name: insert.excluded[c.name] for c in ROWS[name].columns if c.name not in KEYS[name]}
        await connection.execute(
            insert.on_conflict_do_update(index_elements=list(KEYS[name]), set_=replaced), rows
        )
    for (name, columns), parameters in partial.items():
        table = ROWS[name]
        values = {column: bindparam(f"new_{column}", type_=table.c[column].type) for column in columns}
        await connection.execute(update(table).where(_named(table)).values(values), parameters)


def _insert(connection: AsyncConnection, table: Table) -> Any:
    """An insert that knows what to do with a row that is there: both backends say it the same way."""
    if connection.dialect.name == "postgresql":
        return postgresql.insert(table)
    return sqlite.insert(table)


def _named(table: Table) -> ColumnElement[bool]:
    return and_(*(table.c[name] == bindparam(f"key_{name}") for name in KEYS[table.name]))


def _parameters(change: Change) -> dict[str, Any]:
    keys = KEYS[change.table]
    return {f"key_{n}" if n in keys else f"new_{n}": value for n, value in change.values.items()}
