"""A changed configuration is taken over whole, or not at all; calls that are under way notice nothing."""

import asyncio
import json
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
import structlog
import yaml
from hypothesis import given
from hypothesis import strategies as st

from lifecycle.vocabulary import Mode
from proxy.app import Serving, serving
from proxy.auth import KeyScope
from proxy.config import Config, ModeRule
from proxy.config_reload import changes, is_taken_over
from proxy.config_source import ConfigSource, load_config
from proxy.keys import create_key
from tests.proxy.scripted_upstream import Exchange, ScriptedUpstream, openai_like
from tests.proxy.whole_proxy import SECONDS

BASE: dict[str, Any] = {
    "data": {"port": 0},
    "admin": {"port": 0},
    "log_url": "memory:",
    "mode": "observe",
}


@pytest.fixture(autouse=True)
def defaults_of_logging() -> Iterator[None]:
    yield
    structlog.reset_defaults()


class Running:
    """A proxy on a file that a test writes, and its admin client."""

    def __init__(self, up: Serving, file: Path, url: str, admin: httpx.AsyncClient) -> None:
        self.up = up
        self.file = file
        self.admin = admin
        self._url = url

    def write(self, **changes: Any) -> None:
        """Replaced as a whole, as editors and Kubernetes do."""
        beside = self.file.with_suffix(".new")
        beside.write_text(yaml.safe_dump({**BASE, "upstream": {"url": self._url}, **changes}))
        beside.replace(self.file)

    async def reloaded(self, **changes: Any) -> dict[str, Any]:
        self.write(**changes)
        answer = await self.admin.post("/kv/v1/config/reload")
        document: dict[str, Any] = answer.json()
        return document

    async def metric(self, name: str) -> str:
        text = (await self.admin.get("/metrics")).text
        return next(line.rpartition(" ")[2] for line in text.splitlines() if line.startswith(f"{name} "))


@asynccontextmanager
async def running(tmp_path: Path, script: Any = openai_like, **first: Any) -> AsyncIterator[Running]:
    file = tmp_path / "kvtether.yaml"
    async with ScriptedUpstream(script) as engine:
        file.write_text(yaml.safe_dump({**BASE, "upstream": {"url": engine.url}, **first}))
        source = ConfigSource(lambda: load_config(file, {}, {}), file)
        async with (
            serving(source.load(), source=source) as up,
            httpx.AsyncClient(base_url=up.admin_url, timeout=SECONDS) as admin,
        ):
            yield Running(up, file, engine.url, admin)


async def test_what_can_change_under_way_changes_at_once(tmp_path: Path) -> None:
    async with running(tmp_path) as it:
        runtime = it.up.runtime
        status = await it.reloaded(
            mode="enforce",
            modes=[{"mode": "bypass", "tenant": "t"}],
            holdout=0.5,
            limits={"concurrent_calls": 3},
            tenants=[{"name": "big", "limits": {"concurrent_calls": 9}}],
            harm={"share": 0.5},
        )
        assert status["config"] == {"file": str(it.file), "problem": "", "needs_restart": []}
        assert (status["mode"], status["holdout"]) == ("enforce", 0.5)
        assert runtime.modes.of("m", "t") is Mode.BYPASS
        assert runtime.limits.of("x").concurrent_calls == 3
        assert runtime.limits.of("big").concurrent_calls == 9
        assert runtime.reporting.report.harm.budget.share == 0.5
        await it.reloaded()
        assert runtime.modes.of("m", "t") is Mode.OBSERVE
        assert runtime.limits.of("big").concurrent_calls is None


async def test_a_wrong_file_changes_nothing_and_is_told_everywhere(tmp_path: Path) -> None:
    async with running(tmp_path, mode="enforce", limits={"pins": 5}) as it:
        with structlog.testing.capture_logs() as said:
            status = await it.reloaded(mode="bypass", limits={"pins": 1}, holdout=7)
        assert f"{it.file}:" in status["config"]["problem"]
        assert "holdout" in status["config"]["problem"]
        assert it.up.runtime.modes.of("m", "t") is Mode.ENFORCE
        assert it.up.runtime.limits.of("t").pins == 5
        assert [line["log_level"] for line in said if "not taken over" in line["event"]] == ["error"]
        assert await it.metric("kvtether_config_refused") == "1.0"
        ready = (await it.admin.get("/readyz")).json()
        assert any("holdout" in warning and "stays in force" in warning for warning in ready["warnings"])
        it.file.unlink()
        status = (await it.admin.post("/kv/v1/config/reload")).json()
        assert "No such file" in status["config"]["problem"]
        status = await it.reloaded(mode="bypass", limits={"pins": 1})
        assert (status["config"]["problem"], status["warnings"]) == ("", [])
        assert it.up.runtime.modes.of("m", "t") is Mode.BYPASS
        assert await it.metric("kvtether_config_refused") == "0.0"


async def test_what_needs_a_restart_is_named_and_waits(tmp_path: Path) -> None:
    async with running(tmp_path) as it:
        config = it.up.runtime.config
        status = await it.reloaded(
            mode="enforce",
            log_url="sqlite:///x.db",
            data={"port": 1},
            retention_hours=1,
        )
        assert sorted(status["config"]["needs_restart"]) == ["data.port", "log_url", "retention_hours"]
        assert status["mode"] == "enforce", "the rest is in force"
        assert any("log_url" in w and "restart" in w for w in status["warnings"])
        assert it.up.runtime.config is config
        assert await it.metric("kvtether_config_waiting") == "3.0"
        status = await it.reloaded(mode="enforce")
        assert status["warnings"] == []


async def test_a_tenant_gets_a_cache_of_its_own_at_once_and_keeps_it_until_a_restart(tmp_path: Path) -> None:
    salts: list[object] = []

    async def script(exchange: Exchange) -> None:
        if exchange.method == "POST":
            salts.append(json.loads(await exchange.read_body()).get("cache_salt"))
            await exchange.respond_json({"choices": []})
        else:
            await openai_like(exchange)

    shared, own = ([{"name": "default", "isolation": each}] for each in ("shared", "salt"))
    async with (
        running(tmp_path, script) as it,
        httpx.AsyncClient(base_url=it.up.data_url, timeout=SECONDS) as data,
    ):
        for tenants, needs_restart in (([], []), (own, []), (shared, ["tenants[].isolation"]), (own, [])):
            status = await it.reloaded(tenants=tenants)
            assert status["config"]["needs_restart"] == needs_restart
            await data.post("/v1/chat/completions", json={"model": "m", "messages": []})
        without, *with_salt = salts
        assert without is None
        assert with_salt[0]
        assert len(set(with_salt)) == 1


async def test_what_was_set_at_run_time_stays_unless_the_file_says_otherwise(tmp_path: Path) -> None:
    async with running(tmp_path) as it:
        await it.admin.patch("/kv/v1/config", json={"mode": "enforce"})
        assert (await it.reloaded(limits={"pins": 1}))["mode"] == "enforce"
        assert (await it.reloaded(mode="bypass"))["mode"] == "bypass"


async def test_the_file_is_looked_at_by_itself(tmp_path: Path) -> None:
    async with running(tmp_path) as it:
        it.write(mode="bypass")
        async with asyncio.timeout(SECONDS):
            while it.up.runtime.modes.of("m", "t") is not Mode.BYPASS:
                await it.admin.get("/livez")


async def test_another_keys_file_is_followed_or_refused(tmp_path: Path) -> None:
    first, second = tmp_path / "a.json", tmp_path / "b.json"
    scopes = frozenset({KeyScope.ADMIN})
    _, old, _ = create_key(first, "ops", scopes, 1)
    _, new, _ = create_key(second, "ops", scopes, 1)
    async with running(tmp_path, keys_file=str(first)) as it:
        it.admin.headers["authorization"] = f"Bearer {old}"
        status = await it.reloaded(keys_file=str(tmp_path / "nowhere.json"), mode="bypass")
        assert "nowhere.json is not there" in status["config"]["problem"]
        assert status["mode"] == "observe", "nothing of it is taken over"
        it.write(keys_file=str(second))
        await it.admin.post("/kv/v1/config/reload")
        assert (await it.admin.get("/kv/v1/status")).status_code == 401
        it.admin.headers["authorization"] = f"Bearer {new}"
        assert (await it.admin.get("/kv/v1/status")).json()["config"]["problem"] == ""
        _, third, _ = create_key(second, "ops", scopes, 2)
        it.admin.headers["authorization"] = f"Bearer {third}"
        async with asyncio.timeout(SECONDS):
            while (await it.admin.get("/kv/v1/status")).status_code == 401:
                pass


async def test_calls_under_way_go_on(tmp_path: Path) -> None:
    go_on = asyncio.Event()

    async def script(exchange: Exchange) -> None:
        if exchange.method == "POST":
            await exchange.read_body()
            await exchange.start_stream()
            await exchange.chunk(b"data: 1\n\n")
            await go_on.wait()
            await exchange.chunk(b"data: 2\n\n")
            await exchange.end_stream()
        else:
            await openai_like(exchange)

    async with (
        running(tmp_path, script) as it,
        httpx.AsyncClient(base_url=it.up.data_url, timeout=SECONDS) as data,
        data.stream("POST", "/v1/chat/completions", json={"model": "m", "messages": []}) as answer,
    ):
        pieces = answer.aiter_bytes()
        assert await anext(pieces) == b"data: 1\n\n"
        await it.reloaded(mode="bypass", limits={"concurrent_calls": 0})
        assert (await data.post("/v1/chat/completions", json={})).status_code == 429
        go_on.set()
        assert [piece async for piece in pieces] == [b"data: 2\n\n"]


configs = st.builds(
    Config,
    mode=st.sampled_from(Mode),
    holdout=st.sampled_from([0.0, 0.5]),
    log_url=st.sampled_from(["memory:", "sqlite:///x"]),
    modes=st.sampled_from([(), (ModeRule(mode=Mode.BYPASS),)]),
    retention_hours=st.sampled_from([1.0, 2.0]),
)


@given(configs, configs)
def test_every_difference_is_named_once(old: Config, new: Config) -> None:
    found = changes(old, new)
    assert (found == []) == (old == new)
    assert len(set(found)) == len(found)
    assert changes(new, old) == found
    assert {name for name in found if not is_taken_over(name)} <= {"log_url", "retention_hours"}
