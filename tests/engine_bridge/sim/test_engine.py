"""What an engine refuses, reports and adds up, and what its memory is worth."""

import random
from array import array

import pytest
from msgspec.structs import replace

from engine_bridge.sim.block_events import AllBlocksCleared, BlockStored, EngineRestarted
from engine_bridge.sim.costs import prefill_ns
from engine_bridge.sim.engine import SimEngine
from engine_bridge.sim.hardware import H100_8B, EngineConfig
from engine_bridge.sim.requests import SimRequest
from lifecycle.vocabulary import Tier
from tests.engine_bridge.sim.toy_engine import config, drain, ended, keys_of, request, run


@pytest.mark.parametrize(
    ("prompt", "output", "why"),
    [(0, 1, "prompt"), (4, 0, "at least one"), (100, 40, "this model"), (60, 1, "HBM")],
)
def test_what_can_never_run_is_refused(prompt, output, why):
    engine = SimEngine(config(hardware_hbm_bytes=4 * 15))
    with pytest.raises(ValueError, match=why):
        engine.submit(request("r", range(prompt), output), 0)


def test_an_id_in_use_is_refused():
    engine = SimEngine(config())
    engine.submit(request("r", range(8)), 0)
    with pytest.raises(ValueError, match="running"):
        engine.submit(request("r", range(8)), 0)
    drain(engine)
    run(engine, request("r", range(8)))


def test_a_chunk_must_be_whole_blocks():
    with pytest.raises(ValueError, match="whole number of blocks"):
        SimEngine(config(chunk_tokens=6))


def test_an_idle_engine_has_nothing_to_do():
    engine = SimEngine(config())
    assert engine.next_ns() is None
    run(engine, request("r", range(8)))
    assert engine.next_ns() is None


def test_events_carry_what_a_call_computed():
    told = []
    engine = SimEngine(config(), [lambda _, events: told.extend(events)])
    run(engine, request("a", range(10), 3, session_id="call-1", salt="s"))
    blocks = [each for each in told if isinstance(each, BlockStored) and each.medium == "GPU"]
    chunks = [each for each in told if isinstance(each, BlockStored) and each.medium == "CPU"]
    # The prompt's step fills two blocks; the second generated token fills the third.
    assert [each.token_ids for each in blocks] == [tuple(range(8)), (8, 9, 900, 901)]
    assert {(each.session_id, each.salt) for each in blocks} == {("call-1", "s")}
    assert blocks[1].parent_block_hash == blocks[0].block_hashes[-1]
    assert [each.block_hashes for each in chunks] == [tuple(keys_of(range(8)))]
    assert (chunks[0].token_ids, chunks[0].block_size, chunks[0].session_id) == (tuple(range(8)), 8, None)


def test_a_restart_is_told_and_its_requests_end():
    told = []
    engine = SimEngine(config(), [lambda _, events: told.extend(events)])
    engine.submit(request("a", range(8), 5), 0)
    engine.step(1_100)
    engine.restart_engine(1_200)
    (end,) = ended(engine.step(1_200))
    assert (end.reason, end.usage.completion_tokens) == ("the engine restarted", 1)
    assert told[-1] == EngineRestarted(incarnation=2)
    assert engine.engine_incarnation == 2
    count = len(told)
    drain(engine)
    assert len(told) == count


def test_a_reset_prefix_cache_is_told_unless_it_is_in_use():
    told = []
    engine = SimEngine(config(), [lambda _, events: told.extend(events)])
    engine.submit(request("a", range(8), 5), 0)
    engine.step(1_100)
    assert not engine.reset_prefix_cache(1_100)
    drain(engine)
    assert engine.reset_prefix_cache(engine.now_ns)
    assert told[-1] == AllBlocksCleared()
    assert engine.stats(engine.now_ns).tiers[Tier.GPU].num_chunks == 0


def test_totals_are_the_sum_of_all_requests():
    engine = SimEngine(config())
    ends = run(engine, request("a", range(17), 2)) + run(engine, request("b", range(25), 3))
    tokens = engine.stats(engine.now_ns).tokens
    assert tokens.prompt_tokens == sum(each.usage.prompt_tokens for each in ends) == 42
    assert tokens.completion_tokens == 5
    assert tokens.cached_tokens == sum(each.usage.cached_tokens for each in ends) == 16


def agents(num_agents, num_turns, seed):
    """Agents that share a system prompt and take turns; each turn's prompt extends the last one's."""
    chance = random.Random(seed)
    system = [chance.randrange(50_000) for _ in range(2_000)]
    prompts = {agent: system + [chance.randrange(50_000) for _ in range(500)] for agent in range(num_agents)}
    for turn in range(num_turns):
        for agent, tokens in prompts.items():
            yield SimRequest(
                request_id=f"{agent}-{turn}",
                token_ids=array("I", tokens),
                output_ids=array("I", (chance.randrange(50_000) for _ in range(20))),
            )
            prompts[agent] = tokens + [chance.randrange(50_000) for _ in range(800)]


def total_ns(engine_config):
    engine = SimEngine(engine_config)
    for number, each in enumerate(agents(6, 6, seed=7)):
        engine.submit(each, number * 50_000_000)
    ends = ended(drain(engine))
    assert len(ends) == 36
    return sum(each.at_ns for each in ends)


def test_more_memory_below_never_makes_a_workload_of_agents_slower():
    """HBM holds a third of what is alive, so the tiers below decide what is computed again."""
    hardware = replace(H100_8B, hbm_bytes=1 << 31)
    sizes = (0, 1 << 30, 1 << 34)
    times = [total_ns(EngineConfig(hardware=hardware, l1_bytes=size)) for size in sizes]
    assert times[2] < times[1] <= times[0]


def test_a_hit_saves_what_its_prefill_costs():
    engine = SimEngine(EngineConfig())
    prompt = array("I", range(20_000))
    cold, warm = (
        run(engine, SimRequest(request_id=name, token_ids=prompt, output_ids=array("I", [1])))[0]
        for name in "ab"
    )
    saved = cold.timings.prefill_ns - warm.timings.prefill_ns
    assert saved > prefill_ns(H100_8B, 0, warm.usage.cached_tokens) - H100_8B.step_ns


def test_calls_that_compute_the_same_at_once_each_report_it():
    told = []
    engine = SimEngine(config(), [lambda _, events: told.extend(events)])
    run(engine, request("a", range(8), session_id="one"), request("b", range(8), session_id="two"))
    blocks = [each for each in told if isinstance(each, BlockStored) and each.medium == "GPU"]
    assert [(each.session_id, each.token_ids) for each in blocks] == [
        ("one", tuple(range(8))),
        ("two", tuple(range(8))),
    ]
    assert blocks[0].block_hashes == blocks[1].block_hashes
