"""Shared values in Redis: made once, the same for everybody, for ever."""

import asyncio
import secrets
from collections.abc import Iterator
from pathlib import Path

import pytest

from lifecycle.errors import LogUnavailable
from lifecycle.store.redis_settings import RedisSettings
from lifecycle.store.redis_streams import RedisEventLog
from tests.lifecycle.store.redis_process import RedisProcess


def fresh() -> bytes:
    return secrets.token_bytes(32)


@pytest.fixture
def redis(tmp_path: Path) -> Iterator[RedisProcess]:
    server = RedisProcess(tmp_path / "data").start()
    yield server
    server.kill()


async def test_a_value_is_made_once_and_survives(redis) -> None:
    log = await RedisEventLog.open(redis.url)
    settings = RedisSettings(log.server)
    first = await settings.get_or_create("digest_secret", fresh)
    assert await settings.get_or_create("another", fresh) != first
    redis.kill()
    with pytest.raises(LogUnavailable):
        await settings.get_or_create("digest_secret", fresh)
    redis.start()
    assert await settings.get_or_create("digest_secret", fresh) == first
    await log.close()


async def test_all_who_ask_at_once_get_the_same_value(redis) -> None:
    logs = [await RedisEventLog.open(redis.url) for _ in range(4)]
    asked = [RedisSettings(log.server).get_or_create("digest_secret", fresh) for log in logs * 5]
    answers = await asyncio.gather(*asked)
    assert len(set(answers)) == 1
    assert len(answers[0]) == 32
    for log in logs:
        await log.close()


async def test_who_comes_second_takes_the_value_that_is_there(redis) -> None:
    log = await RedisEventLog.open(redis.url)

    def too_late() -> bytes:
        redis.run("SET", log.server.key("setting", "digest_secret"), b"theirs")
        return b"ours"

    settings = RedisSettings(log.server)
    assert await settings.get_or_create("digest_secret", too_late) == b"theirs"
    assert await settings.get_or_create("digest_secret", fresh) == b"theirs"
    await log.close()


async def test_logs_under_other_prefixes_have_values_of_their_own(redis) -> None:
    logs = [await RedisEventLog.open(f"{redis.url}?prefix={prefix}") for prefix in "ab"]
    values = [await RedisSettings(log.server).get_or_create("digest_secret", fresh) for log in logs]
    assert values[0] != values[1]
    for log in logs:
        await log.close()
