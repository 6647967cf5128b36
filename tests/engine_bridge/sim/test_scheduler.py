"""Who is computed when: slots, budgets, queues, loads. Times are worked out by hand from round numbers."""

from engine_bridge.sim.engine import SimEngine
from engine_bridge.sim.requests import FinishedOutput, Timings, TokenOutput
from lifecycle.vocabulary import Tier
from tests.engine_bridge.sim.toy_engine import config, drain, keys_of, request, run


def tokens_of(outputs):
    return [(each.request_id, each.index, each.at_ns) for each in outputs if isinstance(each, TokenOutput)]


def test_one_request_from_prompt_to_end():
    engine = SimEngine(config())
    engine.submit(request("r", range(8), 3), 0)
    outputs = drain(engine)
    # Weights 1000, pairs 36; then a context of 9 and of 10, 2 ns each.
    assert tokens_of(outputs) == [("r", 0, 1_036), ("r", 1, 2_054), ("r", 2, 3_074)]
    assert [each.token_id for each in outputs[:3]] == [900, 901, 902]
    (end,) = [each for each in outputs if isinstance(each, FinishedOutput)]
    assert end.timings == Timings(prefill_ns=1_036, decode_ns=2_038)
    assert (end.usage.prompt_tokens, end.usage.completion_tokens, end.usage.cached_tokens) == (8, 3, 0)


def test_a_long_prompt_is_computed_in_parts():
    engine = SimEngine(config())
    engine.submit(request("r", range(40)), 0)
    # 32 tokens: 3200 and 528 pairs; 8 tokens behind 32: 1000 and 292 pairs.
    assert tokens_of(drain(engine)) == [("r", 0, 3_728 + 1_292)]


def test_decode_and_prefill_share_a_step():
    engine = SimEngine(config())
    engine.submit(request("a", range(8), 2), 0)
    engine.step(0)
    engine.submit(request("b", range(100, 140)), 500)
    # a's second token (context 9) rides with 31 tokens of b: 32 * 100, 496 pairs, 18.
    # Then b's last 9 tokens behind 31: 1000 and 9 * 31 + 45.
    mixed = 1_036 + 3_200 + 496 + 18
    assert tokens_of(drain(engine)) == [("a", 0, 1_036), ("a", 1, mixed), ("b", 0, mixed + 1_000 + 324)]


def test_more_requests_than_slots_wait_in_order():
    engine = SimEngine(config(max_num_seqs=1))
    first, second, third = run(
        engine, request("a", range(8)), request("b", range(20, 28)), request("c", range(40, 48))
    )
    assert [each.timings.queue_ns for each in (first, second, third)] == [0, 1_036, 2_072]
    assert [each.timings.prefill_ns for each in (first, second, third)] == [1_036] * 3


def test_a_prompt_in_hbm_is_not_computed_again_except_for_one_token():
    engine = SimEngine(config(l1_bytes=0))
    run(engine, request("a", range(17)))
    longer, equal = run(engine, request("b", range(17))), run(engine, request("c", range(16)))
    assert longer[0].usage.hbm_tokens == 16
    assert longer[0].timings == Timings(prefill_ns=1_000 + 17)
    # A hit never covers the last token, and a block is found whole or not at all.
    assert equal[0].usage.hbm_tokens == 12
    assert equal[0].timings.prefill_ns == 1_000 + 4 * 12 + 10


def test_the_end_of_a_prompt_that_hbm_cannot_give_is_loaded():
    engine = SimEngine(config())
    run(engine, request("a", range(16)))
    (again,) = run(engine, request("b", range(16)))
    assert (again.usage.hbm_tokens, again.usage.l1_tokens) == (12, 3)
    assert again.timings == Timings(load_ns=10 + 3, prefill_ns=1_016)


def test_a_prompt_below_is_loaded_and_its_last_token_computed():
    engine = SimEngine(config())
    run(engine, request("a", range(16)))
    engine.restart_engine(engine.now_ns)
    (again,) = run(engine, request("b", range(16)))
    assert (again.usage.hbm_tokens, again.usage.l1_tokens, again.usage.l2_tokens) == (0, 15, 0)
    # 10 ns of latency, 15 bytes; then one token that looks back on 15 and itself.
    assert again.timings == Timings(load_ns=25, prefill_ns=1_016)


def test_l2_is_read_through_l1_and_leaves_nothing_there():
    engine = SimEngine(config())
    run(engine, request("a", range(17)))
    engine.restart_engine(engine.now_ns)
    engine.restart_cache(engine.now_ns)
    (again,) = run(engine, request("b", range(17)))
    assert (again.usage.l1_tokens, again.usage.l2_tokens) == (0, 16)
    assert again.timings.load_ns == (10 + 16) + (10 + 16)
    assert engine.locate("", keys_of(range(16)), engine.now_ns) == [frozenset({Tier.L2})] * 2


def test_tiers_join_in_one_prefix():
    engine = SimEngine(config(hardware_hbm_bytes=4 * 12))
    run(engine, request("a", range(33)))
    run(engine, request("b", range(100, 133)))
    keys = keys_of(range(32))
    engine.delete("", keys[3:], frozenset({Tier.L1}), engine.now_ns)
    (again,) = run(engine, request("c", range(33)))
    # Of twelve blocks nine went for b, the end of a first: three were free, one was never full.
    usage = again.usage
    assert (usage.hbm_tokens, usage.l1_tokens, usage.l2_tokens) == (12, 12, 8)


def test_what_loads_takes_no_slot():
    engine = SimEngine(config(max_num_seqs=1, hardware_load_latency_ns=5_000))
    run(engine, request("a", range(16)))
    engine.restart_engine(engine.now_ns)
    loading, computing = run(engine, request("b", range(16)), request("c", range(50, 58)))
    assert computing.timings.queue_ns == 0
    assert computing.at_ns < loading.at_ns


def test_a_request_waits_until_hbm_has_room_for_all_of_it():
    engine = SimEngine(config(hardware_hbm_bytes=4 * 4))
    first, second = run(engine, request("a", range(8), 8), request("b", range(20, 28), 8))
    assert second.timings.queue_ns == first.at_ns
    assert engine.stats(engine.now_ns).tiers[Tier.GPU].num_evicted > 0


def test_a_bypassed_prompt_never_enters_the_store():
    engine = SimEngine(config())
    run(engine, request("a", range(24), store_until=8))
    assert [bool(each) for each in engine.locate("", keys_of(range(24)), engine.now_ns)] == [
        True,
        False,
        False,
    ]


def test_generated_chunks_are_stored_only_on_request():
    whole = [*range(6), *range(900, 918)]
    for saves, found in ((False, [False, False]), (True, [True, True])):
        engine = SimEngine(config())
        run(engine, request("a", range(6), 18, save_generated=saves))
        # The last of 24 tokens has no KV, so there are two chunks and not three.
        assert [bool(each) for each in engine.locate("", keys_of(whole)[:2], engine.now_ns)] == found
        assert not engine.locate("", keys_of(whole)[2:], engine.now_ns)[0]


def test_a_load_from_a_dead_server_is_computed_instead():
    engine = SimEngine(config(hardware_load_latency_ns=5_000))
    run(engine, request("a", range(16)))
    engine.restart_engine(engine.now_ns)
    engine.submit(request("b", range(16)), engine.now_ns)
    engine.step(engine.now_ns)
    engine.restart_cache(engine.now_ns + 100)
    (end,) = [each for each in drain(engine) if isinstance(each, FinishedOutput)]
    assert end.usage.cached_tokens == 0
    assert end.timings.prefill_ns == 16 * 100 + 136
    # And it is stored anew.
    assert all(engine.locate("", keys_of(range(16)), engine.now_ns))


def test_an_aborted_request_gives_its_room_back():
    engine = SimEngine(config(hardware_hbm_bytes=4 * 16, max_num_seqs=2, hardware_load_latency_ns=900))
    run(engine, request("old", range(16)))
    engine.restart_engine(engine.now_ns)
    started = engine.now_ns
    for name, tokens in (("loads", range(16)), ("runs", range(30, 38)), ("waits", range(60, 92))):
        engine.submit(request(name, tokens, 8), started)
    engine.step(started)
    assert (engine.stats(started).num_running, engine.stats(started).num_waiting) == (1, 2)
    for name in ("waits", "loads", "runs"):
        assert engine.abort(name, started + 10)
        assert not engine.abort(name, started + 10)
    drain(engine)
    stats = engine.stats(engine.now_ns)
    assert (stats.num_running, stats.num_waiting) == (0, 0)
    assert stats.tiers[Tier.GPU].reserved_bytes == 0
    keys = keys_of(range(16))
    assert engine.delete("", keys, frozenset({Tier.L1}), engine.now_ns).deleted == tuple(keys)


def test_blocks_stay_until_their_store_has_read_them():
    engine = SimEngine(config(hardware_load_latency_ns=5_000))
    engine.submit(request("a", range(8)), 0)
    engine.step(1_036)
    assert engine.stats(1_036).num_running == 0
    assert engine.stats(1_036 + 5_007).tiers[Tier.GPU].reserved_bytes == 8
    assert engine.stats(1_036 + 5_008).tiers[Tier.GPU].reserved_bytes == 0
