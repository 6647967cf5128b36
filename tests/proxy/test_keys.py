"""Keys at rest: nothing in the file opens anything, and writers do not lose each other's keys."""

import json
import os
import stat
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from proxy.auth import ApiKey, Authenticator, KeyScope
from proxy.errors import Unauthenticated
from proxy.keys import InvalidKeys, create_key, read_keys, revoke_key

CALL = frozenset({KeyScope.CALL})
SECOND = 10**9


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "keys.json"


def authenticator(path: Path, *keys: ApiKey) -> Authenticator:
    auth = Authenticator(keys)
    auth.take(read_keys(path).valid())
    return auth


def bearer(key: str) -> list[tuple[bytes, bytes]]:
    return [(b"authorization", b"Bearer " + key.encode())]


def test_a_created_key_opens_its_tenant_until_it_is_revoked(path: Path) -> None:
    record, key, first = create_key(path, "acme", CALL, SECOND)
    admin, admin_key, second = create_key(path, "ops", frozenset({KeyScope.ADMIN}), 2 * SECOND)
    assert (first, second) == (True, False)
    auth = authenticator(path)
    caller = auth.authenticate(bearer(key))
    assert (caller.tenant, caller.scopes) == ("acme", CALL)
    assert auth.authenticate([(b"x-api-key", admin_key.encode())]).tenant == "ops"
    revoked = revoke_key(path, record.id, 3 * SECOND)
    assert revoked.revoked is not None
    assert revoke_key(path, record.id, 9 * SECOND) == revoked
    auth = authenticator(path)
    with pytest.raises(Unauthenticated):
        auth.authenticate(bearer(key))
    assert auth.authenticate(bearer(admin_key)).tenant == "ops"
    assert [r.id for r in read_keys(path).keys] == [record.id, admin.id]


def test_the_file_holds_no_key_and_only_its_owner_reads_it(path: Path) -> None:
    _, key, _ = create_key(path, "acme", CALL, SECOND)
    assert key not in path.read_text()
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    (entry,) = json.loads(path.read_text())["keys"]
    auth = authenticator(path)
    for stolen in (entry["hash"], entry["id"], f"sha256:{entry['hash']}", key[:-1], ""):
        with pytest.raises(Unauthenticated):
            auth.authenticate(bearer(stolen))


def test_two_files_hash_a_key_otherwise(tmp_path: Path) -> None:
    salts = set()
    for name in ("a", "b"):
        create_key(tmp_path / name, "t", CALL, SECOND)
        salts.add(read_keys(tmp_path / name).salt)
    assert len(salts) == 2


def test_without_a_valid_key_the_file_lets_nobody_in(path: Path) -> None:
    record, key, _ = create_key(path, "acme", CALL, SECOND)
    revoke_key(path, record.id, SECOND)
    auth = authenticator(path)
    assert not auth.open
    for headers in (bearer(key), []):
        with pytest.raises(Unauthenticated):
            auth.authenticate(headers)


def test_keys_of_the_configuration_stay_beside_those_of_the_file(path: Path) -> None:
    _, key, _ = create_key(path, "filed", CALL, SECOND)
    auth = authenticator(path, ApiKey(key="sk-configured", tenant="configured"))
    assert auth.authenticate(bearer(key)).tenant == "filed"
    assert auth.authenticate(bearer("sk-configured")).tenant == "configured"


def test_writers_at_the_same_time_lose_nothing(path: Path) -> None:
    with ThreadPoolExecutor(8) as pool:
        made = list(pool.map(lambda n: create_key(path, f"t{n}", CALL, SECOND), range(40)))
    auth = authenticator(path)
    assert {auth.authenticate(bearer(key)).tenant for _, key, _ in made} == {f"t{n}" for n in range(40)}
    assert [name for name in os.listdir(path.parent) if name != path.name] == []


def test_a_change_keeps_the_files_mode(path: Path) -> None:
    create_key(path, "a", CALL, SECOND)
    path.chmod(0o640)
    create_key(path, "b", CALL, SECOND)
    assert stat.S_IMODE(path.stat().st_mode) == 0o640


def test_what_cannot_be_done_is_said(path: Path, tmp_path: Path) -> None:
    for tenant in ("", "a/b", "a\nb"):
        with pytest.raises(InvalidKeys, match="tenant"):
            create_key(path, tenant, CALL, SECOND)
    with pytest.raises(InvalidKeys, match="scope"):
        create_key(path, "t", frozenset(), SECOND)
    with pytest.raises(InvalidKeys, match="not there"):
        revoke_key(path, "x", SECOND)
    with pytest.raises(InvalidKeys, match="nowhere"):
        create_key(tmp_path / "nowhere" / "keys.json", "t", CALL, SECOND)
    create_key(path, "t", CALL, SECOND)
    with pytest.raises(InvalidKeys, match="no key 'x'"):
        revoke_key(path, "x", SECOND)


@pytest.mark.parametrize(
    "change",
    [
        {"format": 2},
        {"salt": "00"},
        {"salt": "zz"},
        {"more": 1},
        {"keys": [{"id": "x"}]},
        {"keys": "twice"},
    ],
)
def test_a_file_that_makes_no_sense_is_refused_whole(path: Path, change: dict[str, object]) -> None:
    create_key(path, "t", CALL, SECOND)
    document = json.loads(path.read_text())
    if change == {"keys": "twice"}:
        change = {"keys": document["keys"] * 2}
    path.write_text(json.dumps({**document, **change}))
    with pytest.raises(InvalidKeys, match=r"keys\.json"):
        read_keys(path)
    before = path.read_text()
    with pytest.raises(InvalidKeys):
        create_key(path, "t", CALL, SECOND)
    assert path.read_text() == before
