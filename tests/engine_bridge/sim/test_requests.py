"""What a request is and what it says of itself in the end."""

from engine_bridge.sim.requests import TokenTotals, Usage
from tests.engine_bridge.sim.toy_engine import request


def test_cached_tokens_are_what_the_tiers_gave():
    usage = Usage(prompt_tokens=20, completion_tokens=1, hbm_tokens=4, l1_tokens=8, l2_tokens=2)
    assert usage.cached_tokens == 14
    totals = TokenTotals(prompt_tokens=20, hbm_tokens=4, l1_tokens=8, l2_tokens=2)
    assert totals.cached_tokens == 14


def test_a_request_is_stored_whole_unless_it_says_otherwise():
    plain = request("r", range(4))
    assert plain.store_until is None
    assert not plain.save_generated
