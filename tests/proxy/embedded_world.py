"""The proxy before the embedded engine, for the scenarios that were written for the real stack."""

import asyncio
from array import array
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec

from engine_bridge.chunk_keys import chunk_keys
from engine_bridge.sim.embedded import EmbeddedEngine, EmbeddedOptions
from engine_bridge.sim.hardware import INSTANT, EngineConfig
from lifecycle.core.ids import split_keys
from lifecycle.vocabulary import Mode, Tier
from proxy.app import Serving
from proxy.config import CacheConfig, Config, Listener
from proxy.embedded import serving_before
from tests.e2e.agent import World
from tests.e2e.engine_cache import Cache
from tests.e2e.polling import SECONDS

# A token takes long enough for something to happen while a call generates.
CONFIG = EngineConfig(
    hardware=msgspec.structs.replace(INSTANT, step_ns=2_000_000),
    block_tokens=32,
    chunk_tokens=64,
    max_model_len=65_536,
    l2_bytes=64_000_000_000,
    write_back_delay_ns=10_000_000,
)


class EmbeddedCache(Cache):
    """Engine and cache, asked past the proxy: tokens over HTTP, chunks in this process."""

    def __init__(self, engine: EmbeddedEngine) -> None:
        options = SimpleNamespace(model_name=engine.options.model_name, chunk_size=CONFIG.chunk_tokens)
        stack: Any = SimpleNamespace(
            options=options, upstream_url=engine.url, model_path=engine.options.model_path
        )
        super().__init__(stack)
        self.engine = engine

    async def keys_of(self, token_ids: Sequence[int]) -> list[bytes]:
        return split_keys(chunk_keys(array("I", token_ids), self.chunk))

    async def where(self, keys: Sequence[bytes], salt: str = "") -> list[frozenset[Tier]]:
        return self.engine.runner.locate(salt, keys)

    async def pin_counts(self) -> dict[bytes, int]:
        return self.engine.runner.pins("")

    def control_writes(self) -> dict[str, int]:
        tiers = self.engine.runner.stats().tiers
        return {tier.value: tiers[tier].num_deleted for tier in (Tier.L1, Tier.L2)}


def embedded_engine(**changes: Any) -> EmbeddedEngine:
    """An engine as the real stack of the end to end tests is set up."""
    return EmbeddedEngine(EmbeddedOptions(engine=msgspec.structs.replace(CONFIG, **changes)))


def config_in(folder: Path, mode: Mode = Mode.ENFORCE, *, l2_pins: bool = False, **changes: Any) -> Config:
    """A proxy on free ports with a log of its own, and with time enough for its plans."""
    fields: dict[str, Any] = {
        "data": Listener(port=0),
        "admin": Listener(port=0),
        "cache": CacheConfig(l2_pins=l2_pins),
        "mode": mode,
        "log_url": f"sqlite:///{folder / 'kvtether.db'}",
        "plan_wait_seconds": 1.0,
        "keep_recurring_seconds": 0.0,
        **changes,
    }
    return Config(**fields)


class Shared:
    """A proxy that is up before an embedded engine, for one world after the other."""

    def __init__(self, up: Serving, engine: EmbeddedEngine) -> None:
        self.up = up
        self.engine = engine

    @asynccontextmanager
    async def world(self) -> AsyncIterator[World]:
        cache = EmbeddedCache(self.engine)
        world = World(self.up, cache)
        try:
            yield world
        finally:
            self.up.runtime.tracker.listeners.remove(world._hear)
            await world.close()
            await cache.close()


@asynccontextmanager
async def shared_proxy(engine: EmbeddedEngine, config: Config) -> AsyncIterator[Shared]:
    """Engine and proxy, ready to control."""
    async with engine, serving_before(config, engine) as up:
        async with asyncio.timeout(SECONDS):
            await up.runtime.prepared.wait()
        assert up.runtime.self_test.ok, up.runtime.problems
        yield Shared(up, engine)


@asynccontextmanager
async def embedded_world(engine: EmbeddedEngine, config: Config) -> AsyncIterator[World]:
    """A proxy with one world."""
    async with shared_proxy(engine, config) as shared, shared.world() as world:
        yield world
