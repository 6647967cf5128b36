"""Engines' event streams, read over real sockets into what is kept of them."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from engine_bridge.cache_events import EventBatch
from engine_bridge.call_blocks import CallBlocks
from engine_bridge.placement_watch import PlacementWatch
from engine_bridge.sim.block_events import BlockStored
from engine_bridge.sim.event_stream import EventStream
from lifecycle.store.memory import MemoryEventLog
from lifecycle.tracker import Tracker
from proxy.backends import Backend, Backends
from proxy.config import BackendConfig, CacheConfig, Config
from proxy.event_reading import EventReading, no_events
from proxy.system import SystemClock
from tests.lifecycle.fake_cache import FakeCache


class Heard:
    """Who was heard, and how many batches of each were told on."""

    def __init__(self, config: Config) -> None:
        self.backends = Backends(config)
        self.blocks = CallBlocks()
        placement = PlacementWatch(Tracker(MemoryEventLog(), SystemClock()), FakeCache())
        self.reading = EventReading(self.backends, self.blocks, placement, self.told)
        self.batches: asyncio.Queue[str] = asyncio.Queue()

    def told(self, backend: Backend, batch: EventBatch) -> None:
        self.batches.put_nowait(backend.name)


@asynccontextmanager
async def reading(config: Config) -> AsyncIterator[Heard]:
    it = Heard(config)
    task = asyncio.create_task(it.reading.run())
    await asyncio.sleep(0)
    yield it
    task.cancel()
    await asyncio.wait([task])
    assert not it.blocks.live
    await it.backends.close()


def stored(tokens: list[int], session: str) -> BlockStored:
    fields: dict[str, Any] = {"block_hashes": [b"h" * 32], "parent_block_hash": None, "token_ids": tokens}
    return BlockStored(**fields, block_size=len(tokens), medium="GPU", session_id=session)


async def test_without_an_endpoint_nothing_is_read() -> None:
    it = Heard(Config())
    await it.reading.run()
    assert not it.blocks.live
    assert "cache.events_endpoint" in no_events([b.name for b in it.reading.silent])


async def test_blocks_are_live_for_as_long_as_they_are_read() -> None:
    async with EventStream() as stream:
        cache = CacheConfig(events_endpoint=stream.endpoint, replay_endpoint=stream.replay_endpoint)
        async with reading(Config(cache=cache)) as it:
            assert it.blocks.live


async def test_every_engine_is_heard_and_equal_hashes_do_not_meet() -> None:
    async with EventStream() as one, EventStream() as other:
        one.take(1, [stored([1, 2, 3, 4], "s1")])
        other.take(1, [stored([5, 6, 7, 8], "s2")])
        upstreams = tuple(
            BackendConfig(
                name=name, url="http://h", events_endpoint=s.endpoint, replay_endpoint=s.replay_endpoint
            )
            for name, s in (("a", one), ("b", other))
        )
        async with reading(Config(upstreams=upstreams)) as it:
            async with asyncio.timeout(20):
                assert {await it.batches.get() for _ in range(2)} == {"a", "b"}
            assert it.blocks.live
            assert it.blocks.disagreement("s1", [1, 2, 3, 4]) is None
            assert it.blocks.disagreement("s2", [1, 2, 3, 4]) == 0


async def test_an_engine_without_events_is_named_and_nothing_counts_as_heard() -> None:
    async with EventStream() as stream:
        upstreams = (
            BackendConfig(name="a", url="http://h", events_endpoint=stream.endpoint),
            BackendConfig(name="b", url="http://h"),
        )
        async with reading(Config(upstreams=upstreams)) as it:
            assert not it.blocks.live
            said = no_events([b.name for b in it.reading.silent])
            assert "of b " in said
            assert "upstreams[].events_endpoint" in said
