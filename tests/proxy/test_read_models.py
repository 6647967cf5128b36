"""The read models beside a proxy: rows appear, nothing waits for them, and one command makes them anew."""

import asyncio
import re
from pathlib import Path
from typing import Any

import pytest

from lifecycle.store.opening import open_log
from proxy.config import Config, InvalidConfig
from proxy.read_models import rebuild
from proxy.runtime import open_runtime
from tests.conformance.read_model_rows import rows_at, until_rows
from tests.lifecycle.store.postgres_process import PostgresProcess, new_shared_database
from tests.lifecycle.store.redis_process import place_in_shared_redis
from tests.proxy.test_cli import run
from tests.proxy.whole_proxy import Whole, lifecycle, user, whole_proxy

SECONDS = 30.0
LIST = [user("something that is long enough to fill some chunks")]


def sqlite_log(tmp_path: Path) -> str:
    return f"sqlite:///{tmp_path}/log.db"


async def lag_of(it: Whole) -> float:
    metrics = (await it.admin.get("/metrics")).text
    found = re.search(r"^kvtether_read_models_lag_events (\S+)$", metrics, re.MULTILINE)
    assert found is not None
    return float(found[1])


async def caught_up(it: Whole) -> None:
    async with asyncio.timeout(SECONDS):
        while True:
            if not await lag_of(it) and not (await told(it))["warnings"]:
                return
            await asyncio.sleep(0.05)


async def told(it: Whole) -> dict[str, Any]:
    answer: dict[str, Any] = (await it.admin.get("/readyz")).json()
    return answer


async def warned(it: Whole) -> dict[str, Any]:
    async with asyncio.timeout(SECONDS):
        while True:
            if (ready := await told(it))["warnings"]:
                return ready
            await asyncio.sleep(0.05)


@pytest.mark.parametrize("log", ["sqlite", "redis"])
async def test_what_a_client_does_can_be_queried(tmp_path: Path, log: str) -> None:
    log_url = sqlite_log(tmp_path) if log == "sqlite" else await place_in_shared_redis(tmp_path)
    url = await new_shared_database()
    async with whole_proxy(tmp_path, log_url=log_url, read_models_url=url) as it:
        await it.chat(LIST, lifecycle(ctx="a", call="1", agent="coder"))
        await caught_up(it)
        rows = await rows_at(url)
        (context,) = rows["kv_contexts"].values()
        assert (context["context_id"], context["agent"], context["messages"]) == ("a", "coder", 1)
        assert context["tokens"] == rows["kv_calls"][context["uid"], "1", 1]["mapped_tokens"] > 0
        assert (await told(it))["warnings"] == []
        assert await it.runtime.read_models.position() == it.runtime.tracker.contexts.position


async def test_without_a_database_there_is_nothing_to_wait_for(tmp_path: Path) -> None:
    async with whole_proxy(tmp_path) as it:
        await it.chat(LIST, lifecycle(ctx="a", call="1"))
        assert await it.runtime.read_models.position() is None
        assert (await told(it))["warnings"] == []
        assert "read_models" not in (await it.admin.get("/metrics")).text


async def test_calls_go_on_while_the_database_is_away(tmp_path: Path) -> None:
    server = PostgresProcess()
    try:
        await asyncio.to_thread(server.start)
        url = await server.new_database()
        async with whole_proxy(tmp_path, log_url=sqlite_log(tmp_path), read_models_url=url) as it:
            await it.chat(LIST, lifecycle(ctx="a", call="1"))
            await caught_up(it)
            before = await it.runtime.read_models.position()
            server.kill()
            for number in range(5):
                answer = await it.chat(LIST, lifecycle(ctx="a", call=f"away {number}"))
                assert answer.status_code == 200
            ready = await warned(it)
            assert ready["status"] == "ready"
            assert ready["control"]
            assert "unavailable" in ready["warnings"][0]
            assert "read models" not in str(ready["problems"])
            assert await lag_of(it) > 0
            assert await it.runtime.read_models.position() == before
            await asyncio.to_thread(server.start)
            await caught_up(it)
            rows = await rows_at(url)
            assert len(rows["kv_calls"]) == 6
    finally:
        server.remove()


async def test_the_command_rebuilds_beside_a_running_proxy(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/rows.db"
    env = {"KVTETHER_LOG_URL": sqlite_log(tmp_path), "KVTETHER_READ_MODELS_URL": url}
    async with whole_proxy(tmp_path, log_url=sqlite_log(tmp_path), read_models_url=url) as it:
        await it.chat(LIST, lifecycle(ctx="a", call="1"))
        await caught_up(it)
        before = await rows_at(url)
        status, printed = await run(tmp_path, "rebuild", env=env)
        assert status == 0, printed
        assert "up to position" in printed
        assert await rows_at(url) == before
        await it.chat([*LIST, user("more")], lifecycle(ctx="a", call="2"))
        await until_rows(url, lambda rows: len(rows["kv_calls"]) == 2)


async def test_a_rebuild_that_makes_no_sense_is_refused(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/rows.db"

    async def refusal(**settings: str) -> str:
        with pytest.raises(InvalidConfig) as refused:
            await rebuild(Config(**settings), lambda _at, _of: None)  # type: ignore[arg-type]
        return str(refused.value)

    assert "no read models" in await refusal(log_url=sqlite_log(tmp_path))
    assert "there is no" in await refusal(log_url=sqlite_log(tmp_path), read_models_url=url)
    assert not (tmp_path / "log.db").exists()
    assert "is lost" in await refusal(log_url="memory:", read_models_url=url)
    await (await open_log(sqlite_log(tmp_path))).event_log.close()
    assert "is empty" in await refusal(log_url=sqlite_log(tmp_path), read_models_url=url)
    assert not (tmp_path / "rows.db").exists()


@pytest.mark.parametrize(
    ("url", "named"),
    [
        ("mysql://root@localhost/kv", "postgresql://user@host:5432/database"),
        ("postgresql://user:hidden@host/kv?sslkey=x", "sslkey"),
        ("sqlite:///{path}/sub/../log.db", "not the log's own file"),
    ],
)
async def test_a_url_that_cannot_be_used_stops_the_start(tmp_path: Path, url: str, named: str) -> None:
    config = Config(log_url=sqlite_log(tmp_path), read_models_url=url.replace("{path}", str(tmp_path)))
    with pytest.raises(InvalidConfig, match=named) as refused:
        async with open_runtime(config):
            pass
    assert "hidden" not in str(refused.value)
