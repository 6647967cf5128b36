"""Which driver stands before the cache."""

import os

from engine_bridge.drivers.lmcache_client import HeardCall, tell_nobody
from engine_bridge.drivers.lmcache_mp import LmcacheMp
from engine_bridge.drivers.lmcache_selftest import Tokenize
from engine_bridge.drivers.noop import NoCacheControl
from lifecycle.ports import CacheControl
from proxy.config import Config


def cache_driver(config: Config, tokenize: Tokenize | None, heard: HeardCall = tell_nobody) -> CacheControl:
    """The driver that the configuration names. `tokenize` is our side of the tokenizer's parity check,
    `heard` is told of each control call."""
    cache = config.cache
    if cache.driver == "none":
        return NoCacheControl("cache.driver is none: level 0 observes only")
    key = os.environ.get(config.upstream.api_key_env, "")
    return LmcacheMp(
        cache.coordinator_url,
        config.upstream.url.rstrip("/").removesuffix("/v1"),
        chunk_size=cache.chunk_size,
        l2_pins=cache.l2_pins,
        tokenize=tokenize,
        upstream_headers={"authorization": f"Bearer {key}"} if key else None,
        heard=heard,
    )
