"""Which driver stands before the cache."""

from engine_bridge.drivers.lmcache_mp import LmcacheMp
from engine_bridge.drivers.lmcache_selftest import Tokenize
from engine_bridge.drivers.noop import NoCacheControl
from lifecycle.ports import CacheControl
from proxy.config import Config


def cache_driver(config: Config, tokenize: Tokenize | None) -> CacheControl:
    """The driver that the configuration names. `tokenize` is our side of the tokenizer's parity check."""
    cache = config.cache
    if cache.driver == "none":
        return NoCacheControl("cache.driver is none: level 0 observes only")
    return LmcacheMp(
        cache.coordinator_url,
        config.upstream.url.rstrip("/").removesuffix("/v1"),
        chunk_size=cache.chunk_size,
        l2_pins=cache.l2_pins,
        tokenize=tokenize,
    )
