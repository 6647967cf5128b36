"""`kvtether keys` beside a proxy that runs."""

import asyncio
import re
from pathlib import Path

import httpx

from tests.lifecycle.fake_cache import FakeCache
from tests.proxy.scripted_upstream import ScriptedUpstream
from tests.proxy.test_cli import SECONDS, run, served, start
from tests.proxy.toy_model import ToyEngine


async def printed(cwd: Path, *arguments: str) -> tuple[int, str, str]:
    """Status, standard output, standard error."""
    process = await start(cwd, *arguments)
    out, err = await asyncio.wait_for(process.communicate(), SECONDS)
    assert process.returncode is not None
    return process.returncode, out.decode(), err.decode()


async def test_a_key_is_created_listed_used_and_revoked_without_a_restart(tmp_path: Path) -> None:
    (tmp_path / "kvtether.yaml").write_text("keys_file: secrets.json\nlog_url: 'memory:'\n")
    status, key, told = await printed(tmp_path, "keys", "create", "--tenant", "acme")
    key = key.removesuffix("\n")
    assert status == 0
    assert re.fullmatch(r"kvt-[-\w]{43}", key)
    assert "acme" in told
    assert "first" in told
    status, admin_key, told = await printed(tmp_path, "keys", "create", "--tenant", "ops", "--scope", "admin")
    assert "first" not in told
    status, said = await run(tmp_path, "keys", "list")
    assert status == 0
    assert re.search(r"\w+\s+acme\s+call\s+\d{4}-", said)
    assert key not in said
    key_id = next(line.split()[0] for line in said.splitlines() if " acme " in line)
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
        status, said = await run(tmp_path, "keys", "revoke", key_id)
        assert (status, said) == (0, f"key {key_id} of tenant acme is revoked\n")
        async with asyncio.timeout(SECONDS):
            while (await client.get(models, headers=headers)).status_code != 401:
                pass
    status, said = await run(tmp_path, "keys", "list")
    assert len(re.findall(r"\d{4}-\d\d-\d\dT", next(x for x in said.splitlines() if " acme " in x))) == 2


async def test_what_is_wrong_is_said_in_a_line(tmp_path: Path) -> None:
    for arguments, named in (
        (("keys", "list"), "no key was made yet"),
        (("keys", "revoke", "x"), "no key was made yet"),
        (("keys", "create", "--tenant", "a/b"), "tenant"),
        (("keys", "create", "--file", "nowhere/keys.json"), "nowhere"),
    ):
        status, said = await run(tmp_path, *arguments)
        assert status == 2, said
        assert named in said
        assert "Traceback" not in said
