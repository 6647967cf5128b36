"""Each thing in the way is one finding with its fix; nothing is freed."""

from pathlib import Path

from proxy.config import BackendConfig, CacheConfig, Config, ModelConfig, UpstreamConfig
from proxy.doctor import examine
from tests.lifecycle.fake_cache import FakeCache
from tests.lifecycle.store.redis_process import place_in_shared_redis
from tests.proxy.scripted_upstream import Exchange, ScriptedUpstream
from tests.proxy.toy_model import NAME, ToyEngine, write_model


def config(url: str, **changes: object) -> Config:
    fields: dict[str, object] = {"upstream": UpstreamConfig(url=url), "log_url": "memory:", **changes}
    return Config(**fields)  # type: ignore[arg-type]


async def found(configuration: Config) -> dict[str, tuple[bool, str]]:
    return {f.subject: (f.ok, f.text) for f in await examine(configuration)}


async def test_a_model_that_matches_its_engine_is_in_order(tmp_path: Path) -> None:
    path = str(write_model(tmp_path / "model"))
    async with ScriptedUpstream(ToyEngine(FakeCache()).script) as engine:
        findings = await found(config(engine.url, models=(ModelConfig(path=path),)))
        assert findings["upstream"] == (True, f"version 0.0.1, serves {NAME}")
        ok, text = findings[f"model {NAME}"]
        assert ok
        assert "fingerprint" in text
        assert findings["event log"][0]
        ok, text = findings["level"]
        assert not ok
        assert text.startswith("0")
        assert "cache.driver" in findings["cache"][1]


async def test_what_is_wrong_is_named(tmp_path: Path) -> None:
    path = str(write_model(tmp_path / "model"))
    log = tmp_path / "log.db"
    log.write_bytes(b"this is no database" * 100)
    async with ScriptedUpstream(ToyEngine(FakeCache()).script) as engine:
        models = (ModelConfig(path=path, name="other"), ModelConfig(path=str(tmp_path / "no"), name="gone"))
        findings = await found(config(engine.url, models=models, log_url=f"sqlite:///{log}"))
        assert findings["model other"] == (False, f"the engine serves {NAME} only")
        assert not findings["model gone"][0]
        assert not findings["event log"][0]
        assert not (await found(config(engine.url)))["model"][0]
    for bodies in engine.exchanges:
        assert bodies.method == "GET"


async def test_a_log_in_redis_is_named_without_its_password(tmp_path: Path) -> None:
    url = await place_in_shared_redis(tmp_path)
    async with ScriptedUpstream(ToyEngine(FakeCache()).script) as engine:
        ok, text = (await found(config(engine.url, log_url=url.replace("//", "//:hunter2@"))))["event log"]
        assert not ok
        assert "hunter2" not in text
        ok, text = (await found(config(engine.url, log_url=url)))["event log"]
        assert ok
        assert text.endswith(", 0 events")


async def test_an_engine_that_is_not_there_is_said_first(tmp_path: Path) -> None:
    findings = await found(config("http://127.0.0.1:9"))
    assert not findings["upstream"][0]
    assert "upstream.url" in findings["upstream"][1]


async def test_a_cache_that_is_not_there_is_said(tmp_path: Path) -> None:
    cache = CacheConfig(driver="lmcache_mp", coordinator_url="http://127.0.0.1:9")
    async with ScriptedUpstream(ToyEngine(FakeCache()).script) as engine:
        findings = await found(config(engine.url, cache=cache))
    assert not findings["cache"][0]
    assert not findings["KV events"][0]
    assert "events_endpoint" in findings["KV events"][1]


async def test_of_several_engines_each_is_named(tmp_path: Path) -> None:
    path = str(write_model(tmp_path / "model"))
    script = ToyEngine(FakeCache()).script

    async def another(exchange: Exchange) -> None:
        await exchange.read_body()
        await exchange.respond_json({"data": [{"id": "another"}], "version": "9.9"})

    async with ScriptedUpstream(script) as good, ScriptedUpstream(another) as odd:
        upstreams = (
            BackendConfig(name="good", url=good.url),
            BackendConfig(name="odd", url=odd.url),
            BackendConfig(name="away", url="http://127.0.0.1:9"),
        )
        cache = CacheConfig(driver="lmcache_mp", coordinator_url="http://127.0.0.1:9")
        findings = await found(
            config("", upstreams=upstreams, models=(ModelConfig(path=path, name=NAME),), cache=cache)
        )
    assert findings["upstream good"] == (True, f"version 0.0.1, serves {NAME}")
    assert findings["upstream odd"] == (True, "version 9.9, serves another")
    ok, text = findings["upstream away"]
    assert not ok
    assert "127.0.0.1:9" in text
    assert findings["versions"] == (
        False,
        "engines run different versions, whose tokens may differ: run one version",
    )
    ok, text = findings[f"model {NAME}"]
    assert ok
    assert "not served by odd" in text
    ok, text = findings["KV events odd"]
    assert not ok
    assert "upstreams[].events_endpoint" in text
