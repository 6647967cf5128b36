"""The SQLite log when the world misbehaves: full disks, locks, damage, crashes, callers that leave."""

import asyncio
import resource
import signal
import sqlite3
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest
from sqlalchemy import event

from lifecycle.core.events import ChunksGone, Event, ListGrown, RecordedEvent
from lifecycle.core.ids import Namespace
from lifecycle.errors import CorruptLog, LifecycleError, LogUnavailable
from lifecycle.store.codec import checksum
from lifecycle.store.database import blocking_engine, open_database
from lifecycle.store.sql import SqlEventLog
from lifecycle.store.sql_writer import SqlWriter

REPOSITORY = Path(__file__).parents[3]


def grown(*counts: int) -> list[Event]:
    return [ListGrown(at_ns=1, num_new=n) for n in counts]


def heavy(size_bytes: int) -> list[Event]:
    """One event of about this size."""
    return [ChunksGone(at_ns=1, namespace=Namespace("m"), keys=b"\xa5" * size_bytes)]


def numbers(recorded: list[RecordedEvent]) -> list[int]:
    return [r.event.num_new for r in recorded if isinstance(r.event, ListGrown)]


async def all_of(log: SqlEventLog) -> list[RecordedEvent]:
    return [r async for r in log.read_all()]


def behind_its_back(path: Path, *statements: tuple[Any, ...]) -> None:
    """Run statements as another process would."""
    connection = sqlite3.connect(path, isolation_level=None)
    for sql, *arguments in statements:
        connection.execute(sql, arguments)
    connection.close()


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "events.db"


@pytest.fixture
async def log(path: Path) -> AsyncIterator[SqlEventLog]:
    log = await SqlEventLog.open(f"sqlite:///{path}", busy_timeout_s=0.05)
    yield log
    await log.close()


@contextmanager
def files_no_larger_than(size_bytes: int) -> Iterator[None]:
    """The operating system refuses to let any file of this process grow beyond the size."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


# -- no room ----------------------------------------------------------------------------------------------


async def test_a_disk_that_is_full_and_has_room_again(log: SqlEventLog, path: Path) -> None:
    await log.append("ctx/a", grown(1), 0)
    wal_bytes = sum(file.stat().st_size for file in path.parent.glob("*-wal"))
    with files_no_larger_than(wal_bytes + 20_000):
        answers = await asyncio.gather(
            *(log.append(f"ctx/{n}", heavy(40_000), 0) for n in range(4)), return_exceptions=True
        )
        assert [type(answer) for answer in answers] == [LogUnavailable] * 4
        assert numbers(await all_of(log)) == [1]
    (recorded,) = await log.append("ctx/0", heavy(40_000), 0)
    assert (recorded.version, recorded.position) == (1, 2)
    await log.append("ctx/a", grown(2), 1)
    assert numbers(await all_of(log)) == [1, 2]


async def test_a_database_at_its_limit_says_that_no_room_is_left(path: Path) -> None:
    await (await SqlEventLog.open(f"sqlite:///{path}")).close()
    behind_its_back(path, ("CREATE TABLE ballast AS SELECT zeroblob(400000) AS weight",))
    engine = await open_database(f"sqlite:///{path}")
    writing = blocking_engine(engine.url, busy_timeout_s=0.05)
    event.listen(writing, "connect", lambda connection, _: connection.execute("PRAGMA max_page_count = 1"))
    log = SqlEventLog(engine, SqlWriter(writing))
    with pytest.raises(LogUnavailable, match="no room is left on its disk"):
        await log.append("ctx/b", heavy(40_000), 0)
    assert await log.head() == 0
    behind_its_back(path, ("DROP TABLE ballast",))
    assert (await log.append("ctx/b", heavy(40_000), 0))[0].position == 1
    await log.close()


# -- locks ------------------------------------------------------------------------------------------------


async def test_a_locked_database_is_named_and_usable_afterwards(log: SqlEventLog, path: Path) -> None:
    other = sqlite3.connect(path, isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    with pytest.raises(LogUnavailable, match="another process holds it locked"):
        await log.append("ctx/a", grown(1), 0)
    assert await all_of(log) == []
    other.execute("ROLLBACK")
    other.close()
    assert numbers(list(await log.append("ctx/a", grown(1), 0))) == [1]


async def test_a_caller_that_leaves_mid_write_leaves_a_whole_batch(path: Path) -> None:
    log = await SqlEventLog.open(f"sqlite:///{path}", busy_timeout_s=30)
    other = sqlite3.connect(path, isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    leader = asyncio.ensure_future(log.append("ctx/leader", grown(1, 1, 1), 0))
    follower = asyncio.ensure_future(log.append("ctx/follower", grown(2, 2), 0))
    stays = asyncio.ensure_future(log.append("ctx/stays", grown(3), 0))
    await asyncio.sleep(0)
    leader.cancel()
    follower.cancel()
    await asyncio.wait([leader, follower])
    assert leader.cancelled()
    assert follower.cancelled()
    other.execute("ROLLBACK")
    other.close()
    assert numbers(list(await stays)) == [3]
    assert numbers(await all_of(log)) == [1, 1, 1, 2, 2, 3]
    await log.close()


# -- damage -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        ("UPDATE events SET payload = zeroblob(9) WHERE version = 2", "altered"),
        ("UPDATE events SET payload = substr(payload, 1, 20) WHERE version = 2", "altered"),
        ("UPDATE events SET payload = 'text' WHERE version = 2", "altered"),
        ("UPDATE events SET checksum = checksum + 1 WHERE version = 2", "altered"),
        ("UPDATE events SET version = version + 1 WHERE version >= 3", "lacks version 3"),
        ("DELETE FROM events WHERE version = 2", "lacks version 2"),
    ],
)
async def test_a_row_that_was_changed_is_found(log: SqlEventLog, path: Path, damage: str, says: str) -> None:
    await log.append("ctx/a", grown(1, 2, 3), 0)
    behind_its_back(path, (damage,))
    with pytest.raises(CorruptLog, match=rf"ctx/a.*{says}"):
        [r async for r in log.read_stream("ctx/a")]


async def test_what_was_read_before_the_damage_is_given(log: SqlEventLog, path: Path) -> None:
    await log.append("ctx/a", grown(1, 2, 3), 0)
    behind_its_back(path, ("UPDATE events SET payload = x'00' WHERE version = 3",))
    read = log.read_all()
    assert numbers([await anext(read), await anext(read)]) == [1, 2]
    with pytest.raises(CorruptLog, match="position 3"):
        await anext(read)


async def test_an_event_of_a_newer_version_is_named(log: SqlEventLog, path: Path) -> None:
    payload = msgspec.msgpack.encode({"type": "context_teleported.v7", "at_ns": 1})
    row = (1, "ctx/a", 1, "context_teleported.v7", 1, payload, checksum("ctx/a", 1, payload))
    behind_its_back(path, ("INSERT INTO events VALUES (?, ?, ?, ?, ?, ?, ?)", *row))
    with pytest.raises(CorruptLog, match=r"position 1.*context_teleported\.v7"):
        await all_of(log)


async def test_no_flipped_byte_in_the_file_makes_a_wrong_event(path: Path) -> None:
    log = await SqlEventLog.open(f"sqlite:///{path}")
    await log.append("ctx/a", grown(*range(40)), 0)
    await log.append("ns/m//", heavy(9000), 0)
    original = {r.position: r for r in await all_of(log)}
    await log.close()
    found = 0
    for damaged in damaged_copies(path, count=60):
        try:
            copy = await SqlEventLog.open(f"sqlite:///{damaged}")
        except LifecycleError:
            found += 1
            continue
        try:
            for read in (copy.read_all(), copy.read_stream("ctx/a")):
                async for recorded in read:
                    assert recorded == original[recorded.position]
        except LifecycleError:
            found += 1
        finally:
            await copy.close()
    assert found > 10


def damaged_copies(path: Path, count: int) -> list[Path]:
    """Copies of a closed log's file, each with one byte flipped, spread over the file."""
    sound = path.read_bytes()
    copies = []
    for offset in range(17, len(sound), len(sound) // count):
        damaged = bytearray(sound)
        damaged[offset] ^= 0x41
        copies.append(path.with_name(f"damaged{offset}.db"))
        copies[-1].write_bytes(damaged)
    return copies


# -- crashes ----------------------------------------------------------------------------------------------


async def test_a_torn_write_loses_whole_batches_from_the_end_only(path: Path) -> None:
    log = await SqlEventLog.open(f"sqlite:///{path}")
    for version in range(0, 30, 3):
        await log.append("ctx/a", grown(version, version, version), version)
    copies = torn_copies(path, count=40)
    await log.close()
    lengths = set()
    for copy in copies:
        torn = await SqlEventLog.open(f"sqlite:///{copy}")
        seen = numbers(await all_of(torn))
        assert seen == [n for version in range(0, len(seen), 3) for n in [version] * 3]
        assert len(await torn.append("ctx/a", grown(9, 9), len(seen))) == 2
        lengths.add(len(seen))
        await torn.close()
    assert {0, 15, 27, 30} <= lengths


def torn_copies(path: Path, count: int) -> list[Path]:
    """Copies of an open log's files in which the last writes to the write-ahead log were lost."""
    main, tail = path.read_bytes(), path.with_name(f"{path.name}-wal").read_bytes()
    copies = []
    for cut in [*range(0, len(tail), len(tail) // count), len(tail)]:
        copies.append(path.with_name(f"torn{cut}.db"))
        copies[-1].write_bytes(main)
        copies[-1].with_name(f"torn{cut}.db-wal").write_bytes(tail[:cut])
    return copies


async def start_appender(path: Path, number: int, count: int) -> asyncio.subprocess.Process:
    command = [sys.executable, "-m", "tests.lifecycle.store.appender"]
    return await asyncio.create_subprocess_exec(
        *command,
        f"sqlite:///{path}",
        "ctx/a",
        str(number),
        str(count),
        stdout=asyncio.subprocess.PIPE,
        cwd=REPOSITORY,
    )


async def test_what_a_killed_process_was_promised_is_there(log: SqlEventLog, path: Path) -> None:
    process = await start_appender(path, number=7, count=100_000)
    assert process.stdout is not None
    promised = [int(await process.stdout.readline()) for _ in range(40)]
    process.send_signal(signal.SIGKILL)
    promised += [int(line) for line in (await process.stdout.read()).splitlines()]
    await process.wait()
    seen = await all_of(log)
    assert set(promised) <= {r.position for r in seen}
    assert len(seen) % 3 == 0
    assert numbers(list(await log.append("ctx/a", grown(8), len(seen)))) == [8]


async def test_two_processes_race_on_one_stream(log: SqlEventLog, path: Path) -> None:
    count = 60
    processes = [await start_appender(path, number, count) for number in (1, 2)]
    outputs = await asyncio.gather(*(process.communicate() for process in processes))
    assert [process.returncode for process in processes] == [0, 0]
    winners = {int(line): number for number, (out, _) in enumerate(outputs, start=1) for line in out.split()}
    seen = await all_of(log)
    assert [r.version for r in seen] == list(range(1, 2 * count * 3 + 1))
    assert numbers(seen) == [winners[position] for position in sorted(winners) for _ in range(3)]


# -- trims ------------------------------------------------------------------------------------------------


class Breaks(tuple[str, ...]):
    """Streams that cannot be asked for."""

    def __contains__(self, stream: object) -> bool:
        raise RuntimeError("in the middle of a trim")


async def test_a_trim_that_breaks_off_changes_nothing(log: SqlEventLog) -> None:
    await log.append("ctx/a", grown(1, 2), 0)
    await log.append("ctx/b", grown(3), 0)
    before = await all_of(log)
    with pytest.raises(RuntimeError):
        await log.trim(2, Breaks())
    assert (await log.first_position(), await all_of(log)) == (1, before)
    assert numbers(list(await log.append("ctx/a", grown(4), 2))) == [4]


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        ("DELETE FROM events WHERE position = 4", "position 4 is missing; 5"),
        ("DELETE FROM events WHERE position = 3", "position 3 is missing; 4"),
        ("DELETE FROM log_start", "position 1 is missing; 3"),
    ],
)
async def test_what_is_missing_beyond_a_trim_is_missed(
    log: SqlEventLog, path: Path, damage: str, says: str
) -> None:
    await log.append("ctx/a", grown(1, 2, 3, 4, 5), 0)
    assert await log.trim(2, ()) == 3
    behind_its_back(path, (damage,))
    with pytest.raises(CorruptLog, match=says):
        await all_of(log)
