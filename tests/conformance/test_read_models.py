"""The read models on every backend, behind every log: rows are what the events say, whatever breaks."""

import asyncio
import random
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest
from sqlalchemy import text

from lifecycle.core.events import RecordedEvent
from lifecycle.errors import ReadModelsUnavailable
from lifecycle.ports import EventLog
from lifecycle.store.codec import checksum, encode
from lifecycle.store.feed_consumer import FeedConsumer
from lifecycle.store.memory import MemoryEventLog
from lifecycle.store.read_model_database import open_read_model_database
from lifecycle.store.read_model_follower import Feed, HeardFeed
from lifecycle.store.read_models import ReadModels
from lifecycle.store.redis_streams import RedisEventLog
from lifecycle.store.sql import SqlEventLog
from lifecycle.tracker import Tracker
from tests.conformance.read_model_lives import RandomLife, expected_rows
from tests.conformance.read_model_rows import rows_at, until_rows
from tests.lifecycle.lives import ManualClock
from tests.lifecycle.store.following import (
    LOG_ID,
    complaint,
    follower_of,
    marked_stale,
    reached,
    running,
)
from tests.lifecycle.store.postgres_process import PostgresProcess, new_shared_database
from tests.lifecycle.store.redis_process import place_in_shared_redis


@pytest.fixture(params=["sqlite", "postgresql"])
async def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return f"sqlite:///{tmp_path}/rows.db" if request.param == "sqlite" else await new_shared_database()


class Followed:
    """A log that is written by random lives, and what tells followers of it."""

    def __init__(self, log: EventLog, seed: int, redis_url: str = "") -> None:
        self.log = log
        self.clock = ManualClock()
        self.tracker = Tracker(log, self.clock)
        self.life = RandomLife(self.tracker, self.clock, seed)
        self._redis_url = redis_url

    def feed(self) -> Feed:
        """What a follower of its own would wait for."""
        if self._redis_url:
            return FeedConsumer(self._redis_url)
        heard = HeardFeed()
        self.tracker.listeners.append(heard.heard)
        return heard

    async def events(self) -> list[RecordedEvent]:
        return [recorded async for recorded in self.log.read_all()]


async def _memory(_place: Path, seed: int) -> Followed:
    return Followed(MemoryEventLog(), seed)


async def _sqlite(place: Path, seed: int) -> Followed:
    return Followed(await SqlEventLog.open(f"sqlite:///{place}/events.db"), seed)


async def _redis(place: Path, seed: int) -> Followed:
    url = await place_in_shared_redis(place)
    return Followed(await RedisEventLog.open(url), seed, url)


NEWER_EVENT = b"\x82\xa4type\xaanew_one.v9\xa5at_ns\x01"

LOGS = {"memory": _memory, "sqlite log": _sqlite, "redis log": _redis}
every_log = pytest.mark.parametrize("opened", LOGS.values(), ids=LOGS)
Opened = Callable[[Path, int], Awaitable[Followed]]


@pytest.mark.parametrize("seed", range(4))
async def test_rows_are_what_the_events_say(url: str, seed: int) -> None:
    followed = Followed(MemoryEventLog(), seed)
    await followed.life.live(150)
    events = await followed.events()
    models = await ReadModels.open(url)
    await models.attach(LOG_ID)
    for start in range(0, len(events), 37):
        assert await models.write(events[start : start + 37]) == events[: start + 37][-1].position
        await models.write(events[max(start - 20, 0) : start + 10])  # again, in part
    incremental = await rows_at(url)
    assert incremental == expected_rows(events)
    rebuilt = await models.rebuild(followed.log, LOG_ID)
    assert (rebuilt.num_events, rebuilt.position, rebuilt.kept) == (len(events), len(events), 0)
    assert await rows_at(url) == incremental
    await models.close()


@every_log
async def test_a_follower_that_is_killed_again_and_again_counts_everything_once(
    url: str, tmp_path: Path, opened: Opened
) -> None:
    followed = await opened(tmp_path, 1)
    rng = random.Random(1)
    for _ in range(4):
        async with running(follower_of(followed.log, url, followed.feed())):
            await followed.life.live(40)
            await asyncio.sleep(rng.choice([0.0, 0.02, 0.1]))
    async with running(follower_of(followed.log, url, followed.feed())) as follower:
        events = await followed.events()
        await reached(follower, events[-1].position)
        await followed.life.live(20)  # what comes later is heard of
        events = await followed.events()
        await reached(follower, events[-1].position)
    assert await rows_at(url) == expected_rows(events)
    await followed.log.close()


@every_log
async def test_two_followers_take_turns(url: str, tmp_path: Path, opened: Opened) -> None:
    followed = await opened(tmp_path, 2)
    async with (
        running(follower_of(followed.log, url, followed.feed())) as one,
        running(follower_of(followed.log, url, followed.feed())) as two,
    ):
        await followed.life.live(100)
        events = await followed.events()
        await reached(one, events[-1].position)
        await reached(two, events[-1].position)
    assert await rows_at(url) == expected_rows(events)
    await followed.log.close()


async def test_a_crash_between_commit_and_acknowledgement_counts_nothing_twice(
    url: str, tmp_path: Path
) -> None:
    place = await place_in_shared_redis(tmp_path)
    followed = await _redis(tmp_path, 3)

    class Crashing(FeedConsumer):
        """Dies with the rows committed."""

        def __init__(self) -> None:
            super().__init__(place)
            self.committed = asyncio.Event()

        async def done(self, position: int) -> None:
            self.committed.set()
            await asyncio.Event().wait()

    for _ in range(3):
        await followed.life.live(30)
        crashing = Crashing()
        async with running(follower_of(followed.log, url, crashing)), asyncio.timeout(30):
            await crashing.committed.wait()
        assert await rows_at(url) == expected_rows(await followed.events())
    async with running(follower_of(followed.log, url, FeedConsumer(place))) as follower:
        await followed.life.live(30)
        events = await followed.events()
        await reached(follower, events[-1].position)
    assert await rows_at(url) == expected_rows(events)
    await followed.log.close()


async def test_an_event_of_a_newer_version_is_waited_for_and_not_passed_over(
    url: str, tmp_path: Path
) -> None:
    followed = await _sqlite(tmp_path, 4)
    assert isinstance(followed.log, SqlEventLog)
    await followed.life.live(60)
    events = await followed.events()
    placed = events[len(events) * 2 // 3]
    engine = followed.log.engine

    async def put(payload: bytes) -> None:
        values = {"p": payload, "c": checksum(placed.stream, placed.version, payload), "at": placed.position}
        statement = text("UPDATE events SET payload = :p, checksum = :c WHERE position = :at")
        async with engine.connect() as connection:
            await connection.execute(statement, values)

    await put(NEWER_EVENT)
    models = await ReadModels.open(url)
    async with running(follower_of(followed.log, url, followed.feed())) as follower:
        assert "'new_one.v9'" in await complaint(follower, "stale")
        status = await marked_stale(models)
        assert "'new_one.v9' cannot be decoded" in status.stale
        assert status.position == placed.position - 1
        assert await rows_at(url) == expected_rows(events[: placed.position - 1])
        await put(encode(placed.event))
        await reached(follower, events[-1].position)
        status = await models.status()
        assert status is not None
        assert (status.stale, status.position) == ("", events[-1].position)
    assert await rows_at(url) == expected_rows(events)
    await models.close()
    await followed.log.close()


async def test_rows_that_cannot_be_written_are_stale_and_then_rebuilt(url: str) -> None:
    followed = Followed(MemoryEventLog(), 5)
    await followed.life.live(60)
    await _run(url, "DROP TABLE kv_calls")
    async with running(follower_of(followed.log, url, followed.feed())) as follower:
        await complaint(follower, "stale")
        events = await followed.events()
        await reached(follower, events[-1].position)
    assert await rows_at(url) == expected_rows(events)


async def test_a_rebuild_mends_what_somebody_changed(url: str) -> None:
    followed = Followed(MemoryEventLog(), 6)
    await followed.life.live(60)
    events = await followed.events()
    models = await ReadModels.open(url)
    await models.attach(LOG_ID)
    await models.write(events)
    await _run(
        url,
        "UPDATE kv_contexts SET tenant = 'x', position = 3",
        "DELETE FROM kv_calls",
        "UPDATE kv_read_models SET position = 4",
    )
    await models.rebuild(followed.log, LOG_ID)
    assert await rows_at(url) == expected_rows(events)
    await models.close()


async def test_rows_of_another_log_are_left_to_a_person(url: str) -> None:
    one, other = Followed(MemoryEventLog(), 7), Followed(MemoryEventLog(), 8)
    await one.life.live(40)
    await other.life.live(40)
    models = await ReadModels.open(url)
    await models.attach("one")
    await models.write(await one.events())
    with pytest.raises(ReadModelsUnavailable, match="another event log"):
        await models.attach("other")
    assert await rows_at(url) == expected_rows(await one.events())
    await models.rebuild(other.log, "other")
    assert await rows_at(url) == expected_rows(await other.events())
    await models.close()


@every_log
async def test_what_a_trimmed_log_no_longer_tells_is_kept(url: str, tmp_path: Path, opened: Opened) -> None:
    followed = await opened(tmp_path, 9)
    await followed.life.live(80)
    models = await ReadModels.open(url)
    await models.attach(LOG_ID)
    events = await followed.events()
    await models.write(events)
    await _trim(followed.log, events[-1].position // 2)
    first = await followed.log.first_position()
    assert first > 1
    await _run(url, "UPDATE kv_calls SET outcome = 'x' WHERE ended_at IS NOT NULL AND position > 0")
    rebuilt = await models.rebuild(followed.log, LOG_ID)
    expected = expected_rows(events)
    assert rebuilt.first_position == first
    assert rebuilt.kept == sum(r["position"] < first for rows in expected.values() for r in rows.values()) > 0
    rows = await rows_at(url)
    assert {name: set(found) for name, found in rows.items()} == {n: set(f) for n, f in expected.items()}
    told = [key for key, row in expected["kv_calls"].items() if row["position"] >= first]
    assert [rows["kv_calls"][key] for key in told] == [expected["kv_calls"][key] for key in told]
    assert rows["kv_contexts"] == expected["kv_contexts"]
    await models.close()
    await followed.log.close()


async def test_events_that_were_trimmed_before_they_were_read_lead_to_a_rebuild(url: str) -> None:
    followed = Followed(MemoryEventLog(), 10)
    await followed.life.live(30)
    async with running(follower_of(followed.log, url, followed.feed())) as follower:
        await reached(follower, (await followed.events())[-1].position)
    await followed.life.live(30)
    last = (await followed.events())[-1].position
    await _trim(followed.log, last - 5)
    await followed.life.live(10)
    async with running(follower_of(followed.log, url, followed.feed())) as follower:
        await reached(follower, (await followed.events())[-1].position)
    rows = await rows_at(url)
    positions = {row["position"] for found in rows.values() for row in found.values()}
    assert min(positions) < last - 5 < max(positions)


async def test_postgresql_that_is_killed_and_restarted_misses_nothing() -> None:
    server = PostgresProcess()
    try:
        await asyncio.to_thread(server.start)
        url = await server.new_database()
        followed = Followed(MemoryEventLog(), 11)
        async with running(follower_of(followed.log, url, followed.feed())) as follower:
            for _ in range(3):
                await followed.life.live(30)
                server.kill()
                await followed.life.live(30)
                await asyncio.to_thread(server.start)
            events = await followed.events()
            await reached(follower, events[-1].position)
        await until_rows(url, lambda rows: rows == expected_rows(events))
    finally:
        await asyncio.to_thread(server.remove)


async def _trim(log: EventLog, through: int) -> None:
    streams = {recorded.stream async for recorded in log.read_all()}
    before = 0
    while (first := await log.trim(through, streams)) != before:
        before = first


async def _run(url: str, *statements: str) -> None:
    """Somebody with rights changes tables by hand."""
    engine = await open_read_model_database(url)
    async with engine.begin() as connection:
        for statement in statements:
            await connection.execute(text(statement))
    await engine.dispose()
