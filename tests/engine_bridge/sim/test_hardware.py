"""Set-ups add up, and the presets are of the size of what they are named after."""

from engine_bridge.sim.costs import prefill_ns, step_ns
from engine_bridge.sim.hardware import H100_8B, H100_32B, PRESETS, EngineConfig
from tests.engine_bridge.sim.toy_engine import CONFIG


def test_sizes_follow_from_tokens():
    assert CONFIG.chunk_bytes == 8
    assert CONFIG.num_blocks == 64
    assert EngineConfig().chunk_bytes == 256 * 131_072


def test_presets_are_found_by_name():
    assert PRESETS["h100-8b"] is H100_8B


def test_an_8b_model_reads_tens_of_thousands_of_tokens_a_second_and_writes_over_a_hundred():
    assert 20_000 < 1e9 / prefill_ns(H100_8B, 0, 1) < 50_000
    assert 100 < 1e9 / step_ns(H100_8B, [], [2_000]) < 250


def test_a_larger_model_is_slower_in_everything():
    assert prefill_ns(H100_32B, 0, 4_096) > prefill_ns(H100_8B, 0, 4_096)
    assert step_ns(H100_32B, [], [1]) > step_ns(H100_8B, [], [1])
    assert H100_32B.bytes_per_token > H100_8B.bytes_per_token


def test_loading_a_long_prompt_is_worth_it():
    """What the cache is for: moving KV takes less time than computing it."""
    tokens = 32_768
    loaded_ns = tokens * H100_8B.bytes_per_token * 1_000_000_000 // H100_8B.load_bandwidth
    assert loaded_ns * 5 < prefill_ns(H100_8B, 0, tokens)
