"""Level 0 claims no directive; the rest of its behaviour is in the conformance tests."""

from engine_bridge.drivers.noop import NoCacheControl


async def test_every_directive_has_the_reason_given() -> None:
    control = NoCacheControl("no coordinator")
    assert control.capabilities.supported == frozenset()
    assert set(control.capabilities.unsupported.values()) == {"no coordinator"}
    assert control.capabilities.level == 0
