"""The engine's event stream, read over a real socket into what is kept of it."""

import asyncio
from pathlib import Path

from engine_bridge.call_blocks import CallBlocks
from engine_bridge.placement_watch import PlacementWatch
from engine_bridge.sim.event_stream import EventStream
from lifecycle.store.memory import MemoryEventLog
from lifecycle.tracker import Tracker
from proxy.config import CacheConfig, Config
from proxy.event_reading import EventReading
from proxy.system import SystemClock
from tests.lifecycle.fake_cache import FakeCache


def placement() -> PlacementWatch:
    return PlacementWatch(Tracker(MemoryEventLog(), SystemClock()), FakeCache())


async def test_without_an_endpoint_nothing_is_read() -> None:
    blocks = CallBlocks()
    await EventReading(Config(), blocks, placement()).run()
    assert not blocks.live


async def test_blocks_are_live_for_as_long_as_they_are_read(tmp_path: Path) -> None:
    blocks = CallBlocks()
    async with EventStream() as stream:
        cache = CacheConfig(events_endpoint=stream.endpoint, replay_endpoint=stream.replay_endpoint)
        reading = asyncio.create_task(EventReading(Config(cache=cache), blocks, placement()).run())
        await asyncio.sleep(0)
        assert blocks.live
        reading.cancel()
        await asyncio.wait([reading])
        assert not blocks.live
