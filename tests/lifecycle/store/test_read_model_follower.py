"""The follower's loop: it holds nobody up, complains and recovers. The conformance suite has the rest."""

import asyncio
from pathlib import Path

from lifecycle.errors import CorruptLog, LogUnavailable, ReadModelsUnavailable
from lifecycle.store.memory import MemoryEventLog
from lifecycle.store.read_model_follower import HeardFeed, ReadModelFollower
from lifecycle.store.read_models import ReadModels
from tests.conformance.read_model_rows import rows_at
from tests.lifecycle.lives import GatedLog
from tests.lifecycle.store.following import LOG_ID, complaint, follower_of, reached, running
from tests.lifecycle.store.test_read_models import life


async def test_a_database_that_comes_late_is_waited_for(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/late/rows.db"
    log = MemoryEventLog()
    await log.append("ctx/a", life(2), 0)
    async with running(follower_of(log, url, HeardFeed())) as follower:
        assert "late" in await complaint(follower, "cannot be opened")
        assert follower.position == 0
        (tmp_path / "late").mkdir()
        await reached(follower, 5)
    assert len((await rows_at(url))["kv_calls"]) == 2


async def test_news_that_came_while_rows_were_written_are_not_missed(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/rows.db"
    log, feed = MemoryEventLog(), HeardFeed()
    events = life(20)
    async with running(follower_of(log, url, feed)) as follower:
        for n, event in enumerate(events):
            feed.heard(await log.append("ctx/a", [event], n))
            await asyncio.sleep(0.01 if n % 5 == 0 else 0)
        await reached(follower, len(events))


async def test_a_log_that_is_away_is_waited_for(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/rows.db"

    class Away(GatedLog):
        async def first_position(self) -> int:
            if self.away is not None:
                raise self.away
            return 1

    log = Away(MemoryEventLog())
    await log.append("ctx/a", life(2), 0)
    log.away = LogUnavailable("gone for lunch")
    async with running(follower_of(log, url, HeardFeed())) as follower:  # type: ignore[arg-type]
        await complaint(follower, "gone for lunch")
        log.away = CorruptLog("an odd byte")
        assert "stale" in await complaint(follower, "an odd byte")
        log.away = None
        await reached(follower, 5)


async def test_a_bug_in_between_marks_the_rows_and_rebuilds_them(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/rows.db"
    log = MemoryEventLog()
    await log.append("ctx/a", life(2), 0)

    class Broken(ReadModels):
        broken = True

        async def write(self, batch: object) -> int:
            if self.broken:
                type(self).broken = False
                raise KeyError("a bug")
            return await super().write(batch)  # type: ignore[arg-type]

    async def opened() -> ReadModels:
        return await Broken.open(url)

    async with running(ReadModelFollower(log, LOG_ID, opened, HeardFeed())) as follower:
        assert "KeyError" in await complaint(follower, "stale")
        await reached(follower, 5)
    assert len((await rows_at(url))["kv_calls"]) == 2


async def test_the_end_does_not_wait_for_a_rebuild(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/rows.db"
    log = MemoryEventLog()
    await log.append("ctx/a", life(3000), 0)
    models = await ReadModels.open(url)
    await models.attach(LOG_ID)
    await models.mark_stale("for the test", rebuild=True)
    rebuilding = asyncio.Event()

    class Slow(ReadModels):
        async def rebuild(self, event_log, log_id, progress=None):  # type: ignore[no-untyped-def]
            async def heard(position: int) -> None:
                rebuilding.set()
                await progress(position)

            return await super().rebuild(event_log, log_id, heard)

    async def opened() -> ReadModels:
        return await Slow.open(url)

    async with running(ReadModelFollower(log, LOG_ID, opened, HeardFeed())):
        async with asyncio.timeout(30):
            await rebuilding.wait()
    status = await models.status()
    assert status is not None
    assert (status.position, status.rebuild) == (0, True)
    await models.close()


async def test_two_logs_do_not_fight_over_the_rows(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/rows.db"
    one, other = MemoryEventLog(), MemoryEventLog()
    await one.append("ctx/a", life(1), 0)
    await other.append("ctx/a", life(2), 0)
    async with running(follower_of(one, url, HeardFeed(), "one")) as first:
        await reached(first, 3)
        async with running(follower_of(other, url, HeardFeed(), "other")) as second:
            assert "kvtether rebuild" in await complaint(second, "another event log")
        assert first.problem == ""
    assert len((await rows_at(url))["kv_calls"]) == 1


def test_what_may_be_waited_for_is_no_bug() -> None:
    assert not issubclass(ReadModelsUnavailable, LogUnavailable)
