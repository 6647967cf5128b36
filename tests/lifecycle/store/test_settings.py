"""Shared values: made once, the same for everybody, for ever."""

import asyncio
import secrets
import stat
from pathlib import Path

import pytest

from lifecycle.core.events import ListGrown
from lifecycle.errors import LogUnavailable
from lifecycle.store.settings import SqlSettings
from lifecycle.store.sql import SqlEventLog


def fresh() -> bytes:
    return secrets.token_bytes(32)


def modes(directory: Path) -> dict[str, int]:
    return {path.name: stat.S_IMODE(path.stat().st_mode) for path in directory.iterdir()}


async def test_a_value_is_made_once_and_survives(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/events.db"
    log = await SqlEventLog.open(url)
    first = await SqlSettings(log.engine).get_or_create("digest_secret", fresh)
    assert await SqlSettings(log.engine).get_or_create("digest_secret", fresh) == first
    assert await SqlSettings(log.engine).get_or_create("another", fresh) != first
    await log.close()
    log = await SqlEventLog.open(url)
    assert await SqlSettings(log.engine).get_or_create("digest_secret", fresh) == first
    await log.close()


async def test_all_who_ask_at_once_get_the_same_value(tmp_path: Path) -> None:
    logs = [await SqlEventLog.open(f"sqlite:///{tmp_path}/events.db") for _ in range(4)]
    asked = [SqlSettings(log.engine).get_or_create("digest_secret", fresh) for log in logs * 5]
    answers = await asyncio.gather(*asked)
    assert len(set(answers)) == 1
    assert len(answers[0]) == 32
    for log in logs:
        await log.close()


async def test_only_the_owner_can_read_them(tmp_path: Path) -> None:
    log = await SqlEventLog.open(f"sqlite:///{tmp_path}/events.db")
    await SqlSettings(log.engine).get_or_create("digest_secret", fresh)
    await log.append("ctx/a", [ListGrown(at_ns=1, num_new=1)], 0)
    assert modes(tmp_path) == dict.fromkeys(["events.db", "events.db-wal", "events.db-shm"], 0o600)
    await log.close()


async def test_a_locked_database_is_named(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/events.db"
    log, other = await SqlEventLog.open(url, busy_timeout_s=0.01), await SqlEventLog.open(url)
    async with other.engine.connect() as connection:
        await connection.exec_driver_sql("BEGIN IMMEDIATE")
        with pytest.raises(LogUnavailable, match="another process holds it locked"):
            await SqlSettings(log.engine).get_or_create("digest_secret", fresh)
        await connection.rollback()
    assert await SqlSettings(log.engine).get_or_create("digest_secret", lambda: b"x") == b"x"
    await log.close()
    await other.close()
