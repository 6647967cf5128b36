"""Opening the embedded database: created, migrated, shared, or refused with a reason."""

import asyncio
import sqlite3
from pathlib import Path

import pytest
from alembic import command
from sqlalchemy import Connection, inspect, text

from lifecycle.core.events import ListGrown
from lifecycle.errors import CorruptLog, LogUnavailable
from lifecycle.store.database import blocking_engine, open_database, schema_config
from lifecycle.store.sql import SqlEventLog

FULL = 2
"""SQLite's number for `PRAGMA synchronous = FULL`."""


def tables(connection: Connection) -> set[str]:
    return set(inspect(connection).get_table_names()) - {"alembic_version"}


async def test_down_and_up_again_with_data(tmp_path: Path) -> None:
    log = await SqlEventLog.open(f"sqlite:///{tmp_path}/events.db")
    await log.append("ctx/a", [ListGrown(at_ns=1, num_new=n) for n in range(3)], 0)
    async with log.engine.connect() as connection:
        before = await connection.run_sync(tables)
        assert {"events", "settings", "held_pins"} <= before
        await connection.run_sync(lambda c: command.downgrade(schema_config(c), "base"))
        assert await connection.run_sync(tables) == set()
        await connection.run_sync(lambda c: command.upgrade(schema_config(c), "head"))
        assert await connection.run_sync(tables) == before
    assert await log.head() == 0
    (recorded,) = await log.append("ctx/a", [ListGrown(at_ns=1, num_new=7)], 0)
    assert recorded.version == 1
    await log.close()


async def test_opening_again_keeps_the_data(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/events.db"
    for version in range(3):
        log = await SqlEventLog.open(url)
        await log.append("ctx/a", [ListGrown(at_ns=1, num_new=version)], version)
        await log.close()


async def test_many_may_open_a_new_file_at_once(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/events.db"
    logs = await asyncio.gather(*(SqlEventLog.open(url) for _ in range(8)))
    for version, log in enumerate(logs):
        await log.append("ctx/a", [ListGrown(at_ns=1, num_new=1)], version)
    for log in logs:
        await log.close()


async def test_a_newer_database_is_refused_by_revision(tmp_path: Path) -> None:
    path = tmp_path / "events.db"
    await (await open_database(f"sqlite:///{path}")).dispose()
    with sqlite3.connect(path) as connection:
        connection.execute("UPDATE alembic_version SET version_num = '0999'")
    connection.close()
    before = path.read_bytes()
    with pytest.raises(LogUnavailable, match=r"0999.*newer"):
        await open_database(f"sqlite:///{path}")
    assert path.read_bytes() == before


async def test_a_file_that_is_no_database_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "events.db"
    path.write_bytes(b"shopping list\n" * 1000)
    with pytest.raises(CorruptLog, match=r"events\.db"):
        await open_database(f"sqlite:///{path}")
    assert path.read_bytes() == b"shopping list\n" * 1000


@pytest.mark.parametrize("place", ["missing/events.db", "."])
async def test_a_place_that_cannot_hold_a_file_is_named(tmp_path: Path, place: str) -> None:
    with pytest.raises(LogUnavailable, match=str(tmp_path)):
        await open_database(f"sqlite:///{tmp_path}/{place}")


@pytest.mark.parametrize(
    "url", ["sqlite://", "sqlite:///:memory:", "postgresql://localhost/kv", "redis://h/0"]
)
async def test_other_urls_are_a_mistake(url: str) -> None:
    with pytest.raises(ValueError, match="sqlite:///path"):
        await open_database(url)


async def test_a_database_that_may_only_be_read_is_read(tmp_path: Path) -> None:
    path = tmp_path / "events.db"
    log = await SqlEventLog.open(f"sqlite:///{path}")
    await log.append("ctx/a", [ListGrown(at_ns=1, num_new=1)], 0)
    await log.close()
    log = await SqlEventLog.open(f"sqlite:///file:{path}?mode=ro&uri=true")
    assert [r.version async for r in log.read_all()] == [1]
    with pytest.raises(LogUnavailable, match="may not be written to"):
        await log.append("ctx/a", [ListGrown(at_ns=1, num_new=1)], 1)
    assert [r.version async for r in log.read_all()] == [1]
    await log.close()


async def test_a_path_may_hold_a_percent_sign(tmp_path: Path) -> None:
    (tmp_path / "100%s").mkdir()
    await (await open_database(f"sqlite:///{tmp_path}/100%s/events.db")).dispose()
    assert (tmp_path / "100%s" / "events.db").exists()


async def test_every_connection_waits_for_the_disk(tmp_path: Path) -> None:
    engine = await open_database(f"sqlite:///{tmp_path}/events.db")
    async with engine.connect() as connection:
        assert await connection.scalar(text("PRAGMA synchronous")) == FULL
        assert await connection.scalar(text("PRAGMA journal_mode")) == "wal"
    await engine.dispose()
    writing = blocking_engine(engine.url, busy_timeout_s=1.0)
    with writing.connect() as blocking:
        assert blocking.scalar(text("PRAGMA synchronous")) == FULL
        assert blocking.scalar(text("PRAGMA journal_mode")) == "wal"
    writing.dispose()
