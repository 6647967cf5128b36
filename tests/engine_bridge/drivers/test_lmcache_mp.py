"""What the driver says before it has met a deployment."""

from engine_bridge.drivers.lmcache_mp import LmcacheMp
from engine_bridge.engine_address import EngineAddress


async def test_nothing_is_claimed_that_was_not_tested() -> None:
    driver = LmcacheMp("http://127.0.0.1:1", [EngineAddress("http://127.0.0.1:1")])
    capabilities = driver.capabilities
    assert "admit" in capabilities.unsupported
    assert "l2_pins" in capabilities.unsupported["pin"]
    assert capabilities.level == 1
    test = await driver.self_test()
    assert not test.ok
    assert "127.0.0.1:1" in test.problems[0]
    await driver.close()


async def test_pins_are_offered_only_when_switched_on() -> None:
    driver = LmcacheMp("http://127.0.0.1:1", [EngineAddress("http://127.0.0.1:1")], l2_pins=True)
    assert {"pin", "unpin"} <= driver.capabilities.supported
    assert await driver.release_all() == 0
    await driver.close()
