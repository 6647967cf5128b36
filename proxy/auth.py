"""Who may call, as which tenant, and what the engine gets to see of the key."""

import hashlib
import hmac
from collections.abc import Mapping, Sequence
from enum import StrEnum

import msgspec

from proxy.engine_connection import Headers
from proxy.errors import Forbidden, Unauthenticated
from proxy.upstream import UpstreamCredentials

DEFAULT_TENANT = "default"
_HASHED_PREFIX = "sha256:"


class KeyScope(StrEnum):
    """What a key reaches: inference and operations, or the operator's side as well."""

    CALL = "call"
    ADMIN = "admin"


class ApiKey(msgspec.Struct, frozen=True, kw_only=True):
    """A configured key. `key` is the key itself or `sha256:<64 hex digits>` of it; ADMIN includes CALL."""

    key: str
    tenant: str = DEFAULT_TENANT
    scopes: frozenset[KeyScope] = frozenset({KeyScope.CALL})

    def sha256(self) -> bytes:
        """The key's digest. Raises `ValueError` for an empty key or a malformed digest."""
        if self.key.startswith(_HASHED_PREFIX):
            digest = bytes.fromhex(self.key.removeprefix(_HASHED_PREFIX))
            if len(digest) != hashlib.sha256().digest_size:
                raise ValueError("a hashed key is sha256: and 64 hex digits")
            return digest
        if not self.key:
            raise ValueError("a key is not empty")
        return hashlib.sha256(self.key.encode()).digest()


class Caller(msgspec.Struct, frozen=True):
    """Who is calling."""

    tenant: str
    scopes: frozenset[KeyScope]

    def require(self, scope: KeyScope) -> None:
        """Raises `Forbidden` unless the caller has this scope."""
        if scope not in self.scopes and KeyScope.ADMIN not in self.scopes:
            raise Forbidden(f"this key has no {scope.value} scope")


class KeySet(msgspec.Struct, frozen=True):
    """Keys that are kept as salted digests: who calls, by the key's `salted_digest`."""

    salt: bytes
    callers: Mapping[bytes, Caller]


def salted_digest(salt: bytes, key: bytes) -> bytes:
    """What is kept of a key: its HMAC-SHA-256 under the salt, 32 bytes."""
    return hmac.digest(salt, key, "sha256")


class Authenticator:
    """The configured keys, and those of the keys file, which may be exchanged at any time.

    Without a configured key and without a keys file everybody is the default tenant with every scope: for
    loopback only. A keys file in which no key is valid lets nobody in.

    With keys of ours the engine gets to see none of them: a caller's key is a secret between it and us.
    """

    def __init__(self, keys: Sequence[ApiKey] = ()) -> None:
        self._callers: Mapping[bytes, Caller] = {k.sha256(): Caller(k.tenant, k.scopes) for k in keys}
        self._filed: KeySet | None = None

    @property
    def open(self) -> bool:
        """Whether no key is needed."""
        return not self._callers and self._filed is None

    def take(self, filed: KeySet) -> None:
        """The keys of the file are these from now on. There is no way back to open."""
        self._filed = filed

    def authenticate(self, headers: Headers) -> Caller:
        """The caller by its `Authorization: Bearer` (or `x-api-key`). Raises `Unauthenticated`.

        Every key is compared, in constant time each, so that the time tells nothing.
        """
        if self.open:
            return Caller(DEFAULT_TENANT, frozenset(KeyScope))
        presented = _presented_key(headers)
        if not presented:
            raise Unauthenticated("an API key is required")
        found = _compared(self._callers, hashlib.sha256(presented).digest())
        if self._filed is not None:
            filed = _compared(self._filed.callers, salted_digest(self._filed.salt, presented))
            found = filed or found
        if found is None:
            raise Unauthenticated("this API key is not known")
        return found

    def upstream_credentials(self) -> UpstreamCredentials:
        """What to forward of the caller's key; an engine with a key of its own gets that in its place."""
        return UpstreamCredentials(keep=self.open)


def _compared(callers: Mapping[bytes, Caller], digest: bytes) -> Caller | None:
    found: Caller | None = None
    for known, caller in callers.items():
        if hmac.compare_digest(known, digest):
            found = caller
    return found


def _presented_key(headers: Headers) -> bytes:
    for name, value in headers:
        if name == b"authorization":
            scheme, _, key = value.strip().partition(b" ")
            if scheme.lower() == b"bearer":
                return key.strip()
    return next((value.strip() for name, value in headers if name == b"x-api-key"), b"")
