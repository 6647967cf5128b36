"""The command line, as processes of its own: serve, switch, look, and say what is wrong."""

import asyncio
import json
import os
import re
import signal
import sys
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import jsonschema
import pytest

from tests.lifecycle.fake_cache import FakeCache
from tests.proxy.api_keys import sha
from tests.proxy.scripted_upstream import ScriptedUpstream
from tests.proxy.toy_model import NAME, ToyEngine, write_model
from tests.proxy.whole_proxy import lifecycle, user

COMMAND = [sys.executable, "-c", "from proxy.cli import main; main()"]
ROOT = str(Path(__file__).resolve().parents[2])
SECONDS = 60.0

Environment = Mapping[str, str]


async def start(cwd: Path, *arguments: str, env: Environment | None = None) -> asyncio.subprocess.Process:
    clean = {k: v for k, v in os.environ.items() if not k.startswith("KVTETHER_")}
    return await asyncio.create_subprocess_exec(
        *COMMAND,
        *arguments,
        cwd=cwd,
        env={**clean, "PYTHONPATH": ROOT, "NO_COLOR": "1", **(env or {})},
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )


async def run(cwd: Path, *arguments: str, env: Environment | None = None) -> tuple[int, str]:
    """Exit status and what was printed."""
    process = await start(cwd, *arguments, env=env)
    out, err = await asyncio.wait_for(process.communicate(), SECONDS)
    assert process.returncode is not None
    return process.returncode, (out + err).decode()


@asynccontextmanager
async def served(
    cwd: Path, *arguments: str, env: Environment | None = None
) -> AsyncIterator[tuple[str, str]]:
    """`kvtether serve` on free ports; gives both addresses. Ends on SIGTERM, with status 0."""
    process = await start(cwd, "serve", "--port", "0", "--admin-port", "0", *arguments, env=env)
    assert process.stderr is not None
    try:
        async with asyncio.timeout(SECONDS):
            told = ""
            while not (found := re.search(r'"data":"(\S+?)","admin":"(\S+?)"', told)):
                line = await process.stderr.readline()
                assert line, told
                told += line.decode()
        yield found[1], found[2]
        process.send_signal(signal.SIGTERM)
        async with asyncio.timeout(SECONDS):
            _, err = await process.communicate()
        assert process.returncode == 0, err.decode()
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


@pytest.mark.long
async def test_a_proxy_from_start_to_end_with_every_command(tmp_path: Path) -> None:
    path = str(write_model(tmp_path / "model"))
    async with ScriptedUpstream(ToyEngine(FakeCache()).script) as engine:
        arguments = ("--upstream", engine.url, "--model-path", path)
        async with (
            served(tmp_path, *arguments, env={"KVTETHER_ADMIN_KEY": "unused"}) as (data, admin),
            httpx.AsyncClient(timeout=SECONDS) as client,
        ):
            body = {"model": NAME, "messages": [user("hi")]}
            answer = await client.post(f"{data}/v1/chat/completions", json=body, headers=lifecycle(ctx="a"))
            assert answer.json()["choices"][0]["message"]["content"] == "ok"
            assert answer.headers["x-kv-context"] == "a"
            tail = await start(tmp_path, "tail", "--after", "0", "--admin", admin)
            assert tail.stdout is not None
            line = await asyncio.wait_for(tail.stdout.readline(), SECONDS)
            event = json.loads(line)
            assert event["position"] == 1
            assert "hi" not in line.decode().split('"')
            assert await run(tmp_path, "bypass", "--admin", admin) == (0, "bypass is on\n")
            answer = await client.post(f"{data}/v1/chat/completions", json=body)
            assert "x-kv-context" not in answer.headers
            assert await run(tmp_path, "bypass", "--off", "--admin", admin) == (0, "bypass is off\n")
            status, said = await run(tmp_path, "release-all", "--admin", admin)
            assert (status, said) == (0, "released 0 pins, 0 holds in the cache\n")
            tail.terminate()
            await tail.communicate()
        assert (tmp_path / "kvtether.db").exists()
        status, said = await run(tmp_path, "doctor", *arguments)
        assert status == 1
        assert f"model {NAME}: mapped" in said
        assert re.search(r"fix\s+level: 0", said)
        assert re.search(r"ok\s+event log: \S+, \d+ events", said)


async def test_a_file_with_keys_is_found_and_the_admin_key_opens(tmp_path: Path) -> None:
    async with ScriptedUpstream(ToyEngine(FakeCache()).script) as engine:
        (tmp_path / "kvtether.yaml").write_text(
            f"upstream: {{url: '{engine.url}'}}\n"
            "log_url: 'memory:'\n"
            f"api_keys: [{{tenant: ops, key_sha256: {sha('k')}, admin: true}}]\n"
        )
        async with served(tmp_path) as (_, admin):
            status, said = await run(tmp_path, "bypass", "--admin", admin)
            assert status == 2
            assert "401" in said
            assert await run(tmp_path, "bypass", "--admin", admin, env={"KVTETHER_ADMIN_KEY": "k"}) == (
                0,
                "bypass is on\n",
            )


async def test_what_is_wrong_is_said_in_a_line(tmp_path: Path) -> None:
    (tmp_path / "wrong.yaml").write_text("upstream: {urll: x}")
    (tmp_path / "open.yaml").write_text("data: {host: 0.0.0.0, port: 0}\nadmin: {port: 0}")
    for arguments, named in (
        (("serve", "--config", "open.yaml"), "api_keys"),
        (("doctor", "--config", "wrong.yaml"), "urll"),
        (("tail", "--admin", "http://127.0.0.1:9"), "127.0.0.1:9"),
        (("serve", "--holdout", "some"), "--holdout some"),
        (("serve", "--holdout", "500%"), "holdout"),
    ):
        status, said = await run(tmp_path, *arguments)
        assert status == 2, said
        assert named in said
        assert "Traceback" not in said


async def test_the_schema_is_printed(tmp_path: Path) -> None:
    status, said = await run(tmp_path, "config", "schema")
    assert status == 0
    jsonschema.Draft202012Validator.check_schema(json.loads(said))


async def test_the_report_is_asked_of_the_running_proxy(tmp_path: Path) -> None:
    path = str(write_model(tmp_path / "model"))
    async with ScriptedUpstream(ToyEngine(FakeCache()).script) as engine:
        arguments = ("--upstream", engine.url, "--model-path", path)
        async with (
            served(tmp_path, *arguments) as (data, admin),
            httpx.AsyncClient(timeout=SECONDS) as client,
        ):
            body = {"model": NAME, "messages": [user("hi")]}
            await client.post(
                f"{data}/v1/chat/completions", json=body, headers=lifecycle(ctx="a", agent="coder")
            )
            document: dict[str, Any] = {}
            async with asyncio.timeout(SECONDS):
                while not document.get("groups", {}).get("coder", {}).get("calls"):
                    asked = ("report", "--since", "1h", "--by", "agent", "--json", "--admin", admin)
                    status, said = await run(tmp_path, *asked)
                    assert status == 0, said
                    document = json.loads(said)
            assert document["total"]["prompt_tokens"] > 0
            status, said = await run(tmp_path, "report", "--by", "agent", "--admin", admin)
            assert status == 0
            assert "Asked for 1 d 0 h, covers" in said
            assert re.search(r"coder\W+1\b", said)
            assert "not enough data" in said
            status, said = await run(tmp_path, "report", "--since", "soon", "--admin", admin)
            assert status == 2
            assert "a span like 90s, 15m, 24h or 7d is expected" in said


async def test_a_hangup_reads_the_file_anew_and_ends_nothing(tmp_path: Path) -> None:
    async with ScriptedUpstream(ToyEngine(FakeCache()).script) as engine:
        file = tmp_path / "kvtether.yaml"
        written = f"upstream: {{url: '{engine.url}'}}\nlog_url: 'memory:'\nmode: "
        file.write_text(f"{written}observe\n")
        process = await start(tmp_path, "serve", "--port", "0", "--admin-port", "0")
        assert process.stderr is not None
        try:
            said: dict[str, Any] = {}

            async def until(event: str) -> None:
                assert process.stderr is not None
                while said.get("event") != event:
                    said.clear()
                    said.update(json.loads(await process.stderr.readline()))

            async with asyncio.timeout(SECONDS), httpx.AsyncClient(timeout=SECONDS) as client:
                await until("serving")
                admin = said["admin"]
                file.write_text(f"{written}enforce\n")
                process.send_signal(signal.SIGHUP)
                await until("the configuration was read")
                assert (await client.get(f"{admin}/kv/v1/status")).json()["mode"] == "enforce"
                process.send_signal(signal.SIGTERM)
                await process.communicate()
            assert process.returncode == 0
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()
