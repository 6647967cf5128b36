"""The database of the read models: SQLite or PostgreSQL, at the current schema, its failures named."""

import sqlite3
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import unquote

from alembic import command
from alembic.config import Config
from alembic.runtime.migration import MigrationContext
from alembic.script import ScriptDirectory
from sqlalchemy import Connection, event, exc, text
from sqlalchemy.engine import URL, make_url
from sqlalchemy.ext.asyncio import AsyncEngine, create_async_engine

import migrations.read_models
from lifecycle.errors import LogUnavailable, ReadModelsUnavailable
from lifecycle.store.database import make_private
from lifecycle.store.read_model_tables import VERSION_TABLE, metadata

COMMAND_SECONDS = 60.0
"""Longest time that PostgreSQL may take for one statement."""

_MIGRATING = 0x6B76_7265_6164
"""Number of the advisory lock under which PostgreSQL's tables are changed."""

_AWAY_STATES = frozenset({"08", "28", "3D", "40", "42501", "53", "55", "57", "25006"})
"""SQLSTATE codes, whole or by class, of what passes or what an operator mends: connections, rights, room,
locks, shutdowns."""

_AWAY_SQLITE = frozenset(
    {
        sqlite3.SQLITE_BUSY,
        sqlite3.SQLITE_CANTOPEN,
        sqlite3.SQLITE_CORRUPT,
        sqlite3.SQLITE_FULL,
        sqlite3.SQLITE_IOERR,
        sqlite3.SQLITE_LOCKED,
        sqlite3.SQLITE_NOTADB,
        sqlite3.SQLITE_READONLY,
    }
)


def parse_url(url: str) -> URL:
    """Where the read models lie, with its driver. Raises `ValueError`, which shows no password."""
    try:
        parsed = make_url(url)
    except exc.ArgumentError:
        raise ValueError(_WANTED) from None
    backend = parsed.get_backend_name()
    if backend == "sqlite" and parsed.database and parsed.database != ":memory:":
        return parsed.set(drivername="sqlite+aiosqlite")
    if backend in ("postgresql", "postgres") and parsed.database:
        query = dict(parsed.query)
        if unknown := sorted(set(query) - {"sslmode", "host"}):
            raise ValueError(f"unknown in the URL of the read models: {', '.join(unknown)}")
        if "sslmode" in query:
            query["ssl"] = query.pop("sslmode")
        return parsed.set(drivername="postgresql+asyncpg", query=query)
    raise ValueError(_WANTED)


_WANTED = "the read models need a URL like sqlite:///path/to/rows.db or postgresql://user@host:5432/database"


def place_of(url: URL) -> str:
    """The database as people may read it: without a password."""
    if url.get_backend_name() == "sqlite":
        return f"sqlite:///{url.database}"
    host = url.query.get("host") or f"{url.host or 'localhost'}:{url.port or 5432}"
    return f"postgresql://{unquote(str(host))}/{url.database}"


async def open_read_model_database(url: str, timeout_s: float = 5.0) -> AsyncEngine:
    """Engine on the database at `url`, at the current schema; a SQLite file is created if absent.

    `timeout_s` bounds connecting and waiting for a lock. A transaction of SQLite holds the write lock from
    its beginning. A commit may be lost with the machine: rows come again from the log. Raises `ValueError`
    for another kind of URL, `ReadModelsUnavailable`.
    """
    parsed = parse_url(url)
    if parsed.get_backend_name() == "sqlite":
        engine = _sqlite(parsed, timeout_s)
    else:
        engine = create_async_engine(
            parsed,
            hide_parameters=True,
            pool_size=2,
            pool_pre_ping=True,
            connect_args={"timeout": timeout_s, "command_timeout": COMMAND_SECONDS},
        )
        event.listen(engine.sync_engine, "begin", _bound_locks(timeout_s))
    try:
        with naming_failures(parsed):
            async with engine.begin() as connection:
                await connection.run_sync(_upgrade)
    except BaseException:
        await engine.dispose()
        raise
    return engine


@contextmanager
def naming_failures(url: URL) -> Iterator[None]:
    """Turn what the driver says of an absent, full, locked or foreign database into `ReadModelsUnavailable`.

    What is left says that the rows themselves do not fit: the read models are wrong, not away.
    """
    try:
        yield
    except exc.DBAPIError as error:
        if not error.connection_invalidated and not _is_away(error.orig):
            raise
        raise _unavailable(url, error.orig) from error
    except (OSError, exc.TimeoutError) as error:  # also a connection that is refused or takes too long
        raise _unavailable(url, error) from error


def schema_config(connection: Connection) -> Config:
    """Alembic's configuration for running revisions on this connection, in its caller's transaction."""
    config = Config()
    directory = str(Path(migrations.read_models.__file__).parent)
    config.set_main_option("script_location", directory.replace("%", "%%"))
    config.attributes["connection"] = connection
    config.attributes["metadata"] = metadata
    config.attributes["version_table"] = VERSION_TABLE
    return config


def _sqlite(url: URL, timeout_s: float) -> AsyncEngine:
    try:
        make_private(url)
    except LogUnavailable as error:
        raise ReadModelsUnavailable(str(error)) from error
    options: dict[str, Any] = {"timeout": timeout_s, "isolation_level": None}
    engine = create_async_engine(url, hide_parameters=True, connect_args=options)
    event.listen(engine.sync_engine, "connect", _prepare)
    event.listen(engine.sync_engine, "begin", _begin)
    return engine


def _prepare(dbapi_connection: Any, _record: object) -> None:
    cursor = dbapi_connection.cursor()
    cursor.execute("PRAGMA journal_mode = WAL")
    cursor.execute("PRAGMA synchronous = NORMAL")
    cursor.close()


def _begin(connection: Connection) -> None:
    connection.exec_driver_sql("BEGIN IMMEDIATE")


def _bound_locks(timeout_s: float) -> Any:
    def begun(connection: Connection) -> None:
        connection.exec_driver_sql(f"SET LOCAL lock_timeout = {int(timeout_s * 1000)}")

    return begun


def _upgrade(connection: Connection) -> None:
    if connection.dialect.name == "postgresql":
        connection.execute(text("SELECT pg_advisory_xact_lock(:number)"), {"number": _MIGRATING})
    config = schema_config(connection)
    script = ScriptDirectory.from_config(config)
    options: Mapping[str, Any] = {"version_table": VERSION_TABLE}
    current = MigrationContext.configure(connection, opts=dict(options)).get_current_heads()
    if newer := sorted(set(current) - {revision.revision for revision in script.walk_revisions()}):
        raise ReadModelsUnavailable(
            f"{place_of(connection.engine.url)} is at schema revision {', '.join(newer)}, which this version "
            "does not know: a newer one wrote it; run that one, or name another database"
        )
    if set(current) != set(script.get_heads()):
        command.upgrade(config, "head")


def _is_away(error: BaseException | None) -> bool:
    if isinstance(error, sqlite3.Error):
        return getattr(error, "sqlite_errorcode", 0) & 0xFF in _AWAY_SQLITE
    state = str(getattr(error, "sqlstate", None) or "")
    return not state or state in _AWAY_STATES or state[:2] in _AWAY_STATES


def _unavailable(url: URL, error: BaseException | None) -> ReadModelsUnavailable:
    why = str(error).strip() or type(error).__name__
    return ReadModelsUnavailable(f"the read models at {place_of(url)} are unavailable: {why}")
