"""`kvtether setup`: printed by default, written when asked to, and clear about what it cannot do."""

import asyncio
from pathlib import Path

import pytest
from typer.testing import CliRunner

from proxy.cli import app
from tests.proxy.toy_model import NAME
from tests.proxy.whole_proxy import whole_proxy

NOWHERE = "http://127.0.0.1:1"


def run(home: Path, *arguments: str) -> tuple[int, str]:
    variables = {"HOME": str(home), "CODEX_HOME": None, "CLAUDE_CONFIG_DIR": None, "XDG_CONFIG_HOME": None}
    result = CliRunner().invoke(app, ["setup", *arguments], env=variables)
    return result.exit_code, result.output


@pytest.mark.parametrize("harness", ["codex", "claude-code", "opencode"])
def test_it_prints_then_writes_then_takes_out(tmp_path: Path, harness: str) -> None:
    told = [harness, "--model", "tiny", "--base-url", NOWHERE + "/v1/"]
    code, shown = run(tmp_path, *told)
    assert code == 0
    assert NOWHERE in shown
    assert "--write" in shown
    assert not list(tmp_path.rglob("*"))
    code, said = run(tmp_path, *told, "--write")
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert code == 0
    assert files
    assert all(str(path) in said for path in files)
    assert run(tmp_path, *told, "--write")[1].count("unchanged") == len(files)
    code, _ = run(tmp_path, harness, "--remove")
    assert code == 0
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]


@pytest.mark.parametrize("url", ["127.0.0.1:8700", "ftp://x", "http://", "http://x?y=1"])
def test_an_address_that_is_none_is_said_to_be_none(tmp_path: Path, url: str) -> None:
    code, said = run(tmp_path, "codex", "--write", "--base-url", url)
    assert code == 1
    assert "--base-url" in said
    assert not list(tmp_path.rglob("*"))


def test_a_broken_file_is_named_and_left_alone(tmp_path: Path) -> None:
    broken = tmp_path / ".claude" / "settings.json"
    broken.parent.mkdir()
    broken.write_text("{")
    code, said = run(tmp_path, "claude-code", "--write", "--base-url", NOWHERE)
    assert code == 1
    assert str(broken) in said.replace("\n", "")
    assert broken.read_text() == "{"


async def test_the_model_is_the_one_that_the_proxy_serves(tmp_path: Path) -> None:
    async with whole_proxy(tmp_path / "proxy") as it:
        shown = await asyncio.to_thread(run, tmp_path, "opencode", "--base-url", it.up.data_url)
        assert shown[0] == 0, shown
        assert f"kvtether/{NAME}" in shown[1]
