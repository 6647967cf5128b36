"""How long one step of the engine takes, in integers: equal work takes equal time on every machine.

A roofline: a step takes at least the reading of the weights, and at least the computing of its tokens;
attention comes on top of both. Prefill attention grows with the square of the depth, decode reads the
sequence's whole context for each token.
"""

from collections.abc import Iterable

from engine_bridge.sim.hardware import Hardware

PICOSECONDS = 1_000


def step_ns(hardware: Hardware, prefills: Iterable[tuple[int, int]], contexts: Iterable[int]) -> int:
    """Nanoseconds of a step that computes `(first token, number of tokens)` of some prompts and one token for
    each sequence whose context is as long as `contexts` says."""
    tokens = pairs = read = 0
    for first, count in prefills:
        tokens += count
        pairs += num_pairs(first, count)
    for context in contexts:
        tokens += 1
        read += context
    compute = tokens * hardware.token_ps
    attention = pairs * hardware.pair_ps + read * hardware.context_ps
    return (max(hardware.step_ns * PICOSECONDS, compute) + attention) // PICOSECONDS


def num_pairs(first: int, count: int) -> int:
    """Pairs of a token in `[first, first + count)` and one at or before it."""
    return count * first + count * (count + 1) // 2


def prefill_ns(hardware: Hardware, first: int, count: int) -> int:
    """Computing time of a part of a prompt, without the floor of a step: the price of a miss."""
    return (count * hardware.token_ps + num_pairs(first, count) * hardware.pair_ps) // PICOSECONDS
