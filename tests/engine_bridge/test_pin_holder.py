"""Which caches hold pins for us, and that what they hold survives as bytes."""

from hypothesis import given
from hypothesis import strategies as st

from engine_bridge.drivers.lmcache_mp import LmcacheMp
from engine_bridge.drivers.lmcache_pins import HeldPin
from engine_bridge.drivers.noop import NoCacheControl
from engine_bridge.engine_address import EngineAddress
from engine_bridge.pin_holder import PinHolder, packed, unpacked

PINS = st.builds(
    HeldPin,
    pin_id=st.text(),
    model_name=st.text(),
    salt=st.text(),
    world_size=st.integers(1, 8),
    keys=st.binary(),
    token_ids=st.binary(),
    lease_until_ns=st.integers(0, 2**63 - 1),
)


async def test_a_cache_of_its_own_holds_pins_and_no_cache_does_not() -> None:
    driver = LmcacheMp("http://127.0.0.1:9", [EngineAddress("http://127.0.0.1:9")])
    assert isinstance(driver, PinHolder)
    assert not isinstance(NoCacheControl(), PinHolder)
    await driver.close()


@given(st.lists(PINS, unique_by=lambda pin: pin.pin_id))
def test_pins_survive_as_bytes(pins: list[HeldPin]) -> None:
    assert unpacked(packed(pins)) == pins


def test_what_cannot_be_read_is_left_out() -> None:
    assert unpacked({"a": b"", "b": b"\x80", "c": b"\xc1rubbish"}) == []
