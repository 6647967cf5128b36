"""Opening the read models' database: created, migrated, shared, or refused with a reason."""

import asyncio
import sqlite3
from pathlib import Path

import pytest
from alembic import command
from sqlalchemy import Connection, inspect, text

from lifecycle.errors import ReadModelsUnavailable
from lifecycle.store.read_model_database import (
    open_read_model_database,
    parse_url,
    place_of,
    schema_config,
)
from lifecycle.store.read_model_tables import ROWS, VERSION_TABLE, status
from tests.lifecycle.store.postgres_process import new_shared_database, shared_postgres


@pytest.fixture(params=["sqlite", "postgresql"])
async def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return f"sqlite:///{tmp_path}/rows.db" if request.param == "sqlite" else await new_shared_database()


def tables(connection: Connection) -> set[str]:
    return set(inspect(connection).get_table_names()) - {VERSION_TABLE}


async def test_down_and_up_again(url: str) -> None:
    engine = await open_read_model_database(url)
    async with engine.begin() as connection:
        assert await connection.run_sync(tables) == {*ROWS, status.name}
        await connection.run_sync(lambda c: command.downgrade(schema_config(c), "base"))
        assert await connection.run_sync(tables) == set()
        await connection.run_sync(lambda c: command.upgrade(schema_config(c), "head"))
        assert await connection.run_sync(tables) == {*ROWS, status.name}
    await engine.dispose()


async def test_many_may_open_a_new_database_at_once(url: str) -> None:
    for engine in await asyncio.gather(*(open_read_model_database(url) for _ in range(6))):
        await engine.dispose()


async def test_a_newer_schema_is_refused_by_revision(url: str) -> None:
    engine = await open_read_model_database(url)
    async with engine.begin() as connection:
        await connection.execute(text(f"UPDATE {VERSION_TABLE} SET version_num = '0999'"))
    await engine.dispose()
    with pytest.raises(ReadModelsUnavailable, match=r"0999.*newer"):
        await open_read_model_database(url)


async def test_a_database_may_hold_other_peoples_tables(url: str) -> None:
    engine = await open_read_model_database(url)
    async with engine.begin() as connection:
        await connection.execute(text("CREATE TABLE contexts (theirs INTEGER)"))
    await engine.dispose()
    await (await open_read_model_database(url)).dispose()


async def test_a_file_is_its_owners_alone(tmp_path: Path) -> None:
    await (await open_read_model_database(f"sqlite:///{tmp_path}/rows.db")).dispose()
    assert (tmp_path / "rows.db").stat().st_mode & 0o077 == 0


async def test_a_file_that_is_no_database_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "rows.db"
    path.write_bytes(b"shopping list\n" * 1000)
    with pytest.raises(ReadModelsUnavailable, match=r"rows\.db"):
        await open_read_model_database(f"sqlite:///{path}")
    assert path.read_bytes() == b"shopping list\n" * 1000


async def test_what_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(ReadModelsUnavailable, match="missing"):
        await open_read_model_database(f"sqlite:///{tmp_path}/missing/rows.db")
    server = await asyncio.to_thread(shared_postgres)
    with pytest.raises(ReadModelsUnavailable, match="does not exist"):
        await open_read_model_database(server.url("nowhere"))
    with pytest.raises(ReadModelsUnavailable, match=r"127\.0\.0\.1:1/kv"):
        await open_read_model_database("postgresql://user:hidden@127.0.0.1:1/kv")


async def test_who_waits_too_long_for_a_lock_is_told(tmp_path: Path) -> None:
    path = tmp_path / "rows.db"
    await (await open_read_model_database(f"sqlite:///{path}")).dispose()
    with sqlite3.connect(path, isolation_level=None) as holder:
        holder.execute("BEGIN IMMEDIATE")
        with pytest.raises(ReadModelsUnavailable, match="locked"):
            await open_read_model_database(f"sqlite:///{path}", timeout_s=0.05)
    holder.close()


@pytest.mark.parametrize(
    "url",
    [
        "sqlite://",
        "sqlite:///:memory:",
        "mysql://u:hidden@h/kv",
        "redis://h/0",
        "postgresql://u:hidden@h",
        "x",
    ],
)
def test_other_urls_are_a_mistake(url: str) -> None:
    with pytest.raises(ValueError, match="the read models need a URL like") as wrong:
        parse_url(url)
    assert "hidden" not in str(wrong.value)


def test_a_place_shows_no_password() -> None:
    assert place_of(parse_url("postgresql://u:hidden@h:5/kv?sslmode=require")) == "postgresql://h:5/kv"
    assert parse_url("postgres://u:hidden@h/kv?sslmode=require").query == {"ssl": "require"}
