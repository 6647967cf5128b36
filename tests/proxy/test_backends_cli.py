"""The commands for engines, in this process, against a proxy that runs."""

import asyncio
from pathlib import Path

from typer.testing import CliRunner

from proxy.backends_cli import backends_app
from tests.proxy.several_engines import several_engines


async def said(*arguments: str) -> tuple[int, str]:
    """Exit status and output of one command."""
    result = await asyncio.to_thread(
        CliRunner().invoke, backends_app, list(arguments), env={"COLUMNS": "200", "NO_COLOR": "1"}
    )
    return result.exit_code, result.output


async def test_list_drain_and_resume(tmp_path: Path) -> None:
    async with several_engines(tmp_path) as it:
        there = ("--admin", it.up.admin_url)
        status, text = await said("list", *there)
        assert status == 0
        assert [line.split()[:2] for line in text.splitlines()[1:]] == [["a", "up"], ["b", "up"]]
        assert it.engines["b"].url in text
        assert await said("drain", "a", *there) == (0, "a drains: 0 calls under way, 0 contexts\n")
        assert it.backend("a").draining
        assert await said("resume", "a", *there) == (0, "a is up\n")
        status, text = await said("drain", "x/y", *there)
        assert status == 2
        assert "error" in text


async def test_a_proxy_that_is_not_there_is_said() -> None:
    status, text = await said("list", "--admin", "http://127.0.0.1:9")
    assert status == 2
    assert "127.0.0.1:9" in text
