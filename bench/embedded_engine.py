"""How fast the embedded engine is on this machine: chunk events of a tier, and hours of agents in seconds.

`python -m bench.embedded_engine [--chunks 200000] [--agents 64] [--turns 12] [--repeats 5]`. One core, no
sockets, virtual time. What it prints of the engine's own times is SIMULATED; its rates are measured.
"""

import argparse
import random
import statistics
import time
from array import array
from collections.abc import Callable, Iterable, Sequence

from engine_bridge.sim.block_events import KvEvent
from engine_bridge.sim.engine import SimEngine
from engine_bridge.sim.hardware import EngineConfig
from engine_bridge.sim.requests import FinishedOutput, SimRequest
from engine_bridge.sim.tiers import ChunkId, LruOrder, Tier

CHAIN = 128
"""Chunks a request touches or stores: 32K tokens."""

SECOND = 1_000_000_000


def churn(num_chunks: int) -> int:
    """Store, touch and evict chunks in a tier that holds a tenth of them; answers events."""
    tier = Tier(num_chunks // 10, 1, LruOrder())
    events = 0
    for start in range(0, num_chunks, CHAIN):
        chain: list[ChunkId] = [("", n.to_bytes(32, "big")) for n in range(start, start + CHAIN)]
        if not tier.reserve(chain):
            events += len(tier.evict(20, lambda _: True))
            tier.reserve(chain)
        tier.commit(chain)
        tier.lock(chain)
        tier.touch(chain)
        tier.unlock(chain)
        events += 2 * CHAIN
    return events


def agents(num_agents: int, num_turns: int) -> list[tuple[int, SimRequest]]:
    """Calls by time: each agent's context grows by some 1,500 tokens a turn, a turn every 20 s or so."""
    chance = random.Random(1)
    system = array("I", (chance.randrange(150_000) for _ in range(6_000)))
    calls: list[tuple[int, SimRequest]] = []
    for agent in range(num_agents):
        at_ns, tokens = chance.randrange(20 * SECOND), array("I", system)
        for turn in range(num_turns):
            tokens = tokens + array("I", (chance.randrange(150_000) for _ in range(1_500)))
            output = array("I", (chance.randrange(150_000) for _ in range(100)))
            calls.append(
                (at_ns, SimRequest(request_id=f"{agent}-{turn}", token_ids=tokens, output_ids=output))
            )
            tokens = tokens + output
            at_ns += 10 * SECOND + chance.randrange(20 * SECOND)
    return sorted(calls, key=lambda call: call[0])


def replay(calls: Iterable[tuple[int, SimRequest]]) -> tuple[int, int, int, int]:
    """Play calls; answers simulated nanoseconds, prompt tokens, cached tokens, KV events."""
    num_events = 0

    def count(_: int, events: Sequence[KvEvent]) -> None:
        nonlocal num_events
        num_events += len(events)

    engine = SimEngine(EngineConfig(l1_bytes=40_000_000_000, l2_bytes=200_000_000_000), [count])
    ends = [out for at_ns, call in calls for out in _submitted(engine, call, at_ns)]
    while (next_ns := engine.next_ns()) is not None:
        ends += _ends(engine, next_ns)
    prompt = sum(each.usage.prompt_tokens for each in ends)
    return engine.now_ns, prompt, sum(each.usage.cached_tokens for each in ends), num_events


def _submitted(engine: SimEngine, call: SimRequest, at_ns: int) -> list[FinishedOutput]:
    ended = _ends(engine, at_ns)
    engine.submit(call, at_ns)
    return ended


def _ends(engine: SimEngine, at_ns: int) -> list[FinishedOutput]:
    return [output for output in engine.step(at_ns) if isinstance(output, FinishedOutput)]


def _rates(repeats: int, work: Callable[[], int]) -> tuple[float, float, float]:
    """Median, least and most of `work`'s answer per second."""
    rates = []
    for _ in range(repeats):
        started = time.perf_counter()
        done = work()
        rates.append(done / (time.perf_counter() - started))
    return statistics.median(rates), min(rates), max(rates)


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--chunks", type=int, default=200_000)
    arguments.add_argument("--agents", type=int, default=64)
    arguments.add_argument("--turns", type=int, default=12)
    arguments.add_argument("--repeats", type=int, default=5)
    given = arguments.parse_args()
    print("| what | measured |\n|---|---|")
    median, least, most = _rates(given.repeats, lambda: churn(given.chunks))
    print(f"| chunk events of one tier (store, touch, evict) | {median:,.0f}/s ({least:,.0f}-{most:,.0f}) |")
    calls = agents(given.agents, given.turns)
    median, least, most = _rates(given.repeats, lambda: replay(calls)[1])
    simulated_ns, prompt, cached, events = replay(calls)
    print(f"| prompt tokens of {len(calls):,} calls | {median:,.0f}/s ({least:,.0f}-{most:,.0f}) |")
    print(f"| calls | {median * len(calls) / prompt:,.0f}/s |")
    print(
        f"\nSIMULATED: {simulated_ns / SECOND:,.0f} s, {prompt:,} prompt tokens, "
        f"{cached / prompt:.1%} cached, {events:,} KV events."
    )


if __name__ == "__main__":
    main()
