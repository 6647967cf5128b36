"""The adapters that the snapshot stores' conformance suite runs on, each beside its log."""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path

from lifecycle.ports import EventLog, SnapshotStore
from lifecycle.store.memory import MemoryEventLog
from lifecycle.store.redis_streams import RedisEventLog
from lifecycle.store.snapshots import MemorySnapshots, RedisSnapshots, SqlSnapshots
from lifecycle.store.sql import SqlEventLog
from tests.lifecycle.store.redis_process import place_in_shared_redis

Beside = tuple[EventLog, SnapshotStore]


@dataclass(frozen=True)
class StoreAdapter:
    """`connect` gives a log and the snapshots beside it; `lasting` says that they outlive the connection."""

    name: str
    connect: Callable[[Path], Awaitable[Beside]]
    lasting: bool


async def _memory(_place: Path) -> Beside:
    return MemoryEventLog(), MemorySnapshots()


async def _sqlite(place: Path) -> Beside:
    log = await SqlEventLog.open(f"sqlite:///{place}/events.db")
    return log, SqlSnapshots(log.engine)


async def _redis(place: Path) -> Beside:
    log = await RedisEventLog.open(await place_in_shared_redis(place))
    return log, RedisSnapshots(log.server)


STORE_ADAPTERS = (
    StoreAdapter("memory", _memory, lasting=False),
    StoreAdapter("sqlite", _sqlite, lasting=True),
    StoreAdapter("redis", _redis, lasting=True),
)
