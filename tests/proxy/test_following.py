"""A log that is away when the proxy starts costs no call, and is taken up as soon as it is back."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from lifecycle.core.events import RecordedEvent
from lifecycle.errors import LogUnavailable
from lifecycle.store.late import LateEventLog
from lifecycle.store.opening import OpenLog, open_log
from lifecycle.store.snapshots import MemorySnapshots
from lifecycle.vocabulary import DirectiveOutcome
from proxy.app import serving
from tests.lifecycle.fake_cache import FakeCache
from tests.lifecycle.lives import books, replayed_beside
from tests.lifecycle.store.redis_process import RedisProcess
from tests.proxy.scripted_upstream import ScriptedUpstream
from tests.proxy.toy_model import CHUNK, ToyEngine
from tests.proxy.whole_proxy import Whole, assistant, configured, lifecycle, system, user, whole_proxy

LIST = [system("you are a toy"), user("something that is long enough to fill some chunks")]
MORE = [*LIST, assistant("x"), user("y")]


async def stored(it: Whole) -> None:
    index = it.runtime.tracker.contexts.index
    run = b"".join(it.toy.keys(LIST))
    await it.until(lambda: index.verified_chunks(it.context("a").namespace, run) * 32 == len(run))


async def test_a_redis_that_is_away_at_the_start_is_taken_up_when_it_is_back(tmp_path: Path) -> None:
    redis = RedisProcess(tmp_path / "redis").start()
    cache = FakeCache(chunk_size=CHUNK)
    try:
        async with whole_proxy(tmp_path, cache=cache, log_url=redis.url) as it:
            await it.chat(LIST, lifecycle(ctx="a", call="1"))
            await stored(it)
            uid = it.context("a").uid
        await asyncio.to_thread(redis.kill)
        async with whole_proxy(tmp_path, cache=cache, log_url=redis.url) as it:
            assert (await it.chat(MORE, lifecycle(ctx="a", call="2"))).status_code == 200
            body = {"source": "s", "ops": [{"op": "close", "seq": 1, "ctx": "a"}]}
            assert (await it.data.post("/kv/v1/ops", json=body)).status_code == 503
            problems = (await it.admin.get("/readyz")).json()["problems"]
            assert any("nothing is followed until it can" in problem for problem in problems)
            assert not it.runtime.tracker.contexts.states

            await asyncio.to_thread(redis.start)
            await asyncio.wait_for(it.runtime.following.begun.wait(), 20)
            assert it.context("a").uid == uid
            assert set(it.context("a").attempts) == {"1"}, "the call of the time between was not followed"
            listed = (await it.admin.get("/kv/v1/contexts")).json()["items"]
            assert [each["uid"] for each in listed] == [uid]
            namespace = it.context("a").namespace
            index = it.runtime.tracker.contexts.index
            await it.until(lambda: index.last_untracked_ns(namespace) is not None)
            await it.chat(MORE, lifecycle(ctx="a", call="3"))
            assert set(it.context("a").attempts) == {"1", "3"}
            await it.ops({"op": "close", "seq": 1, "ctx": "a"})
            records = it.runtime.tracker.contexts.directives
            await it.until(lambda: any(r.result for r in records.values()))
            results = {type(r.directive).__name__: r.result.outcome for r in records.values() if r.result}
            assert results == {"Demote": DirectiveOutcome.APPLIED}, "somebody unseen used the cache meanwhile"
            assert not it.runtime.problems
            await it.runtime.mailboxes.settled()
            again = await replayed_beside(it.runtime.tracker, it.runtime.event_log)
            assert books(it.runtime.tracker.contexts) == books(again)
    finally:
        redis.kill()


async def test_the_problem_names_the_place_of_the_log_without_its_password(tmp_path: Path) -> None:
    nowhere = "redis://kv:hunter2@127.0.0.1:1/0"
    async with whole_proxy(tmp_path, log_url=nowhere, ready=False) as it:
        (problem,) = [p for p in it.runtime.problems if "event log cannot be opened" in p]
        assert "redis://127.0.0.1:1/0" in problem
        assert "hunter2" not in problem


class BreaksOff(LateEventLog):
    """A log whose first readings end early."""

    def __init__(self, opened: OpenLog, readings: int) -> None:
        super().__init__()
        self.open_for_reading(opened.event_log)
        self.open_for_writing()
        self.readings = readings

    async def read_all(self, after_position: int = 0) -> AsyncIterator[RecordedEvent]:
        self.readings -= 1
        count = 0
        async for recorded in super().read_all(after_position):
            count += 1
            if count == 3 and self.readings >= 0:
                raise LogUnavailable("the connection broke")
            yield recorded


@pytest.mark.parametrize("readings", [1, 3])
async def test_a_reading_that_breaks_off_is_taken_up_where_it_broke(tmp_path: Path, readings: int) -> None:
    log_url = f"sqlite:///{tmp_path / 'log.db'}"
    async with whole_proxy(tmp_path, log_url=log_url) as it:
        await it.chat(LIST, lifecycle(ctx="a", call="1"))
        await stored(it)

    async def opener(url: str) -> OpenLog:
        opened = await open_log(url)
        return opened._replace(event_log=BreaksOff(opened, readings), snapshots=MemorySnapshots())

    async with ScriptedUpstream(ToyEngine(FakeCache()).script) as engine:
        config = configured(tmp_path, engine.url, log_url=log_url)
        async with serving(config, FakeCache(chunk_size=CHUNK), opener) as up:
            await asyncio.wait_for(up.runtime.following.begun.wait(), 20)
            assert not up.runtime.following.problem
            async with asyncio.timeout(20):
                again = await replayed_beside(up.runtime.tracker, up.runtime.event_log)
            assert books(up.runtime.tracker.contexts) == books(again)


async def test_a_damaged_log_leaves_a_proxy_that_forwards(tmp_path: Path) -> None:
    (tmp_path / "log.db").write_bytes(b"this is no database" * 1000)
    async with whole_proxy(tmp_path, log_url=f"sqlite:///{tmp_path / 'log.db'}") as it:
        assert (await it.chat(LIST)).status_code == 200
        assert any("cannot be read, nothing is followed" in problem for problem in it.runtime.problems)
        await it.admin.post("/kv/v1/bypass?on=false")
        assert "x-kv-context" not in (await it.chat(LIST)).headers
        assert not it.runtime.following.begun.is_set()
