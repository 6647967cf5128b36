"""Held pins over a restart: exactly what was kept, unreadable without the key, and never a failed start."""

import asyncio
import secrets
import sqlite3
import stat
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from sqlalchemy.engine import make_url
from sqlalchemy.ext.asyncio import AsyncEngine

from lifecycle.errors import LogUnavailable
from lifecycle.store.database import open_database
from lifecycle.store.pin_vault import PinVault, pin_key

SECRET = b"what the pinned tokens say" * 20

ENTRIES = st.dictionaries(st.text(max_size=8), st.binary(max_size=40), max_size=5)


def place(tmp_path: Path) -> str:
    return f"sqlite:///{tmp_path / 'events.db'}"


def at_rest(tmp_path: Path) -> bytes:
    return b"".join(path.read_bytes() for path in tmp_path.iterdir())


def modes(tmp_path: Path) -> dict[str, int]:
    return {path.name: stat.S_IMODE(path.stat().st_mode) for path in tmp_path.iterdir()}


def change(tmp_path: Path, statement: str) -> None:
    connection = sqlite3.connect(tmp_path / "events.db")
    with connection:
        connection.execute(statement)
    connection.close()


async def opened(engine: AsyncEngine, key: bytes = b"k" * 32) -> dict[str, bytes]:
    """What a process that starts now finds."""
    return await PinVault(engine, key).load()


@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(ENTRIES, max_size=4))
def test_exactly_the_last_entries_are_there(tmp_path: Path, kept: list[dict[str, bytes]]) -> None:
    async def scene() -> None:
        engine = await open_database(place(tmp_path))
        vault = PinVault(engine, b"k" * 32)
        for entries in kept:
            await vault.replace(entries)
            assert await vault.load() == await opened(engine) == entries
        await engine.dispose()

    asyncio.run(scene())


async def test_a_second_process_is_not_believed_to_have_kept_ours(tmp_path: Path) -> None:
    engine = await open_database(place(tmp_path))
    ours, other = PinVault(engine, b"k" * 32), PinVault(engine, b"k" * 32)
    await ours.replace({"a": b"1"})
    await other.replace({})
    await ours.replace({"a": b"1"})
    assert await opened(engine) == {"a": b"1"}
    await engine.dispose()


async def test_nothing_at_rest_tells_what_is_held(tmp_path: Path) -> None:
    engine = await open_database(place(tmp_path))
    vault = PinVault(engine, pin_key(engine.url))
    await vault.replace({"a": SECRET, "b": SECRET})
    assert SECRET[:16] not in at_rest(tmp_path)
    connection = sqlite3.connect(tmp_path / "events.db")
    one, other = connection.execute("SELECT sealed FROM held_pins").fetchall()
    connection.close()
    assert one != other, "the same text sealed twice looks the same"
    await engine.dispose()


async def test_what_cannot_be_opened_is_left_out_and_the_rest_is_there(tmp_path: Path) -> None:
    engine = await open_database(place(tmp_path))
    await PinVault(engine, b"k" * 32).replace({name: SECRET for name in "abcd"})
    assert await opened(engine, b"x" * 32) == {}
    change(tmp_path, "UPDATE held_pins SET sealed = x'00' WHERE pin_id = 'a'")
    change(tmp_path, "UPDATE held_pins SET sealed = substr(sealed, 1, 40) WHERE pin_id = 'b'")
    change(tmp_path, "UPDATE held_pins SET pin_id = 'e' WHERE pin_id = 'c'")
    change(tmp_path, "INSERT INTO held_pins VALUES ('f', 'no blob at all')")
    vault = PinVault(engine, b"k" * 32)
    assert await vault.load() == {"d": SECRET}
    await vault.replace({"d": SECRET, "a": b"new"})
    assert await opened(engine) == {"d": SECRET, "a": b"new"}
    await engine.dispose()


async def test_a_database_that_takes_nothing_keeps_what_it_had(tmp_path: Path) -> None:
    engine = await open_database(place(tmp_path), busy_timeout_s=0.01)
    vault = PinVault(engine, b"k" * 32)
    await vault.replace({"a": b"1"})
    async with engine.connect() as locking:
        await locking.exec_driver_sql("BEGIN IMMEDIATE")
        with pytest.raises(LogUnavailable, match="locked"):
            await vault.replace({"b": b"2"})
        await locking.rollback()
    assert await opened(engine) == {"a": b"1"}
    await vault.replace({"b": b"2"})
    assert await opened(engine) == {"b": b"2"}
    await engine.dispose()


async def test_the_key_is_made_once_for_everybody_and_for_the_owner_alone(tmp_path: Path) -> None:
    url = make_url(place(tmp_path))
    keys = await asyncio.gather(*(asyncio.to_thread(pin_key, url) for _ in range(8)))
    assert set(keys) == {pin_key(url)}
    assert len(keys[0]) == 32
    assert modes(tmp_path) == {"events.db.pinkey": 0o600}


def test_a_key_that_cannot_be_used_is_named(tmp_path: Path) -> None:
    (tmp_path / "events.db.pinkey").write_bytes(secrets.token_bytes(5))
    with pytest.raises(LogUnavailable, match=r"events\.db\.pinkey is damaged"):
        pin_key(make_url(place(tmp_path)))
    with pytest.raises(LogUnavailable, match="missing"):
        pin_key(make_url(f"sqlite:///{tmp_path}/missing/events.db"))
