"""Keys become tenants; nothing else gets in."""

import hashlib

import pytest

from proxy.auth import ApiKey, Authenticator, KeyScope
from proxy.errors import Forbidden, Unauthenticated
from proxy.upstream import UpstreamCredentials

HASHED = "sha256:" + hashlib.sha256(b"sk-b").hexdigest()
KEYS = [
    ApiKey(key="sk-a", tenant="a"),
    ApiKey(key=HASHED, tenant="b", scopes=frozenset({KeyScope.ADMIN})),
]


def test_a_key_names_its_tenant_plain_or_hashed() -> None:
    auth = Authenticator(KEYS)
    assert auth.authenticate([(b"authorization", b"Bearer sk-a")]).tenant == "a"
    assert auth.authenticate([(b"authorization", b"bearer  sk-b ")]).tenant == "b"
    assert auth.authenticate([(b"x-api-key", b"sk-a")]).tenant == "a"


@pytest.mark.parametrize(
    "headers",
    [
        [],
        [(b"authorization", b"Bearer ")],
        [(b"authorization", b"Bearer sk-c")],
        [(b"authorization", b"Basic sk-a")],
        [(b"authorization", b"Bearer " + HASHED.encode())],
        [(b"x-api-key", b"")],
    ],
)
def test_nobody_else_gets_in(headers: list[tuple[bytes, bytes]]) -> None:
    with pytest.raises(Unauthenticated):
        Authenticator(KEYS).authenticate(headers)


def test_scopes() -> None:
    auth = Authenticator(KEYS)
    caller = auth.authenticate([(b"authorization", b"Bearer sk-a")])
    caller.require(KeyScope.CALL)
    with pytest.raises(Forbidden):
        caller.require(KeyScope.ADMIN)
    admin = auth.authenticate([(b"authorization", b"Bearer sk-b")])
    admin.require(KeyScope.CALL)
    admin.require(KeyScope.ADMIN)


def test_without_keys_everybody_is_the_default_tenant() -> None:
    caller = Authenticator().authenticate([])
    assert caller.tenant == "default"
    caller.require(KeyScope.ADMIN)


def test_a_callers_key_stays_between_it_and_us() -> None:
    assert Authenticator().upstream_credentials() == UpstreamCredentials(keep=True)
    assert Authenticator(KEYS).upstream_credentials() == UpstreamCredentials(keep=False)


@pytest.mark.parametrize(
    ("key", "complaint"), [("", "empty"), ("sha256:zz", "hexadecimal"), ("sha256:00", "64 hex digits")]
)
def test_a_malformed_key_is_refused_at_start(key: str, complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        Authenticator([ApiKey(key=key)])
