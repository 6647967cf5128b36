"""The ledger's arithmetic; the requests themselves are tested against a running coordinator."""

from array import array

from hypothesis import given
from hypothesis import strategies as st

from engine_bridge.drivers.lmcache_pins import HeldPin, expected_counts, missing


def pin(name: str, num_chunks: int, world_size: int = 1) -> HeldPin:
    keys = b"".join(bytes([n]) * 32 for n in range(num_chunks))
    return HeldPin(
        pin_id=name,
        model_name="m",
        salt="",
        world_size=world_size,
        keys=keys,
        token_ids=array("I", range(num_chunks)).tobytes(),
        lease_until_ns=1,
    )


@given(st.lists(st.integers(0, 5), max_size=5), st.integers(1, 3))
def test_shared_prefixes_are_counted_once_a_pin_and_rank(lengths: list[int], world_size: int) -> None:
    pins = [pin(str(index), length, world_size) for index, length in enumerate(lengths)]
    counts = expected_counts(pins)
    assert counts.total() == world_size * sum(lengths)
    assert all(missing(each, counts) == "none" for each in pins)


def test_a_pin_is_missing_in_whole_or_in_part() -> None:
    long, short = pin("long", 3), pin("short", 1)
    assert missing(long, {}) == "all"
    assert missing(long, expected_counts([short])) == "some"
    assert missing(short, expected_counts([long])) == "none"


def test_tokens_survive_the_ledger() -> None:
    assert list(pin("p", 3).tokens()) == [0, 1, 2]
