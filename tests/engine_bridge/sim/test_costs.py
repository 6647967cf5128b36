"""What a step costs: worked out by hand once, then only that more work never takes less time."""

from hypothesis import given
from hypothesis import strategies as st

from engine_bridge.sim.costs import num_pairs, prefill_ns, step_ns
from engine_bridge.sim.hardware import PRESETS
from tests.engine_bridge.sim.toy_engine import TOY

hardware = st.sampled_from([TOY, *PRESETS.values()])
part = st.tuples(st.integers(0, 100_000), st.integers(1, 9_000))
parts = st.lists(part, max_size=4)
contexts = st.lists(st.integers(1, 200_000), max_size=8)


def test_a_small_step_takes_as_long_as_reading_the_weights():
    assert step_ns(TOY, [(0, 4)], []) == 1_000 + (1 + 2 + 3 + 4)


def test_a_large_step_takes_as_long_as_its_tokens():
    assert step_ns(TOY, [(0, 20)], [50]) == 21 * 100 + 20 * 21 // 2 + 2 * 50


@given(st.integers(0, 50), st.integers(0, 50))
def test_pairs_are_counted_one_by_one(first, count):
    assert num_pairs(first, count) == sum(position + 1 for position in range(first, first + count))


@given(hardware, parts, contexts, part, st.integers(1, 200_000))
def test_more_work_never_takes_less_time(hardware, parts, contexts, more, context):
    least = step_ns(hardware, parts, contexts)
    assert step_ns(hardware, [*parts, more], contexts) >= least
    assert step_ns(hardware, parts, [*contexts, context]) >= least


@given(hardware, st.integers(0, 100_000), st.integers(1, 5_000), st.integers(1, 5_000))
def test_deeper_never_costs_less(hardware, first, count, deeper):
    assert step_ns(hardware, [(first + deeper, count)], []) >= step_ns(hardware, [(first, count)], [])
    assert prefill_ns(hardware, first + deeper, count) >= prefill_ns(hardware, first, count)


@given(hardware, st.integers(0, 1_000), st.integers(1, 5_000), st.integers(1, 5_000))
def test_cutting_a_prompt_into_parts_saves_nothing(hardware, first, count, more):
    whole = step_ns(hardware, [(first, count + more)], [])
    assert (
        step_ns(hardware, [(first, count)], []) + step_ns(hardware, [(first + count, more)], []) >= whole - 1
    )


@given(hardware, parts, contexts)
def test_the_order_in_a_batch_does_not_matter(hardware, parts, contexts):
    assert step_ns(hardware, parts, contexts) == step_ns(hardware, parts[::-1], contexts[::-1])
