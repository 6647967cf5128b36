"""What the stores do beyond their contract: a server that is full, one that is away, a file that is gone."""

from pathlib import Path

import pytest

from lifecycle.core.events import ListGrown
from lifecycle.errors import LogUnavailable
from lifecycle.ports import StoredSnapshot
from lifecycle.store.redis_streams import RedisEventLog
from lifecycle.store.snapshots import RedisSnapshots
from tests.lifecycle.store.redis_process import RedisProcess

GROWN = [ListGrown(at_ns=1, num_new=1)]


async def test_a_full_redis_refuses_a_snapshot_keeps_the_last_one_and_still_trims(tmp_path: Path) -> None:
    redis = RedisProcess(tmp_path).start()
    try:
        log = await RedisEventLog.open(redis.url)
        store = RedisSnapshots(log.server)
        for version in range(5):
            await log.append("ctx/a", GROWN, version)
        await store.put({"a": b"1"})
        await store.commit(StoredSnapshot(3, b"m"), None, {"a"})
        redis.run("CONFIG", "SET", "maxmemory", "1")
        with pytest.raises(LogUnavailable, match="maxmemory"):
            await store.put({"b": b"2"})
        with pytest.raises(LogUnavailable):
            await store.commit(StoredSnapshot(5, b"n"), 3, {"a", "b"})
        assert list(await store.newest_first()) == [StoredSnapshot(3, b"m")]
        assert dict(await store.parts(["a", "b"])) == {"a": b"1"}
        assert await log.trim(3, ("ctx/a",)) == 4, "room is made where there is none"
        redis.run("CONFIG", "SET", "maxmemory", "0")
        (recorded,) = await log.append("ctx/a", GROWN, 5)
        assert recorded.position == 6
        redis.kill()
        with pytest.raises(LogUnavailable):
            await store.newest_first()
        await log.close()
    finally:
        redis.kill()
