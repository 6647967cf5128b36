"""A snapshot is taken whole and as it was written, or not at all."""

from collections.abc import Mapping
from pathlib import Path

import msgspec
import pytest

from lifecycle.errors import CorruptLog
from lifecycle.ports import StoredSnapshot
from lifecycle.projections.contexts import Contexts
from lifecycle.snapshots import (
    FORMAT,
    Manifest,
    Unreadable,
    opened,
    read_manifest,
    restored,
    sealed,
    stored,
)
from lifecycle.store.memory import MemoryEventLog
from lifecycle.store.snapshots import MemorySnapshots
from lifecycle.tracker import Tracker
from tests.lifecycle.golden_snapshots import contents, golden_files, read_golden
from tests.lifecycle.random_books import KEEP_RECURRING_SECONDS, RETENTION_SECONDS, RandomBooks, facts

STEPS = (
    *("open", "call", "store", "open", "call", "fork", "call", "pin", "store", "abort"),
    *("plan", "replace", "call", "settle", "open", "call", "close"),
)


async def with_two_snapshots(seed: int = 1) -> tuple[RandomBooks, MemorySnapshots, list[StoredSnapshot]]:
    """Books with a snapshot in the middle of their life and one before the end."""
    snapshots = MemorySnapshots()
    it = RandomBooks(MemoryEventLog(), snapshots, seed)
    await it.start()
    for steps in (STEPS, ("snapshot",), STEPS, ("snapshot",), STEPS):
        for step in steps:
            await it.step(step)
    return it, snapshots, list(await snapshots.newest_first())


async def restarted(it: RandomBooks, snapshots: MemorySnapshots) -> tuple[int, bytes]:
    """Position of the snapshot that a restart took (0: none), and what it made of it."""
    tracker = Tracker(it.log, it.clock, RETENTION_SECONDS, KEEP_RECURRING_SECONDS)
    manifest = await tracker.start(snapshots)
    return (manifest.position if manifest else 0), facts(tracker.contexts)


async def damage(snapshots: MemorySnapshots, manifest: Manifest, which: int, at: int) -> None:
    """Flip a bit of one part; `at` counts bytes, from either end."""
    name = list(manifest.parts())[which]
    content = bytearray((await snapshots.parts([name]))[name])
    content[at] ^= 0x10
    await snapshots.put({name: bytes(content)})


@pytest.mark.parametrize("path", golden_files(), ids=lambda path: path.stem)
async def test_a_snapshot_of_any_earlier_version_is_read_as_it_was_meant(path: Path) -> None:
    golden = read_golden(path)
    store = MemorySnapshots()
    await store.put(golden.parts)
    contexts = Contexts(RETENTION_SECONDS, KEEP_RECURRING_SECONDS)
    await restored(store, read_manifest(golden.snapshot), contexts)
    assert contents(contexts) == golden.contains
    index = contexts.index
    stats = [index.stats(namespace) for namespace in index.namespaces()]
    assert len(contexts.states) > 3
    assert contexts.directives
    assert all(sum(getattr(s, name) for s in stats) > 0 for name in ("live", "dead", "verified"))


def test_the_format_of_this_version_is_kept() -> None:
    assert f"golden_snapshot_{FORMAT}" in {path.stem for path in golden_files()}, "run `make golden`"


async def test_the_newest_is_taken() -> None:
    it, snapshots, kept = await with_two_snapshots()
    position, found = await restarted(it, snapshots)
    assert position == kept[0].position
    assert found == facts(it.tracker.contexts)


@pytest.mark.parametrize("at", [0, 3, 4, -1])
@pytest.mark.parametrize("which", [0, 1, -1])
async def test_a_flipped_bit_makes_it_none_and_the_older_one_or_the_log_is_taken(which: int, at: int) -> None:
    it, snapshots, kept = await with_two_snapshots()
    newest, older = (read_manifest(s) for s in kept)
    await damage(snapshots, newest, which, at)
    position, found = await restarted(it, snapshots)
    assert position in (older.position, 0)
    assert found == facts(it.tracker.contexts)
    await damage(snapshots, older, -1, at)
    assert await restarted(it, snapshots) == (0, found)


async def test_a_missing_part_makes_it_none() -> None:
    it, snapshots, kept = await with_two_snapshots()
    newest, older = (read_manifest(s) for s in kept)
    await snapshots.commit(kept[0], kept[1].position, set(older.parts()))
    position, found = await restarted(it, snapshots)
    assert position == older.position
    assert found == facts(it.tracker.contexts)
    assert not set(older.parts()) >= set(newest.parts())


async def test_another_format_is_left_alone() -> None:
    it, snapshots, kept = await with_two_snapshots()
    newer = stored(msgspec.structs.replace(read_manifest(kept[0]), format=99))
    await snapshots.commit(newer, kept[1].position, set(read_manifest(kept[1]).parts()))
    with pytest.raises(Unreadable, match="format 99"):
        read_manifest(newer)
    assert (await restarted(it, snapshots))[0] == kept[1].position


@pytest.mark.parametrize("manifest", [b"", b"KVT", b"KVT\x01", b"KVT\x01" + bytes(9), b"something else"])
def test_what_is_no_manifest_is_none(manifest: bytes) -> None:
    with pytest.raises(Unreadable):
        read_manifest(StoredSnapshot(1, manifest))


async def test_a_manifest_belongs_to_its_position() -> None:
    _, _, kept = await with_two_snapshots()
    with pytest.raises(Unreadable):
        read_manifest(StoredSnapshot(kept[0].position + 1, kept[0].manifest))


def test_content_is_bound_to_its_name() -> None:
    assert opened("a", sealed("a", b"content")) == b"content"
    with pytest.raises(Unreadable):
        opened("b", sealed("a", b"content"))


async def test_a_snapshot_of_another_history_is_passed_over() -> None:
    it, snapshots, _ = await with_two_snapshots()
    shorter = MemoryEventLog()
    for recorded in it.recorded[:5]:
        await shorter.append(recorded.stream, [recorded.event], recorded.version - 1)
    tracker = Tracker(shorter, it.clock, RETENTION_SECONDS, KEEP_RECURRING_SECONDS)
    assert await tracker.start(snapshots) is None
    assert tracker.contexts.position == 5


async def test_a_trimmed_log_without_a_usable_snapshot_is_corrupt_and_says_why() -> None:
    it, snapshots, kept = await with_two_snapshots()
    await it.log.trim(kept[0].position, tuple(it.tracker.contexts.stream_versions))
    tracker = Tracker(it.log, it.clock, RETENTION_SECONDS, KEEP_RECURRING_SECONDS)
    with pytest.raises(CorruptLog, match=f"begins at position {kept[0].position + 1}.*no snapshot"):
        await tracker.start(MemorySnapshots())
    with pytest.raises(CorruptLog):
        await Tracker(it.log, it.clock, RETENTION_SECONDS, KEEP_RECURRING_SECONDS).start()
    assert (await restarted(it, snapshots))[1] == facts(it.tracker.contexts)


async def test_the_older_one_is_no_help_where_the_log_does_not_go_on_from_it() -> None:
    it, snapshots, kept = await with_two_snapshots()
    await it.log.trim(kept[0].position, tuple(it.tracker.contexts.stream_versions))
    await damage(snapshots, read_manifest(kept[0]), -1, 5)
    with pytest.raises(CorruptLog):
        await Tracker(it.log, it.clock, RETENTION_SECONDS, KEEP_RECURRING_SECONDS).start(snapshots)


class WatchedSnapshots(MemorySnapshots):
    """Notes the names of what is put."""

    def __init__(self) -> None:
        super().__init__()
        self.written: list[str] = []

    async def put(self, parts: Mapping[str, bytes]) -> None:
        self.written.extend(parts)
        await super().put(parts)


async def test_what_did_not_change_is_not_written_again() -> None:
    snapshots = WatchedSnapshots()
    it = RandomBooks(MemoryEventLog(), snapshots, seed=1)
    await it.start()
    for step in (*STEPS, "snapshot"):
        await it.step(step)
    assert len({n for n in snapshots.written if "/context/" in n}) == len(it.tracker.contexts.states) > 2
    snapshots.written.clear()
    agent = next(a for a in it.agents if a.uid in it.tracker.contexts.states)
    await agent.arrive("s1 u1", "another")
    await it.step("snapshot")
    (name,) = (n for n in snapshots.written if "/context/" in n or "/directive/" in n)
    assert name.split("/")[2] == agent.uid
    snapshots.written.clear()
    await it.step("snapshot")
    assert snapshots.written == [], "nothing happened"
