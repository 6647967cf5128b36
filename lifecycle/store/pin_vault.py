"""Pins that a cache holds for us, kept over a restart: encrypted, for they name token ids, which are text.

The event log must never hold token ids, and a hold in a cache can be given back by nothing else. So they lie
in a table of their own, and the key lies in a file of its own: a copy of the database alone tells nothing.
"""

import asyncio
import os
import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import Self

import structlog
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from sqlalchemy import delete, select
from sqlalchemy.dialects.sqlite import insert
from sqlalchemy.engine import URL
from sqlalchemy.ext.asyncio import AsyncEngine

from lifecycle.errors import LogUnavailable
from lifecycle.store.database import naming_failures
from lifecycle.store.tables import held_pins

log = structlog.get_logger(__name__)

KEY_BYTES = 32
NONCE_BYTES = 12
KEY_SUFFIX = ".pinkey"


def pin_key(url: URL) -> bytes:
    """The key of the database at `url`, in the file `<database>.pinkey`; made at the first use, mode 0600.

    Processes that ask at once get the same key. Blocks. Raises `LogUnavailable` for a key that cannot be
    made, read or used.
    """
    path = _key_path(url)
    try:
        if not path.exists():
            _make_key(path)
        key = path.read_bytes()
    except OSError as error:
        raise LogUnavailable(f"the key of held pins {path} is unavailable: {error.strerror}") from error
    if len(key) != KEY_BYTES:
        raise LogUnavailable(f"the key of held pins {path} is damaged: restore the file, or remove it")
    return key


def _key_path(url: URL) -> Path:
    database = (url.database or "").removeprefix("file:").partition("?")[0]
    return Path(database + KEY_SUFFIX)


def _make_key(path: Path) -> None:
    """Whole or not at all: it gets its name when it is on disk, and never takes another one's place."""
    draft = path.with_name(f"{path.name}.{secrets.token_hex(8)}")
    descriptor = os.open(draft, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC, 0o600)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(secrets.token_bytes(KEY_BYTES))
            file.flush()
            os.fsync(file.fileno())
        try:
            os.link(draft, path)
        except FileExistsError:
            return
    finally:
        draft.unlink()


class PinVault:
    """The table `held_pins`, sealed by AES-GCM under `key` (32 bytes). One process uses it at a time.

    Each blob is bound to its pin's id: it opens under no other one. Methods raise `LogUnavailable`.
    """

    def __init__(self, engine: AsyncEngine, key: bytes) -> None:
        self._engine = engine
        self._cipher = AESGCM(key)
        self._written: dict[str, bytes] = {}

    @classmethod
    async def open(cls, engine: AsyncEngine) -> Self:
        """The vault of a database, under the key beside it. Raises `LogUnavailable`."""
        return cls(engine, await asyncio.to_thread(pin_key, engine.url))

    async def replace(self, entries: Mapping[str, bytes]) -> None:
        """Keep exactly these, by pin id, in one transaction. What is there already is not written again."""
        new = {pin_id: blob for pin_id, blob in entries.items() if self._written.get(pin_id) != blob}
        with naming_failures(self._engine.url):
            async with self._engine.connect() as connection:
                await connection.exec_driver_sql("BEGIN IMMEDIATE")
                there = set(await connection.scalars(select(held_pins.c.pin_id)))
                for pin_id in there - entries.keys():
                    await connection.execute(delete(held_pins).where(held_pins.c.pin_id == pin_id))
                for pin_id, blob in entries.items():
                    if pin_id in new or pin_id not in there:
                        sealed = self._seal(pin_id, blob)
                        row = insert(held_pins).values(pin_id=pin_id, sealed=sealed)
                        await connection.execute(
                            row.on_conflict_do_update(index_elements=["pin_id"], set_={"sealed": sealed})
                        )
                await connection.commit()
        self._written = dict(entries)

    async def load(self) -> dict[str, bytes]:
        """What was kept, by pin id. What cannot be opened is reported and left out."""
        with naming_failures(self._engine.url):
            async with self._engine.connect() as connection:
                rows = (await connection.execute(select(held_pins))).all()
        found: dict[str, bytes] = {}
        for pin_id, sealed in rows:
            try:
                found[pin_id] = self._open(pin_id, sealed)
            except (InvalidTag, ValueError, TypeError):
                log.error("a held pin cannot be opened: another key, or damaged", pin_id=pin_id)
        self._written = dict(found)
        return found

    def _seal(self, pin_id: str, blob: bytes) -> bytes:
        nonce = secrets.token_bytes(NONCE_BYTES)
        return nonce + self._cipher.encrypt(nonce, blob, pin_id.encode())

    def _open(self, pin_id: str, sealed: bytes) -> bytes:
        return self._cipher.decrypt(sealed[:NONCE_BYTES], sealed[NONCE_BYTES:], pin_id.encode())
