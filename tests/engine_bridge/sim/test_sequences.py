"""One request's own books."""

from array import array

from hypothesis import given
from hypothesis import strategies as st

from engine_bridge.chunk_keys import chunk_keys
from engine_bridge.sim.prefix_cache import block_hashes
from engine_bridge.sim.sequences import SimSequence
from lifecycle.core.ids import split_keys
from tests.engine_bridge.sim.toy_engine import CONFIG, request


def sequence(num_prompt, num_output=1, **fields):
    return SimSequence(request("r", range(num_prompt), num_output, **fields), CONFIG, 100)


@given(st.lists(st.integers(0, 9), min_size=1, max_size=20), st.lists(st.integers(0, 9), max_size=20))
def test_names_are_those_of_all_tokens_so_far_however_they_came(prompt, generated):
    grown = SimSequence(request("r", prompt, salt="s"), CONFIG, 0)
    for token in generated:
        grown.token_ids.append(token)
        grown.hashes()
        grown.chunk_keys()
    ids = array("I", prompt + generated)
    assert grown.chunk_keys() == split_keys(chunk_keys(ids, 8))
    assert grown.hashes() == block_hashes(ids, 4, "s")


def test_the_last_generated_token_needs_no_room():
    assert sequence(8, 1).most_blocks == 2
    assert sequence(8, 2).most_blocks == 3


def test_only_full_chunks_of_what_is_computed_are_stored():
    whole = sequence(20, 20)
    for computed, chunks in ((7, 0), (8, 1), (19, 2), (32, 2)):
        whole.num_computed = computed
        assert whole.num_storable_chunks() == chunks


def test_generated_tokens_are_stored_on_request():
    saving = sequence(20, 20, save_generated=True)
    saving.num_computed = 32
    assert saving.num_storable_chunks() == 4


def test_nothing_behind_the_limit_is_stored():
    for limit, chunks in ((0, 0), (15, 1), (16, 2), (99, 2)):
        bounded = sequence(20, store_until=limit)
        bounded.num_computed = 20
        assert bounded.num_storable_chunks() == chunks


def test_the_parts_of_its_time_add_up_at_every_stage():
    whole = sequence(8)
    stages = (("considered_ns", 110), ("ready_ns", 130), ("started_ns", 170), ("first_token_ns", 250))
    for name, at_ns in (*stages, ("", 400)):
        timings = whole.timings(at_ns)
        parts = (timings.queue_ns, timings.load_ns, timings.prefill_ns, timings.decode_ns)
        assert sum(parts) == at_ns - 100
        assert min(parts) >= 0
        if name:
            setattr(whole, name, at_ns)
    assert parts == (10 + 40, 20, 80, 150)
