"""Rows and their position in one transaction: repeated, overlapping, gapped and refused batches."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from sqlalchemy import text

from lifecycle.core.events import CallArrived, CallEnded, ContextCreated, Event, RecordedEvent
from lifecycle.core.ids import Namespace
from lifecycle.errors import CorruptLog
from lifecycle.store.memory import MemoryEventLog
from lifecycle.store.read_model_database import open_read_model_database
from lifecycle.store.read_models import PAGE, ReadModels, pages
from lifecycle.vocabulary import CallEnd, IdentityRung
from tests.conformance.read_model_rows import rows_at
from tests.lifecycle.store.following import LOG_ID
from tests.lifecycle.store.postgres_process import new_shared_database


def life(num_calls: int) -> list[Event]:
    """One context and its calls."""
    created = ContextCreated(
        at_ns=0,
        uid="a",
        tenant="t",
        context_id="c",
        namespace=Namespace("m"),
        rung=IdentityRung.EXPLICIT,
    )
    events: list[Event] = [created]
    for n in range(num_calls):
        events.append(CallArrived(at_ns=n, call_id=f"call {n}", attempt=1, kept=-1, num_messages=n))
        events.append(CallEnded(at_ns=n, call_id=f"call {n}", attempt=1, end=CallEnd.COMPLETED))
    return events


async def logged(events: list[Event]) -> tuple[MemoryEventLog, list[RecordedEvent]]:
    log = MemoryEventLog()
    return log, list(await log.append("ctx/a", events, 0))


@pytest.fixture(params=["sqlite", "postgresql"])
async def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return f"sqlite:///{tmp_path}/rows.db" if request.param == "sqlite" else await new_shared_database()


@pytest.fixture
async def models(url: str) -> AsyncIterator[ReadModels]:
    opened = await ReadModels.open(url)
    yield opened
    await opened.close()


async def position_of(models: ReadModels) -> int:
    status = await models.status()
    assert status is not None
    return status.position


async def test_nothing_is_told_before_a_log_is_named(models: ReadModels) -> None:
    _, events = await logged(life(1))
    assert await models.status() is None
    assert await models.write(events) == 0
    assert (await models.attach(LOG_ID)).position == 0
    assert await models.write(events) == 3
    assert (await models.attach(LOG_ID)).position == 3


async def test_a_batch_that_would_leave_a_gap_is_not_taken(models: ReadModels, url: str) -> None:
    _, events = await logged(life(3))
    await models.attach(LOG_ID)
    assert await models.write(events[:2]) == 2
    assert await models.write(events[3:]) == 2
    assert len((await rows_at(url))["kv_calls"]) == 1
    assert await models.write(events[1:]) == 7
    assert len((await rows_at(url))["kv_calls"]) == 3


@settings(max_examples=15, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.tuples(st.integers(0, 20), st.integers(0, 20)), max_size=12))
async def test_batches_in_any_order_and_number_lead_to_the_same_rows(
    tmp_path: Path, batches: list[tuple[int, int]]
) -> None:
    (tmp_path / "rows.db").unlink(missing_ok=True)
    (tmp_path / "rows.db-wal").unlink(missing_ok=True)
    (tmp_path / "rows.db-shm").unlink(missing_ok=True)
    _, events = await logged(life(9))
    url = f"sqlite:///{tmp_path}/rows.db"
    models = await ReadModels.open(url)
    await models.attach(LOG_ID)
    told = 0
    for start, length in batches:
        batch = events[start : start + length]
        if batch and start <= told:
            told = max(told, batch[-1].position)
        assert await models.write(batch) == told
    assert len((await rows_at(url))["kv_calls"]) == told // 2
    await models.write(events)
    ended = {row["outcome"] for row in (await rows_at(url))["kv_calls"].values()}
    assert ended == {"completed"}
    await models.close()


async def test_writers_at_the_same_time_leave_what_one_would(url: str) -> None:
    _, events = await logged(life(40))
    several = [await ReadModels.open(url, timeout_s=30) for _ in range(4)]
    await several[0].attach(LOG_ID)

    async def write(models: ReadModels) -> None:
        position = 0
        while position < len(events):
            position = await models.write(events[position : position + 7])

    await asyncio.gather(*(write(models) for models in several))
    assert len((await rows_at(url))["kv_calls"]) == 40
    for models in several:
        await models.close()


async def test_rows_and_position_are_one(models: ReadModels, url: str) -> None:
    """What cannot be written whole is not written."""
    _, events = await logged(life(3))
    await models.attach(LOG_ID)
    await models.write(events[:3])
    before = await rows_at(url)
    engine = await open_read_model_database(url)
    async with engine.begin() as connection:
        await connection.execute(text("ALTER TABLE kv_calls RENAME TO kv_gone"))
    with pytest.raises(Exception, match="kv_calls"):
        await models.write(events[3:])
    async with engine.begin() as connection:
        await connection.execute(text("ALTER TABLE kv_gone RENAME TO kv_calls"))
    await engine.dispose()
    assert await rows_at(url) == before
    assert await position_of(models) == 3


async def test_stale_until_it_could_be_read_or_was_rebuilt(models: ReadModels) -> None:
    log, events = await logged(life(3))
    await models.attach(LOG_ID)
    await models.write(events[:3])
    await models.mark_stale("unreadable", rebuild=False)
    assert await models.status() == (LOG_ID, 3, "unreadable", False)
    await models.write(events)
    assert await models.status() == (LOG_ID, 7, "", False)
    await models.mark_stale("unreadable", rebuild=False)
    await models.mark_current()
    assert await models.status() == (LOG_ID, 7, "", False)
    await models.mark_stale("broken", rebuild=True)
    await models.mark_current()
    assert await models.write(events) == 7
    assert await models.status() == (LOG_ID, 7, "broken", True)
    await models.rebuild(log, LOG_ID)
    assert await models.status() == (LOG_ID, 7, "", False)


async def test_a_rebuild_that_fails_leaves_the_rows_as_they_were(models: ReadModels, url: str) -> None:
    log, events = await logged(life(PAGE))
    await models.attach(LOG_ID)
    await models.write(events[:41])
    before = await rows_at(url)
    heard: list[int] = []

    async def stop(position: int) -> None:
        heard.append(position)
        raise CorruptLog("stop")

    with pytest.raises(CorruptLog):
        await models.rebuild(log, LOG_ID, stop)
    assert heard == [PAGE]
    assert await rows_at(url) == before
    assert await position_of(models) == 41


async def test_pages_before_something_unreadable_come_before_the_error() -> None:
    _, events = await logged(life(PAGE))

    async def damaged() -> AsyncIterator[RecordedEvent]:
        for recorded in events[: PAGE + 3]:
            yield recorded
        raise CorruptLog("here")

    seen: list[int] = []

    async def read() -> None:
        async for page in pages(damaged()):
            seen.extend(recorded.position for recorded in page)

    with pytest.raises(CorruptLog):
        await read()
    assert seen == list(range(1, PAGE + 4))
