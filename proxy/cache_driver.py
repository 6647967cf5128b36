"""Which driver stands before the cache."""

import os

from engine_bridge.drivers.lmcache_client import HeardCall, tell_nobody
from engine_bridge.drivers.lmcache_mp import LmcacheMp
from engine_bridge.drivers.lmcache_selftest import Tokenize
from engine_bridge.drivers.noop import NoCacheControl
from engine_bridge.engine_address import EngineAddress
from lifecycle.ports import CacheControl
from proxy.config import Config


def engine_addresses(config: Config) -> list[EngineAddress]:
    """Every engine of the configuration, with its key from the environment."""
    return [EngineAddress(b.url, b.name, os.environ.get(b.api_key_env, "")) for b in config.backends]


def cache_driver(config: Config, tokenize: Tokenize | None, heard: HeardCall = tell_nobody) -> CacheControl:
    """The driver that the configuration names. `tokenize` is our side of the tokenizer's parity check,
    `heard` is told of each control call."""
    cache = config.cache
    if cache.driver == "none":
        return NoCacheControl("cache.driver is none: level 0 observes only")
    return LmcacheMp(
        cache.coordinator_url,
        engine_addresses(config),
        chunk_size=cache.chunk_size,
        l2_pins=cache.l2_pins,
        tokenize=tokenize,
        heard=heard,
    )
