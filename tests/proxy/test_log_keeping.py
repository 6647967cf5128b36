"""The whole proxy begins where it ended: from a snapshot, on a log without its beginning."""

from pathlib import Path

import pytest

from lifecycle.store.opening import open_log
from lifecycle.tracker import Tracker
from proxy.system import SystemClock
from tests.lifecycle.fake_cache import FakeCache
from tests.lifecycle.lives import books
from tests.lifecycle.store.redis_process import place_in_shared_redis
from tests.proxy.toy_model import CHUNK
from tests.proxy.whole_proxy import lifecycle, user, whole_proxy

LIST = [user("a message that is long enough for a chunk or two")]
MORE = [*LIST, user("and another one that goes on behind it for a while")]


@pytest.mark.parametrize("kind", ["sqlite", "redis"])
async def test_a_proxy_goes_on_from_the_snapshot_of_the_last_one_on_a_trimmed_log(
    tmp_path: Path, kind: str
) -> None:
    sqlite = f"sqlite:///{tmp_path / 'log.db'}"
    url = sqlite if kind == "sqlite" else await place_in_shared_redis(tmp_path)
    cache = FakeCache(chunk_size=CHUNK)
    async with whole_proxy(tmp_path, cache=cache, log_url=url) as it:
        await it.chat(LIST, lifecycle(ctx="a", call="1"))
        uid = it.context("a").uid

    opened = await open_log(url)
    head = await opened.event_log.head()
    (kept,) = await opened.snapshots.newest_first()
    assert kept.position == head
    tracker = Tracker(opened.event_log, SystemClock())
    await tracker.start(opened.snapshots)
    ownership = opened.join("who trims")
    await ownership.beat()
    first = await opened.event_log.trim(head, tuple(tracker.contexts.stream_versions))
    assert first > 1
    await ownership.leave()
    await opened.event_log.close()

    async with whole_proxy(tmp_path, cache=cache, log_url=url) as it:
        assert it.runtime.following.problem == ""
        assert it.context("a").uid == uid
        await it.chat(MORE, lifecycle(ctx="a", call="2"))
        assert set(it.context("a").attempts) == {"1", "2"}
        metrics = (await it.admin.get("/metrics")).text
        assert f"kvtether_log_first_position {float(first)}" in metrics
        assert (await it.admin.get("/readyz")).json()["warnings"] == []
        runtime = it.runtime
    ended = books(runtime.tracker.contexts)
    opened = await open_log(url)
    again = Tracker(opened.event_log, SystemClock())
    await again.start(opened.snapshots)
    assert books(again.contexts) == ended
    await opened.event_log.close()


async def test_a_trimmed_log_whose_snapshots_are_gone_leaves_a_proxy_that_forwards(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path / 'log.db'}"
    async with whole_proxy(tmp_path, log_url=url) as it:
        await it.chat(LIST, lifecycle(ctx="a", call="1"))
    opened = await open_log(url)
    await opened.event_log.trim(3, ())
    (kept,) = await opened.snapshots.newest_first()
    await opened.snapshots.commit(kept, None, ())
    await opened.event_log.close()
    async with whole_proxy(tmp_path, log_url=url) as it:
        assert (await it.chat(MORE)).status_code == 200
        assert any("no snapshot that tells of it can be read" in p for p in it.runtime.problems)
        assert not it.runtime.tracker.contexts.states
