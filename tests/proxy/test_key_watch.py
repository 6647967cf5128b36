"""The keys file of a proxy that runs: made keys open, revoked ones do not, a bad file changes nothing."""

import asyncio
from pathlib import Path

import pytest

from proxy.app import serving
from proxy.auth import KeyScope
from proxy.config import Config, InvalidConfig, Listener, UpstreamConfig
from proxy.key_watch import is_loopback
from proxy.keys import create_key, revoke_key
from tests.proxy.whole_proxy import SECONDS, Whole, whole_proxy

NOWHERE = UpstreamConfig(url="http://127.0.0.1:9")
CALL, ADMIN = frozenset({KeyScope.CALL}), frozenset({KeyScope.ADMIN})


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


async def until_answered(it: Whole, key: str, status: int) -> None:
    """The proxy looks at the file by itself."""
    async with asyncio.timeout(SECONDS):
        while (await it.data.get("/v1/models", headers=bearer(key))).status_code != status:
            pass


async def test_keys_are_made_and_revoked_while_it_runs(tmp_path: Path) -> None:
    path = tmp_path / "keys.json"
    first, key, _ = create_key(path, "a", CALL, 1)
    _, admin, _ = create_key(path, "ops", ADMIN, 1)
    async with whole_proxy(tmp_path, keys_file=str(path)) as it:
        assert (await it.data.get("/v1/models")).status_code == 401
        assert (await it.data.get("/v1/models", headers=bearer(key))).status_code == 200
        assert (await it.admin.get("/kv/v1/contexts", headers=bearer(key))).status_code == 403
        assert (await it.admin.get("/kv/v1/contexts", headers=bearer(admin))).status_code == 200
        assert (await it.data.post("/reset_prefix_cache", headers=bearer(key))).status_code == 403
        _, later, _ = create_key(path, "b", CALL, 2)
        await until_answered(it, later, 200)
        revoke_key(path, first.id, 3)
        await until_answered(it, key, 401)
        assert (await it.data.get("/v1/models", headers=bearer(later))).status_code == 200


async def test_a_file_that_is_damaged_or_gone_changes_nothing_and_is_told(tmp_path: Path) -> None:
    path = tmp_path / "keys.json"
    _, key, _ = create_key(path, "a", CALL, 1)
    good = path.read_bytes()
    async with whole_proxy(tmp_path, keys_file=str(path)) as it:
        for damage in (lambda: path.write_bytes(good[:-20]), path.unlink):
            damage()
            await it.runtime.keys.look()
            assert (await it.data.get("/v1/models", headers=bearer(key))).status_code == 200
            assert (await it.data.get("/v1/models")).status_code == 401
            ready = (await it.admin.get("/readyz")).json()
            assert "keys" in ready["warnings"][0]
        path.write_bytes(good)
        await it.runtime.keys.look()
        assert (await it.admin.get("/readyz")).json()["warnings"] == []


async def test_the_first_key_ends_the_time_without_keys(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    async with whole_proxy(tmp_path) as it:
        assert (await it.data.get("/v1/models")).status_code == 200
        record, key, _ = create_key(tmp_path / "kvtether.keys.json", "a", CALL, 1)
        await it.runtime.keys.look()
        assert (await it.data.get("/v1/models")).status_code == 401
        assert (await it.data.get("/v1/models", headers=bearer(key))).status_code == 200
        revoke_key(tmp_path / "kvtether.keys.json", record.id, 2)
        await it.runtime.keys.look()
        for headers in ({}, bearer(key)):
            assert (await it.data.get("/v1/models", headers=headers)).status_code == 401


@pytest.mark.parametrize("content", [None, "{}"])
async def test_a_named_file_that_cannot_be_used_stops_the_start(tmp_path: Path, content: str | None) -> None:
    path = tmp_path / "keys.json"
    if content is not None:
        path.write_text(content)
    config = Config(Listener(port=0), Listener(port=0), NOWHERE, log_url="memory:", keys_file=str(path))
    with pytest.raises(InvalidConfig, match="keys_file"):
        async with serving(config):
            pass


@pytest.mark.parametrize(
    ("host", "here"),
    [
        ("127.0.0.1", True),
        ("127.8.0.1", True),
        ("::1", True),
        ("localhost", True),
        ("0.0.0.0", False),
        ("::", False),
        ("", False),
        ("10.0.0.5", False),
        ("localhost.example", False),
    ],
)
def test_loopback_is_what_only_this_machine_reaches(host: str, here: bool) -> None:
    assert is_loopback(host) is here
