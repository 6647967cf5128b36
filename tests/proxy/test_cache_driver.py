"""The configuration's word becomes a driver."""

from engine_bridge.drivers.lmcache_mp import LmcacheMp
from engine_bridge.drivers.noop import NoCacheControl
from proxy.cache_driver import cache_driver
from proxy.config import CacheConfig, Config


async def test_each_name_has_its_driver() -> None:
    for name, kind in (("none", NoCacheControl), ("lmcache_mp", LmcacheMp)):
        driver = cache_driver(Config(cache=CacheConfig(driver=name)), None)  # type: ignore[arg-type]
        assert isinstance(driver, kind)
        await driver.close()
