"""The embedded database: how it is opened and brought to the current schema, how its failures are named."""

import asyncio
import os
import sqlite3
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

from alembic import command
from alembic.config import Config
from alembic.runtime.migration import MigrationContext
from alembic.script import ScriptDirectory
from sqlalchemy import Connection, Engine, create_engine, event, exc
from sqlalchemy.engine import URL, make_url
from sqlalchemy.ext.asyncio import AsyncEngine, create_async_engine

import migrations
from lifecycle.errors import CorruptLog, LogUnavailable
from lifecycle.store.tables import metadata

WAL_PAUSE_SECONDS = 0.01

_DAMAGED = (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB)

_ADVICE = {
    sqlite3.SQLITE_FULL: "no room is left on its disk",
    sqlite3.SQLITE_BUSY: "another process holds it locked",
    sqlite3.SQLITE_READONLY: "it may not be written to",
    sqlite3.SQLITE_CANTOPEN: "its directory does not exist or is not accessible",
    sqlite3.SQLITE_IOERR: "reading or writing its file failed",
}


async def open_database(url: str, busy_timeout_s: float = 5.0) -> AsyncEngine:
    """Engine on the SQLite database at `url` (`sqlite:///path`), created if absent, at the current schema.

    Every commit is on disk when it returns (WAL, synchronous FULL). Connections are in autocommit: a lone
    statement reads one snapshot and holds no lock after it; a writer says `BEGIN IMMEDIATE`. The file holds
    secrets and is made readable by its owner alone. Several processes may open it at once.

    Raises `ValueError` for another kind of URL, `LogUnavailable` when the database cannot be opened or
    belongs to a newer version, `CorruptLog` when the file is no database.
    """
    parsed = make_url(url)
    if parsed.get_backend_name() != "sqlite" or parsed.database in (None, "", ":memory:"):
        raise ValueError(f"the event log needs a URL like sqlite:///path/to/file.db, not {url!r}")
    parsed = parsed.set(drivername="sqlite+aiosqlite")
    make_private(parsed)
    engine = create_async_engine(parsed, **_options(busy_timeout_s))
    event.listen(engine.sync_engine, "connect", _prepare)
    try:
        with naming_failures(parsed):
            await asyncio.to_thread(_use_wal, str(parsed.database), busy_timeout_s)
            async with engine.connect() as connection:
                if await connection.run_sync(_needs_migration):
                    await connection.exec_driver_sql("BEGIN IMMEDIATE")
                    await connection.run_sync(_upgrade)
                    await connection.commit()
    except BaseException:
        await engine.dispose()
        raise
    return engine


def blocking_engine(url: URL, busy_timeout_s: float) -> Engine:
    """Engine for one thread on a database that `open_database` has opened."""
    engine = create_engine(url.set(drivername="sqlite+pysqlite"), **_options(busy_timeout_s))
    event.listen(engine, "connect", _prepare)
    return engine


@contextmanager
def naming_failures(url: URL) -> Iterator[None]:
    """Turn the driver's errors into `CorruptLog` and `LogUnavailable`, with what a person can do about it."""
    try:
        yield
    except exc.DBAPIError as error:
        raise _named(error.orig, url) from error
    except sqlite3.Error as error:
        raise _named(error, url) from error


def schema_config(connection: Connection) -> Config:
    """Alembic's configuration for running revisions on this connection, in its caller's transaction."""
    config = Config()
    config.set_main_option("script_location", str(Path(migrations.__file__).parent).replace("%", "%%"))
    config.attributes["connection"] = connection
    config.attributes["metadata"] = metadata
    return config


def _options(busy_timeout_s: float) -> dict[str, Any]:
    return {"isolation_level": "AUTOCOMMIT", "connect_args": {"timeout": busy_timeout_s}}


def _named(error: BaseException | None, url: URL) -> LogUnavailable | CorruptLog:
    code = getattr(error, "sqlite_errorcode", 0) & 0xFF  # the low byte is the class, the rest the detail
    if code in _DAMAGED:
        return CorruptLog(f"the database {url.database} is damaged: {error}")
    advice = f" ({_ADVICE[code]})" if code in _ADVICE else ""
    return LogUnavailable(f"the database {url.database} is unavailable: {error}{advice}")


def make_private(url: URL) -> None:
    """Create the file of a SQLite database, readable by its owner alone. Raises `LogUnavailable`."""
    if url.database is None or url.database.startswith("file:"):
        return
    try:
        os.close(os.open(url.database, os.O_CREAT | os.O_RDONLY | os.O_CLOEXEC, 0o600))
    except OSError as error:
        raise LogUnavailable(f"the database {url.database} cannot be opened: {error.strerror}") from error


def _use_wal(database: str, busy_timeout_s: float) -> None:
    """Of a file, for good. SQLite waits for other openers in everything but this, so it is waited here."""
    deadline = time.monotonic() + busy_timeout_s
    is_uri = database.startswith("file:")
    with closing(sqlite3.connect(database, busy_timeout_s, isolation_level=None, uri=is_uri)) as connection:
        while True:
            try:
                connection.execute("PRAGMA journal_mode = WAL")
            except sqlite3.OperationalError as error:
                if error.sqlite_errorcode & 0xFF != sqlite3.SQLITE_BUSY or time.monotonic() > deadline:
                    raise
                time.sleep(WAL_PAUSE_SECONDS)
            else:
                return


def _prepare(dbapi_connection: Any, _record: object) -> None:
    cursor = dbapi_connection.cursor()
    cursor.execute("PRAGMA synchronous = FULL")
    cursor.close()


def _needs_migration(connection: Connection) -> bool:
    script = ScriptDirectory.from_config(schema_config(connection))
    current = MigrationContext.configure(connection).get_current_heads()
    known = {revision.revision for revision in script.walk_revisions()}
    if newer := sorted(set(current) - known):
        raise LogUnavailable(
            f"the database {connection.engine.url.database} is at schema revision {', '.join(newer)}, which "
            "this version does not know: a newer one wrote it; run that one, or start with a new file"
        )
    return set(current) != set(script.get_heads())


def _upgrade(connection: Connection) -> None:
    if _needs_migration(connection):  # asked again under the lock: another process may have been faster
        command.upgrade(schema_config(connection), "head")
