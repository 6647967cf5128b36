"""An engine with round numbers, as a test tool: every time in a test can be worked out by hand.

One byte a token; a step takes 1000 ns or 100 ns a token, 1 ns a pair in prefill, 2 ns a token of context in
decode; links move a byte a nanosecond, 10 ns after they were asked.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence

import msgspec

from engine_bridge.chunk_keys import chunk_keys
from engine_bridge.sim.engine import SimEngine
from engine_bridge.sim.hardware import EngineConfig, Hardware
from engine_bridge.sim.requests import AbortedOutput, FinishedOutput, Output, SimRequest
from lifecycle.core.ids import split_keys

TOY = Hardware(
    name="toy",
    bytes_per_token=1,
    hbm_bytes=4 * 64,
    step_ns=1_000,
    token_ps=100_000,
    pair_ps=1_000,
    context_ps=2_000,
    load_bandwidth=1_000_000_000,
    store_bandwidth=1_000_000_000,
    l2_read_bandwidth=1_000_000_000,
    l2_write_bandwidth=1_000_000_000,
    load_latency_ns=10,
    l2_latency_ns=10,
)

CONFIG = EngineConfig(
    hardware=TOY,
    block_tokens=4,
    chunk_tokens=8,
    max_num_seqs=4,
    max_batched_tokens=32,
    max_model_len=128,
    l1_bytes=8 * 40,
    l2_bytes=8 * 60,
    evict_interval_ns=10_000,
    write_back_delay_ns=500,
)


def config(**changes: object) -> EngineConfig:
    """The toy set-up with some settings changed; those of `Hardware` are given as `hardware_<name>`."""
    prefix = "hardware_"
    hardware = {
        name.removeprefix(prefix): changes.pop(name) for name in list(changes) if name.startswith(prefix)
    }
    return msgspec.structs.replace(CONFIG, hardware=msgspec.structs.replace(TOY, **hardware), **changes)


def request(name: str, tokens: Iterable[int], num_output: int = 1, **fields: object) -> SimRequest:
    """A request that generates the tokens 900, 901, ..."""
    return SimRequest(
        request_id=name,
        token_ids=array("I", tokens),
        output_ids=array("I", range(900, 900 + num_output)),
        **fields,
    )


def keys_of(tokens: Iterable[int], chunk_tokens: int = 8) -> list[bytes]:
    return split_keys(chunk_keys(array("I", tokens), chunk_tokens))


def drain(engine: SimEngine, most: int = 100_000) -> list[Output]:
    """Let the engine run until nothing is left to do."""
    outputs: list[Output] = []
    for _ in range(most):
        next_ns = engine.next_ns()
        if next_ns is None:
            return outputs
        outputs += engine.step(next_ns)
    raise AssertionError("the engine never comes to rest")


def run(engine: SimEngine, *requests: SimRequest) -> list[FinishedOutput | AbortedOutput]:
    """Submit at once, run until all is quiet, and answer how each ended, in the order given."""
    for each in requests:
        engine.submit(each, engine.now_ns)
    ends = {each.request_id: each for each in ended(drain(engine))}
    return [ends[each.request_id] for each in requests]


def ended(outputs: Sequence[Output]) -> list[FinishedOutput | AbortedOutput]:
    return [each for each in outputs if isinstance(each, FinishedOutput | AbortedOutput)]
