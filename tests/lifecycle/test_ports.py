"""Every adapter has what its port asks for, under the same names."""

import inspect
from typing import Any

import pytest

from engine_bridge.drivers.lmcache_mp import LmcacheMp
from engine_bridge.drivers.noop import NoCacheControl
from lifecycle.ports import CacheControl, Clock, EventLog, IdSource, SnapshotStore
from lifecycle.store.memory import MemoryEventLog
from lifecycle.store.snapshots import MemorySnapshots, RedisSnapshots, SqlSnapshots
from lifecycle.store.sql import SqlEventLog
from proxy.system import RandomIds, SystemClock
from tests.lifecycle.fake_cache import FakeCache
from tests.lifecycle.lives import CountedIds, GatedLog, ManualClock
from tests.lifecycle.store.faulty_event_log import FaultyEventLog

PAIRS = [
    *((EventLog, adapter) for adapter in (MemoryEventLog, SqlEventLog, GatedLog, FaultyEventLog)),
    *((SnapshotStore, adapter) for adapter in (MemorySnapshots, SqlSnapshots, RedisSnapshots)),
    *((CacheControl, adapter) for adapter in (LmcacheMp, NoCacheControl, FakeCache)),
    *((Clock, adapter) for adapter in (SystemClock, ManualClock)),
    *((IdSource, adapter) for adapter in (RandomIds, CountedIds)),
]


@pytest.mark.parametrize(("port", "adapter"), PAIRS, ids=lambda kind: kind.__name__)
def test_an_adapter_answers_whatever_its_port_may_be_asked(port: Any, adapter: Any) -> None:
    for name, member in vars(port).items():
        if name.startswith("_"):
            continue
        assert hasattr(adapter, name), name
        if inspect.isfunction(member):
            asked = [p for p in inspect.signature(member).parameters if p != "self"]
            taken = [p for p in inspect.signature(getattr(adapter, name)).parameters if p != "self"]
            assert taken[: len(asked)] == asked, name
