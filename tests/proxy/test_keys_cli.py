"""`kvtether keys` beside a proxy that runs."""

import asyncio
import re
from pathlib import Path

import httpx
import pytest
from typer.testing import CliRunner

from proxy.cli import app
from tests.lifecycle.fake_cache import FakeCache
from tests.proxy.scripted_upstream import ScriptedUpstream
from tests.proxy.test_cli import SECONDS, run, served
from tests.proxy.toy_model import ToyEngine


@pytest.fixture(autouse=True)
def in_a_directory_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def said(*arguments: str, status: int = 0) -> tuple[str, str]:
    """What a command printed on standard output and on standard error."""
    result = CliRunner().invoke(app, ["keys", *arguments])
    assert result.exit_code == status, result.output
    return result.stdout, result.stderr


async def test_a_key_is_created_listed_used_and_revoked_without_a_restart(tmp_path: Path) -> None:
    (tmp_path / "kvtether.yaml").write_text("keys_file: secrets.json\nlog_url: 'memory:'\n")
    key, told = said("create", "--tenant", "acme")
    key = key.removesuffix("\n")
    assert re.fullmatch(r"kvt-[-\w]{43}", key)
    assert "acme" in told
    assert "first" in told
    admin_key, told = said("create", "--tenant", "ops", "--scope", "admin")
    assert "first" not in told
    listed, _ = said("list")
    assert re.search(r"\w+\s+acme\s+call\s+\d{4}-", listed)
    assert key not in listed
    key_id = next(line.split()[0] for line in listed.splitlines() if " acme " in line)
    async with (
        ScriptedUpstream(ToyEngine(FakeCache()).script) as engine,
        served(tmp_path, "--upstream", engine.url) as (data, admin),
        httpx.AsyncClient(timeout=SECONDS) as client,
    ):
        models, headers = f"{data}/v1/models", {"authorization": f"Bearer {key}"}
        assert (await client.get(models)).status_code == 401
        assert (await client.get(models, headers=headers)).status_code == 200
        operator = {"authorization": f"Bearer {admin_key.strip()}"}
        assert (await client.get(f"{admin}/kv/v1/tiers", headers=operator)).status_code == 200
        assert (await client.get(f"{admin}/kv/v1/tiers", headers=headers)).status_code == 403
        revoked = await run(tmp_path, "keys", "revoke", key_id)
        assert revoked == (0, f"key {key_id} of tenant acme is revoked\n")
        async with asyncio.timeout(SECONDS):
            while (await client.get(models, headers=headers)).status_code != 401:
                pass
    row = next(line for line in said("list")[0].splitlines() if " acme " in line)
    assert len(re.findall(r"\d{4}-\d\d-\d\dT", row)) == 2


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["list"], "no key was made yet"),
        (["revoke", "x"], "no key was made yet"),
        (["create", "--tenant", "a/b"], "tenant"),
        (["create", "--file", "nowhere/keys.json"], "nowhere"),
        (["list", "--config", "wrong.yaml"], "urll"),
    ],
)
def test_what_is_wrong_is_said_in_a_line(tmp_path: Path, arguments: list[str], named: str) -> None:
    (tmp_path / "wrong.yaml").write_text("upstream: {urll: x}")
    out, told = said(*arguments, status=2)
    assert named in told
    assert out == ""
