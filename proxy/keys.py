"""API keys at rest: a file that holds a salted hash of each, never a key.

A key of ours is 256 random bits. Nobody can try them one by one, so a fast hash is the right one: a slow one
(scrypt, argon2) makes guesses dear where people choose the secret, and would here only make every call dear.
The salt is random for each file, so that equal keys in two files do not look equal and no table made in
advance fits.
"""

import fcntl
import hashlib
import os
import secrets
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path

import msgspec

from proxy.auth import Caller, KeyScope, KeySet, salted_digest
from proxy.operations import is_context_id

KEY_PREFIX = "kvt-"
"""Begins every key of ours, so that scanners find one that was committed by mistake."""

KEY_BYTES = 32
SALT_BYTES = 32
ID_BYTES = 5
FILE_FORMAT = 1
OWNER_ONLY = 0o600


class InvalidKeys(Exception):
    """The keys file cannot be read or written, or an entry makes no sense; the message says which and why."""


class KeyRecord(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What is kept of a key. `hash` is the HMAC-SHA-256 of the key under the file's salt, in hex."""

    id: str
    tenant: str
    scopes: tuple[KeyScope, ...]
    hash: str
    created: datetime
    revoked: datetime | None = None


class KeyFile(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The file: its salt in hex, and every key that was ever made. Revoked ones stay, to be read."""

    format: int
    salt: str
    keys: tuple[KeyRecord, ...] = ()

    def valid(self) -> KeySet:
        """The keys that open something, as the authenticator takes them."""
        callers = {
            bytes.fromhex(record.hash): Caller(record.tenant, frozenset(record.scopes))
            for record in self.keys
            if record.revoked is None
        }
        return KeySet(bytes.fromhex(self.salt), callers)


def read_keys(path: Path) -> KeyFile:
    """The file's content. Raises `FileNotFoundError`, and `InvalidKeys` for whatever else is wrong."""
    try:
        found = msgspec.json.decode(path.read_bytes(), type=KeyFile)
        _check(found)
    except FileNotFoundError:
        raise
    except (OSError, msgspec.DecodeError, UnicodeDecodeError, ValueError) as error:
        raise InvalidKeys(f"{path}: {error}") from error
    return found


def create_key(
    path: Path, tenant: str, scopes: frozenset[KeyScope], now_ns: int
) -> tuple[KeyRecord, str, bool]:
    """Make a key and add its hash to the file, which is made if need be.

    Answers the record, the key (it is not kept anywhere), and whether it is the file's first. Raises
    `InvalidKeys`.
    """
    if not is_context_id(tenant):
        raise InvalidKeys(f"tenant {tenant!r}: 1 to 256 printable characters, without '/'")
    if not scopes:
        raise InvalidKeys("a key needs a scope")
    key = KEY_PREFIX + secrets.token_urlsafe(KEY_BYTES)
    with _changing(path):
        try:
            known = read_keys(path)
        except FileNotFoundError:
            known = KeyFile(format=FILE_FORMAT, salt=secrets.token_bytes(SALT_BYTES).hex())
        taken = {record.id for record in known.keys}
        key_id = secrets.token_hex(ID_BYTES)
        while key_id in taken:
            key_id = secrets.token_hex(ID_BYTES)
        record = KeyRecord(
            id=key_id,
            tenant=tenant,
            scopes=tuple(sorted(scopes)),
            hash=salted_digest(bytes.fromhex(known.salt), key.encode()).hex(),
            created=_moment(now_ns),
        )
        _write(path, msgspec.structs.replace(known, keys=(*known.keys, record)))
    return record, key, not known.keys


def revoke_key(path: Path, key_id: str, now_ns: int) -> KeyRecord:
    """The key opens nothing any more; revoked twice keeps its first time. Raises `InvalidKeys`."""
    with _changing(path):
        try:
            known = read_keys(path)
        except FileNotFoundError as error:
            raise InvalidKeys(f"{path} is not there: no key was made yet") from error
        records = {record.id: record for record in known.keys}
        if key_id not in records:
            raise InvalidKeys(f"{path} has no key {key_id!r}")
        revoked = records[key_id]
        if revoked.revoked is None:
            revoked = msgspec.structs.replace(revoked, revoked=_moment(now_ns))
            records[key_id] = revoked
            _write(path, msgspec.structs.replace(known, keys=tuple(records.values())))
    return revoked


def _moment(now_ns: int) -> datetime:
    return datetime.fromtimestamp(now_ns // 10**9, UTC)


def _check(found: KeyFile) -> None:
    """Raises `ValueError` for what must not be believed."""
    if found.format != FILE_FORMAT:
        raise ValueError(f"format {found.format} is not known, {FILE_FORMAT} is")
    if len(bytes.fromhex(found.salt)) < SALT_BYTES:
        raise ValueError(f"the salt is shorter than {SALT_BYTES} bytes")
    _unique(found, {record.id: record for record in found.keys}, "id")
    _unique(found, {record.hash: record for record in found.keys}, "hash")
    for record in found.keys:
        if len(bytes.fromhex(record.hash)) != hashlib.sha256().digest_size:
            raise ValueError(f"key {record.id!r}: the hash is no SHA-256 in hex")
        if not record.scopes or not is_context_id(record.tenant):
            raise ValueError(f"key {record.id!r}: it needs a tenant and a scope")


def _unique(found: KeyFile, by_name: Mapping[str, KeyRecord], name: str) -> None:
    if len(by_name) != len(found.keys):
        raise ValueError(f"two keys have the same {name}")


@contextmanager
def _changing(path: Path) -> Iterator[None]:
    """One writer at a time. The directory is locked: the file itself is replaced, and a lock with it."""
    try:
        directory = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
    except OSError as error:
        raise InvalidKeys(f"{path.parent}: {error.strerror}") from error
    try:
        fcntl.flock(directory, fcntl.LOCK_EX)
        yield
    except OSError as error:
        raise InvalidKeys(f"{path}: {error.strerror or error}") from error
    finally:
        os.close(directory)


def _write(path: Path, content: KeyFile) -> None:
    """Replace the file at once: a reader sees the old keys or the new ones. It keeps its owner and mode."""
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(msgspec.json.format(msgspec.json.encode(content)) + b"\n")
            if path.exists():
                old = path.stat()
                os.fchmod(file.fileno(), old.st_mode & 0o777)
                if (old.st_uid, old.st_gid) != (os.geteuid(), os.getegid()):
                    os.fchown(file.fileno(), old.st_uid, old.st_gid)
            else:
                os.fchmod(file.fileno(), OWNER_ONLY)
            file.flush()
            os.fsync(file.fileno())
        os.replace(name, path)
    except BaseException:
        os.unlink(name)
        raise
