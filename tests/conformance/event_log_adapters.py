"""The adapters that the event log's conformance suite runs on. A new one is a new entry in `ADAPTERS`."""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from lifecycle.ports import EventLog
from lifecycle.store.memory import MemoryEventLog
from lifecycle.store.redis_streams import RedisEventLog
from lifecycle.store.sql import SqlEventLog
from tests.lifecycle.store.faulty_event_log import FaultyEventLog
from tests.lifecycle.store.redis_process import place_in_shared_redis


@dataclass(frozen=True)
class Adapter:
    """`connect` gives a connection to the log at a place; `shared` says that two of them see one log."""

    name: str
    connect: Callable[[Path], Awaitable[EventLog]]
    shared: bool


async def _memory(_place: Path) -> EventLog:
    return MemoryEventLog()


async def _slow_memory(_place: Path) -> EventLog:
    return FaultyEventLog(MemoryEventLog(), hops=3)


async def _sqlite(place: Path) -> EventLog:
    return await SqlEventLog.open(f"sqlite:///{place}/events.db")


async def _redis(place: Path) -> EventLog:
    return await RedisEventLog.open(await place_in_shared_redis(place))


ADAPTERS = (
    Adapter("memory", _memory, shared=False),
    Adapter("memory behind delays", _slow_memory, shared=False),
    Adapter("sqlite", _sqlite, shared=True),
    Adapter("redis", _redis, shared=True),
)

Connect = Callable[[], Awaitable[EventLog]]

shared = pytest.mark.parametrize(
    "adapter", [a for a in ADAPTERS if a.shared], ids=lambda adapter: adapter.name, indirect=True
)
"""For tests of several connections to one log."""
