"""The Redis log when the world misbehaves: a server killed, emptied, outdated, full, hung, tampered with."""

import asyncio
import os
import resource
import shutil
import signal
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from lifecycle.core.events import ChunksGone, Event, ListGrown, RecordedEvent
from lifecycle.core.ids import Namespace
from lifecycle.errors import CorruptLog, LogUnavailable, VersionConflict
from lifecycle.store.redis_streams import RedisEventLog
from tests.lifecycle.store.redis_process import RedisProcess


def grown(*counts: int) -> list[Event]:
    return [ListGrown(at_ns=1, num_new=n) for n in counts]


def heavy(size_bytes: int) -> Event:
    """One event of about this size."""
    return ChunksGone(at_ns=1, namespace=Namespace("m"), keys=b"\xa5" * size_bytes)


def numbers(recorded: list[RecordedEvent]) -> list[int]:
    return [r.event.num_new for r in recorded if isinstance(r.event, ListGrown)]


async def all_of(log: RedisEventLog) -> list[RecordedEvent]:
    return [r async for r in log.read_all()]


async def stream_of(log: RedisEventLog, stream: str) -> list[RecordedEvent]:
    return [r async for r in log.read_stream(stream)]


@pytest.fixture
def redis(tmp_path: Path) -> Iterator[RedisProcess]:
    server = RedisProcess(tmp_path / "data").start()
    yield server
    server.kill()


@pytest.fixture
async def log(redis: RedisProcess):
    log = await RedisEventLog.open(redis.url)
    yield log
    await log.close()


async def refused(log: RedisEventLog, match: str) -> None:
    """Nothing can be recorded or read, and each way says why."""
    with pytest.raises(LogUnavailable, match=match):
        await log.append("ctx/a", grown(99), 1)
    with pytest.raises(LogUnavailable, match=match):
        await log.head()
    with pytest.raises(LogUnavailable, match=match):
        await stream_of(log, "ctx/a")
    with pytest.raises(LogUnavailable, match=match):
        await all_of(log)


async def test_a_killed_server_is_unavailable_and_comes_back_with_everything(redis, log) -> None:
    await log.append("ctx/a", grown(1, 2), 0)
    before = await all_of(log)
    redis.kill()
    with pytest.raises(LogUnavailable, match=r"127\.0\.0\.1"):
        await log.append("ctx/a", grown(3), 2)
    with pytest.raises(LogUnavailable):
        await log.head()
    redis.start()
    assert await all_of(log) == before
    (recorded,) = await log.append("ctx/a", grown(3), 2)
    assert (recorded.version, recorded.position) == (3, 3)


async def test_what_was_acknowledged_before_a_kill_is_there_and_every_batch_is_whole(redis, log) -> None:
    acknowledged: list[RecordedEvent] = []
    enough = asyncio.Event()

    async def keep_appending(stream: str) -> None:
        version = 0
        while True:
            try:
                recorded = await log.append(stream, grown(*[version] * 3), version)
            except LogUnavailable:
                return
            acknowledged.extend(recorded)
            version += 3
            if len(acknowledged) > 300:
                enough.set()

    async def kill() -> None:
        await enough.wait()
        await asyncio.to_thread(redis.kill)

    await asyncio.gather(kill(), *(keep_appending(f"ctx/{n}") for n in range(20)))
    redis.start()
    there = await all_of(log)
    assert [r.position for r in there] == list(range(1, len(there) + 1))
    assert {(r.stream, r.version, r.position) for r in acknowledged} <= {
        (r.stream, r.version, r.position) for r in there
    }
    for n in range(20):
        stream = await stream_of(log, f"ctx/{n}")
        assert numbers(stream) == [version - version % 3 for version in range(len(stream))]
        assert len(stream) % 3 == 0


async def test_on_a_full_disk_the_server_ends_and_what_it_acknowledged_stays(redis, log) -> None:
    file = redis.directory / "appendonly.aof"
    await log.append("ctx/a", grown(1), 0)
    limit = file.stat().st_size + 50_000
    resource.prlimit(redis.pid, resource.RLIMIT_FSIZE, (limit, limit))
    acknowledged: list[RecordedEvent] = []
    for n in range(20):
        try:
            acknowledged += await log.append(f"full/{n}", [heavy(3_000)] * 4, 0)
        except LogUnavailable:
            break
    assert 0 < len(acknowledged) == 4 * n
    redis.wait()
    redis.start()
    there = await all_of(log)
    assert there[1 : 1 + len(acknowledged)] == acknowledged
    assert len(await stream_of(log, f"full/{n}")) in (0, 4)
    assert numbers(await log.append("ctx/a", grown(2), 1)) == [2]


async def test_a_losing_batch_leaves_no_trace(redis, log) -> None:
    await log.append("ctx/a", grown(1, 2), 0)
    before = [(key, redis.run("DUMP", key)) for key in sorted(redis.run("KEYS", "*"))]
    for expected in (0, 1, 3):
        with pytest.raises(VersionConflict):
            await log.append("ctx/a", grown(3, 4, 5), expected)
    with pytest.raises(VersionConflict):
        await log.append("ctx/new", grown(3), 1)
    assert [(key, redis.run("DUMP", key)) for key in sorted(redis.run("KEYS", "*"))] == before


async def test_a_batch_lands_whole_or_not_at_all_where_memory_ends(redis, log) -> None:
    used = int(redis.run("INFO", "memory")["used_memory"])
    redis.run("CONFIG", "SET", "maxmemory", used + 2_000_000)
    attempts = [log.append(f"ctx/{n}", [heavy(40_000)] * 10, 0) for n in range(30)]
    answers = await asyncio.gather(*attempts, return_exceptions=True)
    landed = sum(not isinstance(answer, BaseException) for answer in answers)
    refusal = answers[landed]
    assert isinstance(refusal, LogUnavailable)
    assert "raise maxmemory" in str(refusal)
    assert 0 < landed < 20
    assert all(isinstance(answer, LogUnavailable) for answer in answers[landed:])
    assert await log.head() == landed * 10
    assert [r.stream for r in await all_of(log)] == [f"ctx/{n}" for n in range(landed) for _ in range(10)]
    assert await stream_of(log, f"ctx/{landed}") == []
    redis.run("CONFIG", "SET", "maxmemory", 0)
    (recorded,) = await log.append(f"ctx/{landed}", grown(1), 0)
    assert recorded.position == landed * 10 + 1


@asynccontextmanager
async def relay(port: int, answers_lost: list[bytes]) -> AsyncIterator[int]:
    """Its port. An answer that holds what `answers_lost` names first is dropped with its connection."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        far_reader, far_writer = await asyncio.open_connection("127.0.0.1", port)

        async def pump(source: asyncio.StreamReader, sink: asyncio.StreamWriter, back: bool) -> None:
            while data := await source.read(65536):
                if back and answers_lost and answers_lost[0] in data:
                    del answers_lost[0]
                    break
                sink.write(data)
            writer.close()
            far_writer.close()

        await asyncio.gather(pump(reader, far_writer, False), pump(far_reader, writer, True))

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with server:
        yield server.sockets[0].getsockname()[1]


async def test_a_batch_whose_answer_was_lost_lands_once_and_is_answered(redis) -> None:
    answers_lost: list[bytes] = []
    async with relay(redis.port, answers_lost) as port:
        log = await RedisEventLog.open(f"redis://127.0.0.1:{port}/0")
        await log.append("ctx/a", grown(1), 0)
        answers_lost.append(b"ok")
        group = [log.append("ctx/a", grown(2, 3), 1), log.append("ctx/b", grown(4), 0)]
        first, second = await asyncio.gather(*group)
        assert answers_lost == []
        assert [*first, *second] == (await all_of(log))[1:]
        answers_lost += [b"ok", b"ok"]
        with pytest.raises(LogUnavailable, match="may or may not be recorded"):
            await log.append("ctx/a", grown(5), 3)
        with pytest.raises(VersionConflict):
            await log.append("ctx/a", grown(5), 3)
        assert numbers(await all_of(log)) == [1, 2, 3, 4, 5]
        await log.close()


async def test_an_empty_server_in_its_place_is_refused(redis, log, tmp_path: Path) -> None:
    await log.append("ctx/a", grown(1), 0)
    redis.kill()
    redis.directory = tmp_path / "empty"
    redis.start()
    await refused(log, "holds no event log, though it did")
    assert redis.run("DBSIZE") == 0
    redis.kill()
    redis.directory = tmp_path / "data"
    redis.start()
    assert numbers(await log.append("ctx/a", grown(2), 1)) == [2]


async def test_an_emptied_log_that_somebody_else_began_anew_is_refused(redis, log) -> None:
    redis.run("FLUSHALL")
    other = await RedisEventLog.open(redis.url)
    await other.append("ctx/a", grown(1), 0)
    await refused(log, "holds another event log")
    assert numbers(await all_of(other)) == [1]
    await other.close()


async def test_an_older_copy_is_refused_even_when_it_has_grown_since(redis, log, tmp_path: Path) -> None:
    await log.append("ctx/a", grown(1), 0)
    redis.kill()
    shutil.copytree(redis.directory, tmp_path / "copy")
    redis.start()
    await log.append("ctx/a", grown(2), 1)
    redis.kill()
    redis.directory = tmp_path / "copy"
    redis.start()
    await refused(log, r"lacks events that this process has seen \(position 2; it is at 1\)")
    other = await RedisEventLog.open(redis.url)
    for number in (2, 3, 4):
        await other.append("ctx/a", grown(number), number - 1)
    await refused(log, r"lacks events that this process has seen \(position 2; it is at 4\)")
    assert numbers(await all_of(other)) == [1, 2, 3, 4]
    await other.close()


async def test_a_process_that_only_read_knows_an_older_copy_too(redis, log, tmp_path: Path) -> None:
    reader = await RedisEventLog.open(redis.url)
    shutil.copytree(redis.directory, tmp_path / "copy")
    await log.append("ctx/a", grown(1), 0)
    assert numbers(await all_of(reader)) == [1]
    redis.kill()
    redis.directory = tmp_path / "copy"
    redis.start()
    await refused(reader, "lacks events")
    await reader.close()


@pytest.mark.parametrize("cut", [1, 60, 150])
async def test_a_file_torn_inside_a_batch_loses_the_whole_batch(redis, log, cut: int) -> None:
    await log.append("ctx/a", grown(1, 2), 0)
    await log.append("ctx/a", grown(3, 4, 5), 2)
    redis.kill()
    file = redis.directory / "appendonly.aof"
    os.truncate(file, file.stat().st_size - cut)
    redis.start()
    await refused(log, "lacks events")
    again = await RedisEventLog.open(redis.url)
    assert numbers(await all_of(again)) == [1, 2] == numbers(await stream_of(again, "ctx/a"))
    assert numbers(await again.append("ctx/a", grown(6), 2)) == [6]
    await again.close()


async def test_a_hung_server_is_unavailable_after_the_time_allowed(redis) -> None:
    log = await RedisEventLog.open(redis.url, timeout_s=0.2)
    await log.append("ctx/a", grown(1), 0)
    os.kill(redis.pid, signal.SIGSTOP)
    with pytest.raises(LogUnavailable, match="may or may not be recorded"):
        await log.append("ctx/a", grown(2, 2), 1)
    os.kill(redis.pid, signal.SIGCONT)
    there = await stream_of(log, "ctx/a")
    assert numbers(there) in ([1], [1, 2, 2])
    with pytest.raises(VersionConflict) as conflict:
        await log.append("ctx/a", grown(3), 9)
    assert numbers(await log.append("ctx/a", grown(3), conflict.value.actual)) == [3]
    await log.close()


async def test_all_who_open_at_once_share_one_log(redis) -> None:
    logs = await asyncio.gather(*(RedisEventLog.open(redis.url) for _ in range(6)))
    for number, log in enumerate(logs):
        await log.append(f"ctx/{number}", grown(number), 0)
    assert [numbers(await all_of(log)) for log in logs] == [list(range(6))] * 6
    for log in logs:
        await log.close()


async def test_logs_under_other_prefixes_do_not_meet(redis, log) -> None:
    other = await RedisEventLog.open(f"{redis.url}?prefix=other")
    await log.append("ctx/a", grown(1), 0)
    await other.append("ctx/a", grown(2), 0)
    assert (numbers(await all_of(log)), numbers(await all_of(other))) == ([1], [2])
    await other.close()


STREAM = "{kvtether}:stream:ctx/a"


@pytest.mark.parametrize("version", ["1-0", "2-0", "3-0"])
async def test_a_deleted_event_is_missed(redis, log, version: str) -> None:
    await log.append("ctx/a", grown(1, 2, 3), 0)
    await log.append("ctx/b", grown(4), 0)
    redis.run("XDEL", STREAM, version)
    with pytest.raises(CorruptLog, match="ctx/a"):
        await all_of(log)
    if version != "3-0":
        with pytest.raises(CorruptLog, match=f"version {version[0]} is missing"):
            await stream_of(log, "ctx/a")


@pytest.mark.parametrize("field", [b"e", b"c", b"p"])
async def test_an_altered_event_shows(redis, log, field: bytes) -> None:
    await log.append("ctx/a", grown(1), 0)
    ((_, fields),) = redis.run("XRANGE", STREAM, "-", "+")
    for altered in ({**fields, field: b"7"}, {k: v for k, v in fields.items() if k != field}):
        redis.run("DEL", STREAM)
        redis.run("XADD", STREAM, "1-0", *(part for pair in altered.items() for part in pair), "x", "")
        with pytest.raises(CorruptLog, match="'ctx/a', version 1"):
            await all_of(log)


@pytest.mark.parametrize("position", ["1", "2", "3"])
async def test_a_hole_in_the_feed_shows(redis, log, position: str) -> None:
    for number in range(3):
        await log.append("ctx/a", grown(number), number)
    redis.run("XDEL", "{kvtether}:feed", f"{position}-0")
    with pytest.raises((CorruptLog, LogUnavailable)):
        await all_of(log)

    async def open_and_read() -> None:
        again = await RedisEventLog.open(redis.url)
        try:
            await all_of(again)
        finally:
            await again.close()

    with pytest.raises(CorruptLog, match=r"missing in the feed|the feed ends at position 2, but 3"):
        await open_and_read()


async def test_half_a_log_is_not_begun_anew(redis, log) -> None:
    await log.append("ctx/a", grown(1), 0)
    redis.run("DEL", "{kvtether}:meta")
    await refused(log, "holds no event log")
    with pytest.raises(CorruptLog, match="only a part"):
        await RedisEventLog.open(redis.url)
    assert redis.run("EXISTS", "{kvtether}:meta") == 0


async def test_a_wrong_count_stops_appends(redis, log) -> None:
    redis.run("HSET", "{kvtether}:meta", "head", "5")
    with pytest.raises(CorruptLog, match="the feed ends at position 0, but 5 were counted"):
        await log.append("ctx/a", grown(1), 0)
    assert redis.run("EXISTS", STREAM) == 0


async def test_what_others_keep_under_our_keys_is_named_and_nothing_lands(redis, log) -> None:
    redis.run("SET", STREAM, "something")
    with pytest.raises(CorruptLog, match="something else under the log's keys"):
        await log.append("ctx/a", grown(1), 0)
    assert await log.head() == 0
    assert numbers(await log.append("ctx/b", grown(1), 0)) == [1]


async def test_a_newer_format_is_left_alone(redis, log) -> None:
    redis.run("HSET", "{kvtether}:meta", "format", "3")
    with pytest.raises(LogUnavailable, match="format 3, which this version does not know"):
        await RedisEventLog.open(redis.url)
