"""What a Redis server must promise before anything is recorded there, and what is said when it does not."""

import asyncio
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from redis.exceptions import RedisError

from lifecycle.core.events import ListGrown
from lifecycle.errors import LogUnavailable
from lifecycle.store.redis_server import RedisServer
from lifecycle.store.redis_streams import RedisEventLog
from tests.lifecycle.store.redis_process import RedisProcess

EVENT = [ListGrown(at_ns=1, num_new=1)]


@pytest.fixture
def redis(tmp_path: Path) -> Iterator[RedisProcess]:
    server = RedisProcess(tmp_path / "data").start()
    yield server
    server.kill()


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("appendonly", "no"),
        ("appendfsync", "everysec"),
        ("appendfsync", "no"),
        ("maxmemory-policy", "allkeys-lru"),
        ("maxmemory-policy", "volatile-ttl"),
    ],
)
async def test_a_server_that_may_lose_events_is_refused(redis, name: str, value: str) -> None:
    wanted = redis.settings[name]
    redis.run("CONFIG", "SET", name, value)
    with pytest.raises(LogUnavailable, match=f"{name} {value}.*: set {name} {wanted}$"):
        await RedisEventLog.open(redis.url)
    assert redis.run("DBSIZE") == 0
    redis.run("CONFIG", "SET", name, wanted)
    await (await RedisEventLog.open(redis.url)).close()


async def test_a_server_that_comes_back_with_weaker_settings_is_refused(redis) -> None:
    log = await RedisEventLog.open(redis.url)
    await log.append("ctx/a", EVENT, 0)
    redis.kill()
    redis.settings["appendfsync"] = "everysec"
    redis.start()
    with pytest.raises(LogUnavailable, match="set appendfsync always"):
        await log.append("ctx/a", EVENT, 1)
    redis.run("CONFIG", "SET", "appendfsync", "always")
    await log.append("ctx/a", EVENT, 1)
    await log.close()


async def test_a_server_that_does_not_say_is_refused_with_what_to_set(redis) -> None:
    redis.run("ACL", "SETUSER", "kv", "on", ">secret", "~*", "+@all", "-config")
    url = redis.url.replace("//", "//kv:secret@")
    with pytest.raises(LogUnavailable, match=r"CONFIG GET.*appendonly yes, appendfsync always") as refused:
        await RedisEventLog.open(url)
    assert "secret" not in str(refused.value)
    redis.run("ACL", "SETUSER", "kv", "+config|get")
    log = await RedisEventLog.open(url)
    await log.append("ctx/a", EVENT, 0)
    await log.close()


async def test_a_wrong_password_is_named_and_not_repeated(redis) -> None:
    with pytest.raises(LogUnavailable, match="look at the user and the password") as refused:
        await RedisEventLog.open(redis.url.replace("//", "//kv:hunter2@"))
    assert "hunter2" not in str(refused.value)


async def test_a_replica_takes_nothing(redis) -> None:
    log = await RedisEventLog.open(redis.url)
    redis.run("REPLICAOF", "127.0.0.1", "1")
    with pytest.raises(LogUnavailable, match="name the primary"):
        await log.append("ctx/a", EVENT, 0)
    redis.run("REPLICAOF", "NO", "ONE")
    await log.append("ctx/a", EVENT, 0)
    await log.close()


async def test_nobody_there_is_named(redis) -> None:
    redis.kill()
    with pytest.raises(LogUnavailable, match=f"127.0.0.1:{redis.port}/0 .*Connect call failed"):
        await RedisEventLog.open(redis.url)


@pytest.mark.parametrize(
    "url",
    [
        "http://host/0",
        "redis://",
        "redis:///0",
        "redis://host/zero",
        "redis://host/0/1",
        "redis://host:port/0",
        "redis://host/0?prefix={a}",
        "redis://host/0?timeout=1",
    ],
)
async def test_a_url_that_names_no_log_is_refused(url: str) -> None:
    with pytest.raises(ValueError):
        await RedisEventLog.open(url)


@pytest.mark.parametrize("password", ["hun/ter2", "hun#ter2", "hun?ter2", "/hunter2"])
async def test_a_password_that_breaks_the_url_is_not_repeated(password: str) -> None:
    with pytest.raises(ValueError) as refused:
        await RedisEventLog.open(f"redis://kv:{password}@host/0")
    assert "hun" not in str(refused.value)
    assert "ter2" not in str(refused.value)


async def test_a_place_is_shown_without_secrets() -> None:
    server = RedisServer("rediss://kv:hunter2@host/3?prefix=a.b", timeout_s=1)
    assert server.place == "rediss://host:6379/3 (prefix a.b)"
    await server.close()


async def test_all_keys_of_a_log_lie_in_one_hash_slot(redis) -> None:
    server = RedisServer(f"{redis.url}?prefix=p", timeout_s=1)
    keys = [
        server.key("meta"),
        server.key("feed"),
        server.key("stream", "ctx/{b}"),
        server.key("setting", "s"),
    ]
    assert all(key.startswith(b"{p}:") for key in keys)
    assert len(set(keys)) == len(keys)
    await server.close()


@pytest.mark.parametrize("failing", [False, True])
async def test_a_cancellation_that_the_client_drops_is_not_lost(failing: bool) -> None:
    server = RedisServer("redis://127.0.0.1:1/0", 1.0)
    asked = asyncio.Event()

    async def dropping() -> str:
        asked.set()
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            if failing:
                raise RedisError("something else") from None
        return "answered all the same"

    waiting = asyncio.ensure_future(server.ask(dropping))
    await asked.wait()
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting


async def test_who_cleans_up_after_a_cancellation_is_answered() -> None:
    server = RedisServer("redis://127.0.0.1:1/0", 1.0)
    begun = asyncio.Event()

    async def answer() -> str:
        return "released"

    async def cancelled() -> str:
        begun.set()
        with suppress(asyncio.CancelledError):
            await asyncio.Event().wait()
        return await server.ask(answer)

    task = asyncio.ensure_future(cancelled())
    await begun.wait()
    task.cancel()
    assert await task == "released"
