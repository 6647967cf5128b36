"""Clocks, the log's place, tokens and the collector: what is wrong is named with its fix."""

import os
import sqlite3
import time
from email.utils import formatdate
from pathlib import Path

import pytest

from lifecycle.store.redis_server import RedisServer
from proxy.config import BackendConfig, CacheConfig, Config, ModelConfig, TracingConfig, UpstreamConfig
from proxy.surroundings import look_around, sqlite_place
from tests.lifecycle.fake_cache import FakeCache
from tests.lifecycle.store.redis_process import place_in_shared_redis
from tests.proxy.otlp_collector import collector
from tests.proxy.scripted_upstream import Exchange, ScriptedUpstream
from tests.proxy.toy_model import NAME, ToyEngine, write_model

NOWHERE = UpstreamConfig(url="http://127.0.0.1:9")


async def found(config: Config) -> dict[str, tuple[bool, str]]:
    return {f.subject: (f.ok, f.text) for f in await look_around(config)}


@pytest.mark.parametrize(
    ("offset", "ok", "word"), [(0, True, "within"), (3600, False, "behind"), (-3600, False, "ahead of")]
)
async def test_a_clock_that_goes_wrong_is_told(tmp_path: Path, offset: int, ok: bool, word: str) -> None:
    async def script(exchange: Exchange) -> None:
        date = formatdate(time.time() + offset, usegmt=True).encode()
        await exchange.respond(200, b"{}", [(b"date", date)])

    async with (
        ScriptedUpstream(script, tmp_path / "engine.sock") as engine,
        ScriptedUpstream(script) as cache,
    ):
        config = Config(
            upstream=UpstreamConfig(url=engine.url),
            cache=CacheConfig(driver="lmcache_mp", coordinator_url=cache.url),
            log_url="memory:",
        )
        told = await found(config)
    for whose in ("upstream", "cache coordinator"):
        assert told[f"clock of {whose}"][0] is ok
        assert word in told[f"clock of {whose}"][1]


async def test_an_engine_that_wants_a_key_is_told_where_it_goes() -> None:
    async def script(exchange: Exchange) -> None:
        await exchange.respond(401, b"{}")

    async with ScriptedUpstream(script) as engine:
        ok, text = (await found(Config(upstream=UpstreamConfig(url=engine.url + "/v1"), log_url="memory:")))[
            "upstream key"
        ]
    assert not ok
    assert "in upstream.api_key_env" in text
    assert engine.exchanges[0].target == b"/v1/models"


async def test_one_of_several_engines_that_wants_a_key_is_told_where_its_own_goes() -> None:
    async def script(exchange: Exchange) -> None:
        await exchange.respond(403, b"{}")

    async with ScriptedUpstream(script) as engine:
        several = (BackendConfig(name="one", url=engine.url),)
        ok, text = (await found(Config(upstreams=several, log_url="memory:")))["upstream one key"]
    assert not ok
    assert "in upstreams[].api_key_env" in text


async def test_a_log_that_can_be_written_is_in_order(tmp_path: Path) -> None:
    database = tmp_path / "log.db"
    sqlite3.connect(database).close()
    told = await found(Config(upstream=NOWHERE, log_url=f"sqlite:///{database}"))
    assert told["event log's place"] == (True, f"{database} can be written")
    assert "GiB are free" in told["event log's disk"][1]


async def test_what_keeps_the_log_from_being_written_is_named(tmp_path: Path) -> None:
    (gone,) = sqlite_place(tmp_path / "nowhere" / "log.db")
    assert (gone.ok, "nowhere is not there" in gone.text) == (False, True)
    damaged = tmp_path / "damaged.db"
    damaged.write_bytes(b"no database" * 100)
    place = {f.subject: f for f in sqlite_place(damaged)}["event log's place"]
    assert not place.ok
    assert "takes no write" in place.text


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
async def test_a_file_of_somebody_else_is_named(tmp_path: Path) -> None:
    database = tmp_path / "log.db"
    database.touch(mode=0o400)
    place = {f.subject: f for f in sqlite_place(database)}["event log's place"]
    assert not place.ok
    assert "cannot write" in place.text


async def test_a_log_in_redis_tells_its_clock_its_memory_and_its_file(tmp_path: Path) -> None:
    url = await place_in_shared_redis(tmp_path)
    told = await found(Config(upstream=NOWHERE, log_url=url))
    assert told["clock of the event log"][0]
    assert told["event log's memory"][0]
    assert told["event log's file"][0]
    server = RedisServer(url, 5)
    try:
        before = (await server.client.config_get("maxmemory"))["maxmemory"]
        used = int((await server.client.info("memory"))["used_memory"])
        await server.client.config_set("maxmemory", used + used // 20)
        try:
            ok, text = (await found(Config(upstream=NOWHERE, log_url=url)))["event log's memory"]
        finally:
            await server.client.config_set("maxmemory", before)
    finally:
        await server.close()
    assert not ok
    assert "raise maxmemory" in text


async def test_a_redis_that_is_away_is_one_finding() -> None:
    told = await found(Config(upstream=NOWHERE, log_url="redis://127.0.0.1:9/0"))
    assert [subject for subject, (ok, _) in told.items() if not ok] == ["event log's Redis"]


async def test_tokens_that_are_not_the_engines_are_told(tmp_path: Path) -> None:
    toy = ToyEngine(FakeCache())
    asked: list[bytes] = []

    async def script(exchange: Exchange) -> None:
        if exchange.target == b"/tokenize" and asked:
            await exchange.read_body()
            await exchange.respond_json({"tokens": [1, 2, 3]})
        else:
            await toy.script(exchange)

    path = str(write_model(tmp_path / "model"))
    async with ScriptedUpstream(script) as engine:
        models = (ModelConfig(path=path),)
        config = Config(upstream=UpstreamConfig(url=engine.url), models=models, log_url="memory:")
        assert (await found(config))[f"tokens of {NAME}"][0], "an engine that tells no tokens proves nothing"
        asked.append(b"")
        ok, text = (await found(config))[f"tokens of {NAME}"]
    assert not ok
    assert "models[].path" in text


async def test_a_collector_is_asked_whether_it_takes_traces() -> None:
    async def script(exchange: Exchange) -> None:
        await exchange.read_body()
        await exchange.respond(404, b"")

    async with collector() as seen, ScriptedUpstream(script) as other:
        for endpoint, ok in ((seen.url, True), (other.url, False), ("http://127.0.0.1:9", False)):
            config = Config(upstream=NOWHERE, log_url="memory:", tracing=TracingConfig(endpoint=endpoint))
            assert (await found(config))["traces"][0] is ok
        assert seen.spans == []
