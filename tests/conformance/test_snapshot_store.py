"""The `SnapshotStore` contract, on every adapter, and whole lives on each adapter's log."""

from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import pytest

from lifecycle.ports import SnapshotStore, StoredSnapshot
from lifecycle.tracker import Tracker
from tests.conformance.snapshot_store_adapters import STORE_ADAPTERS, Beside, StoreAdapter
from tests.lifecycle.random_books import KEEP_RECURRING_SECONDS, RETENTION_SECONDS, RandomBooks, busy, facts

Connect = Callable[[], Awaitable[Beside]]


@pytest.fixture(params=STORE_ADAPTERS, ids=lambda adapter: adapter.name)
def adapter(request: pytest.FixtureRequest) -> StoreAdapter:
    return request.param  # type: ignore[no-any-return]


@pytest.fixture
async def connect(adapter: StoreAdapter, tmp_path: Path) -> AsyncIterator[Connect]:
    opened: list[Beside] = []

    async def one_more() -> Beside:
        opened.append(await adapter.connect(tmp_path))
        return opened[-1]

    yield one_more
    for log, _ in opened:
        await log.close()


@pytest.fixture
async def store(connect: Connect) -> SnapshotStore:
    return (await connect())[1]


lasting = pytest.mark.parametrize(
    "adapter", [a for a in STORE_ADAPTERS if a.lasting], ids=lambda adapter: adapter.name, indirect=True
)
"""For tests of what a restart finds."""


def snapshot(position: int) -> StoredSnapshot:
    return StoredSnapshot(position, b"manifest %d" % position)


async def test_a_new_store_holds_nothing(store: SnapshotStore) -> None:
    assert list(await store.newest_first()) == []
    assert dict(await store.parts(["a"])) == {}
    assert dict(await store.parts([])) == {}


async def test_parts_come_back_as_they_were_put_last(store: SnapshotStore) -> None:
    content = {"a": b"", "ünï/日本語": bytes(range(256)), "big": b"x" * 3_000_000}
    await store.put({})
    await store.put(content)
    assert dict(await store.parts(["big", "never", *content])) == content
    await store.put({"a": b"another"})
    assert dict(await store.parts(["a"])) == {"a": b"another"}


async def test_many_parts_come_back_at_once(store: SnapshotStore) -> None:
    content = {f"part {n}": b"%d" % n for n in range(2000)}
    await store.put(content)
    assert dict(await store.parts(list(content))) == content
    await store.commit(snapshot(1), None, list(content)[:7])
    assert set(await store.parts(list(content))) == set(list(content)[:7])


async def test_the_last_two_snapshots_are_kept_with_their_parts(store: SnapshotStore) -> None:
    await store.put({"one": b"1", "shared": b"s"})
    assert list(await store.newest_first()) == [], "parts alone are no snapshot"
    await store.commit(snapshot(5), None, {"one", "shared"})
    await store.put({"two": b"2"})
    await store.commit(snapshot(10), 5, {"one", "two", "shared"})
    assert list(await store.newest_first()) == [snapshot(10), snapshot(5)]
    await store.put({"three": b"3"})
    await store.commit(snapshot(200), 10, {"two", "three", "shared"})
    assert list(await store.newest_first()) == [snapshot(200), snapshot(10)]
    assert set(await store.parts(["one", "two", "three", "shared"])) == {"two", "three", "shared"}


async def test_a_snapshot_of_the_same_position_takes_the_others_place(store: SnapshotStore) -> None:
    await store.commit(snapshot(5), None, ())
    await store.commit(StoredSnapshot(5, b"again"), None, ())
    assert list(await store.newest_first()) == [StoredSnapshot(5, b"again")]


@lasting
async def test_a_restart_finds_them(store: SnapshotStore, connect: Connect) -> None:
    await store.put({"a": b"1"})
    await store.commit(snapshot(3), None, {"a"})
    _, again = await connect()
    assert list(await again.newest_first()) == [snapshot(3)]
    assert dict(await again.parts(["a"])) == {"a": b"1"}


async def test_lives_go_on_from_a_snapshot_on_a_trimmed_log(connect: Connect) -> None:
    log, store = await connect()
    it = RandomBooks(log, store, seed=5)
    await it.start()
    for step in busy(5, 160):
        await it.step(step)
    assert await log.first_position() > 1
    again = Tracker(log, it.clock, RETENTION_SECONDS, KEEP_RECURRING_SECONDS)
    await again.start(store)
    assert facts(again.contexts) == facts(it.tracker.contexts)
