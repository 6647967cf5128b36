"""Trims on a real server that is killed around them, and what is missing beyond them."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import suppress
from pathlib import Path

import pytest

from lifecycle.core.events import Event, ListGrown
from lifecycle.errors import CorruptLog, LogUnavailable, VersionConflict
from lifecycle.store.redis_streams import RedisEventLog
from tests.lifecycle.store.redis_process import RedisProcess

STREAMS = tuple(f"ctx/{n}" for n in range(4))
NUM_BATCHES = 600
"""More than two steps of a trim."""

GROWN: list[Event] = [ListGrown(at_ns=1, num_new=1), ListGrown(at_ns=1, num_new=2)]


@pytest.fixture
async def redis(tmp_path: Path) -> AsyncIterator[RedisProcess]:
    process = RedisProcess(tmp_path / "redis")
    await asyncio.to_thread(process.start)
    yield process
    process.kill()


async def filled(redis: RedisProcess) -> RedisEventLog:
    """Six hundred batches in turn on four streams."""
    log = await RedisEventLog.open(redis.url)
    for n in range(NUM_BATCHES // len(STREAMS)):
        await asyncio.gather(*(log.append(stream, GROWN, 2 * n) for stream in STREAMS))
    return log


async def whole(log: RedisEventLog) -> int:
    """Everything from the first position on is there, and each stream goes on; answers that position."""
    first, head = await log.first_position(), await log.head()
    read = [r async for r in log.read_all()]
    assert [r.position for r in read] == list(range(first, head + 1))
    for stream in STREAMS:
        versions = [r.version async for r in log.read_stream(stream)]
        assert versions == [r.version for r in read if r.stream == stream]
        with pytest.raises(VersionConflict) as conflict:
            await log.append(stream, GROWN, 10_000)
        last = conflict.value.actual
        assert not versions or versions[-1] == last
        assert (await log.append(stream, GROWN, last))[0].version == last + 1
    return first


async def restarted(redis: RedisProcess) -> RedisEventLog:
    await asyncio.to_thread(redis.kill)
    await asyncio.to_thread(redis.start)
    return await RedisEventLog.open(redis.url)


async def test_killed_after_each_step_the_log_is_what_the_step_left(redis: RedisProcess) -> None:
    log = await filled(redis)
    firsts = [1]
    while (first := await log.trim(2 * NUM_BATCHES - 10, STREAMS)) != firsts[-1]:
        firsts.append(first)
        await log.close()
        log = await restarted(redis)
        assert await whole(log) == first, "an acknowledged trim stays"
    assert len(firsts) > 3
    await log.close()


@pytest.mark.parametrize("turns", [1, 4, 8])
async def test_killed_during_a_step_the_log_is_whole_before_it_or_behind_it(
    redis: RedisProcess, turns: int
) -> None:
    log = await filled(redis)
    trimming = asyncio.ensure_future(log.trim(2 * NUM_BATCHES, STREAMS))
    for _ in range(turns):
        await asyncio.sleep(0.0005)
    redis.kill()
    with suppress(LogUnavailable):
        await trimming
    await log.close()
    await asyncio.to_thread(redis.start)
    log = await RedisEventLog.open(redis.url)
    assert await whole(log) in (1, 513)
    await log.close()


async def test_what_is_missing_beyond_the_trim_is_missed(redis: RedisProcess) -> None:
    log = await filled(redis)
    first = await log.trim(100, STREAMS)
    assert first == 101
    redis.run("XDEL", "{kvtether}:feed", f"{first + 3}-0")
    with pytest.raises(CorruptLog, match=f"position {first + 2} is missing"):
        [r async for r in log.read_all()]
    behind = [r.position async for r in log.read_all(first + 3)]
    assert behind[0] == first + 4
    redis.run("XTRIM", "{kvtether}:stream:ctx/0", "MINID", "40")
    with pytest.raises(CorruptLog, match="ctx/0"):
        [r async for r in log.read_stream("ctx/0")]
    await log.close()


async def test_an_older_copy_is_refused_by_who_has_seen_more_also_after_a_trim(redis: RedisProcess) -> None:
    log = await filled(redis)
    await log.trim(200, STREAMS)
    redis.run("XTRIM", "{kvtether}:feed", "MAXLEN", "0")
    with pytest.raises(LogUnavailable):
        await log.first_position()
    await log.close()


async def test_a_version_that_does_not_know_trims_would_refuse_the_log(redis: RedisProcess) -> None:
    log = await filled(redis)
    assert redis.run("HGET", "{kvtether}:meta", "format") == b"1"
    await log.trim(0, STREAMS)
    assert redis.run("HGET", "{kvtether}:meta", "format") == b"1"
    await log.trim(100, STREAMS)
    assert redis.run("HGET", "{kvtether}:meta", "format") == b"2"
    await log.close()
