"""The consumer group on a real feed: one consumer by lease, its position, what it was given."""

import asyncio
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from lifecycle.core.events import Event, ListGrown
from lifecycle.errors import LogUnavailable
from lifecycle.store.feed_consumer import GROUP, FeedConsumer
from lifecycle.store.redis_streams import RedisEventLog
from tests.lifecycle.store.redis_process import RedisProcess, place_in_shared_redis


@pytest.fixture
async def url(tmp_path: Path) -> str:
    return await place_in_shared_redis(tmp_path)


@pytest.fixture
async def log(url: str) -> AsyncIterator[RedisEventLog]:
    opened = await RedisEventLog.open(url)
    yield opened
    await opened.close()


def grown(number: int) -> list[Event]:
    return [ListGrown(at_ns=1, num_new=number)]


async def asked(log: RedisEventLog, *command: Any) -> Any:
    return await log.server.client.execute_command(*command)  # type: ignore[no-untyped-call]


async def group_of(log: RedisEventLog) -> dict[bytes, Any]:
    (group,) = await asked(log, "XINFO", "GROUPS", log.server.key("feed"))
    return dict(zip(group[::2], group[1::2], strict=True)) if isinstance(group, list) else group


async def test_one_process_holds_the_turn_until_it_lets_go(url: str, log: RedisEventLog) -> None:
    one, two = FeedConsumer(url), FeedConsumer(url)
    assert await one.holds()
    assert not await two.holds()
    assert await one.holds()
    lease_ms = await asked(log, "PTTL", log.server.key("lease", GROUP))
    assert 0 < lease_ms <= 15_000
    await one.close()
    assert await two.holds()
    await two.close()


async def test_a_lease_that_ran_out_is_taken_and_not_taken_back(url: str, log: RedisEventLog) -> None:
    one, two = FeedConsumer(url), FeedConsumer(url)
    assert await one.holds()
    await asked(log, "DEL", log.server.key("lease", GROUP))  # as if it had run out
    assert await two.holds()
    assert not await one.holds()
    await one.close()
    assert await two.holds()
    await two.close()


async def test_news_end_the_wait_and_are_acknowledged(url: str, log: RedisEventLog) -> None:
    consumer = FeedConsumer(url)
    assert await consumer.holds()
    await log.append("ctx/a", grown(1), 0)
    await consumer.done(1)
    waiting = asyncio.ensure_future(consumer.wait())
    await log.append("ctx/a", grown(2), 1)
    await asyncio.wait_for(waiting, 10)
    assert (await group_of(log))[b"pending"] == 1
    await consumer.done(2)
    group = await group_of(log)
    assert (group[b"pending"], group[b"last-delivered-id"]) == (0, b"2-0")
    await consumer.close()


async def test_what_a_dead_consumer_was_given_is_settled_by_the_next(url: str, log: RedisEventLog) -> None:
    dead, heir = FeedConsumer(url), FeedConsumer(url)
    for n in range(3):
        await log.append("ctx/a", grown(n), n)
    assert await dead.holds()
    await dead.done(1)
    await dead.wait()
    await asked(log, "DEL", log.server.key("lease", GROUP))
    assert await heir.holds()
    await heir.done(3)
    group = await group_of(log)
    assert (group[b"pending"], group[b"last-delivered-id"], group[b"consumers"]) == (0, b"3-0", 1)
    await dead.close()
    await heir.close()


async def test_a_log_without_events_is_left_as_it_is(url: str, log: RedisEventLog) -> None:
    consumer = FeedConsumer(url)
    assert await consumer.holds()
    await consumer.done(0)
    await consumer.wait()
    assert await asked(log, "EXISTS", log.server.key("feed")) == 0
    (recorded,) = await log.append("ctx/a", grown(1), 0)
    assert recorded.position == 1
    await consumer.close()


async def test_who_waits_in_vain_comes_back_to_keep_the_lease(url: str, log: RedisEventLog) -> None:
    consumer = FeedConsumer(url)
    await log.append("ctx/a", grown(1), 0)
    assert await consumer.holds()
    await consumer.done(1)
    began = time.monotonic()
    await consumer.wait()
    assert time.monotonic() > began
    assert await consumer.holds()
    await consumer.close()


async def test_a_server_that_is_away_is_named(tmp_path: Path) -> None:
    server = RedisProcess(tmp_path / "redis").start()
    consumer = FeedConsumer(server.url)
    assert await consumer.holds()
    server.kill()
    with pytest.raises(LogUnavailable):
        await consumer.holds()
    await consumer.close()


def test_the_url_is_read_as_the_log_reads_it() -> None:
    with pytest.raises(ValueError, match="redis://"):
        FeedConsumer("http://host")
