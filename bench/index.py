"""Memory and speed of the books: contexts' states and the chunk index over them.

    python -m bench.index [--contexts 10000] [--tokens 100000] [--agents 200]

Contexts have about a hundred messages behind one system prompt of 4,096 tokens that all share, in chunks of
256 tokens; every state comes from the core's own events. Memory is the growth of this process's resident
set, first by the states, then by the index (which shares the states' key bytes). Then agents of 12 turns
run on top of these books: their events are recorded first, so that each part is timed alone.
"""

import argparse
import random
import statistics
import time
from collections.abc import Iterator
from pathlib import Path

from lifecycle.core.decide import decide, open_context
from lifecycle.core.directives import DirectiveResult
from lifecycle.core.events import ChunksConfirmed, ContextEvent, DirectiveProposed, DirectiveSettled, Event
from lifecycle.core.evolve import evolve
from lifecycle.core.ids import KEY_BYTES, Namespace
from lifecycle.core.observations import (
    CallArrival,
    CallEnding,
    CallMapping,
    ContextOpened,
    FirstToken,
    GenerationKeys,
    MessageFact,
    Observation,
    OperationReceived,
    PromptMapping,
    ReplaceMessages,
)
from lifecycle.core.plan import MAX_KEYS, plan_reclaim
from lifecycle.core.state import ContextState
from lifecycle.projections.chunk_index import ChunkIndex
from lifecycle.vocabulary import CallEnd, DirectiveOutcome, IdentityRung, MappingKind, Tier

CHUNK = 256
SYSTEM_TOKENS = 4096
TURNS = 12
LONG_CONTEXT_MESSAGES = 1500
PAGE_BYTES = 4096
GIB = 2**30
NAMESPACE = Namespace("bench")

Step = tuple[Event, ContextState | None, ContextState | None]


def resident_bytes() -> int:
    """Resident set of this process."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * PAGE_BYTES


class Agent:
    """One context under observation. It writes down every event with the states around it."""

    def __init__(self, rng: random.Random, uid: str, system: bytes) -> None:
        self.rng = rng
        self.now = 10**18
        self.calls = 0
        self.steps: list[Step] = []
        self.messages: list[MessageFact] = []
        self.ends: list[int] = []
        self.keys = bytes(bytearray(system))
        self.core_seconds = 0.0
        opening = ContextOpened(
            at_ns=self.now,
            uid=uid,
            tenant="t",
            context_id=uid,
            namespace=NAMESPACE,
            rung=IdentityRung.EXPLICIT,
        )
        self.state = self._take(open_context(opening, None), None)

    def _take(self, events: list[ContextEvent], state: ContextState | None) -> ContextState:
        for event in events:
            before, state = state, evolve(state, event)
            self.steps.append((event, before, state))
        assert state is not None
        return state

    def observe(self, observation: Observation) -> None:
        """Let the core decide and evolve."""
        began = time.perf_counter()
        self.state = self._take(decide(self.state, observation), self.state)
        self.core_seconds += time.perf_counter() - began

    def grow(self, sizes: list[int]) -> None:
        """So many messages more, of so many tokens each."""
        end = self.ends[-1] if self.ends else SYSTEM_TOKENS
        for size in sizes:
            end += size
            self.messages.append(MessageFact(self.rng.randbytes(16), "user"))
            self.ends.append(end)
        self.keys += self.rng.randbytes(KEY_BYTES * (end // CHUNK - len(self.keys) // KEY_BYTES))

    def call(self, output_tokens: int) -> None:
        """One call on the list as it is: mapped, streamed, stored; what it generated comes back as a
        message."""
        self.calls += 1
        self.now += 10**10
        name = f"call-{self.calls}"
        num_tokens = self.ends[-1]
        head = CallArrival(at_ns=self.now, call_id=name, head=b"h" * 16, messages=tuple(self.messages))
        mapping = PromptMapping(
            kind=MappingKind.EXACT,
            num_tokens=num_tokens,
            head_end=SYSTEM_TOKENS,
            message_ends=tuple(self.ends),
            chunk_size=CHUNK,
            chunk_keys=self.keys[: num_tokens // CHUNK * KEY_BYTES],
        )
        self.observe(head)
        self.observe(CallMapping(at_ns=self.now, call_id=name, attempt=1, mapping=mapping))
        self.observe(FirstToken(at_ns=self.now, call_id=name, attempt=1))
        self.observe(CallEnding(at_ns=self.now, call_id=name, attempt=1, end=CallEnd.COMPLETED))
        self.grow([output_tokens])
        if self.ends[-1] // CHUNK > num_tokens // CHUNK:
            chain = self.keys[: self.ends[-1] // CHUNK * KEY_BYTES]
            self.observe(
                GenerationKeys(
                    at_ns=self.now,
                    call_id=name,
                    attempt=1,
                    choice=0,
                    num_tokens=self.ends[-1],
                    chain=chain,
                    chunk_size=CHUNK,
                )
            )
        self.confirm()

    def confirm(self) -> None:
        """The cache reports that it stored all of the chain."""
        event = ChunksConfirmed(
            at_ns=self.now, namespace=NAMESPACE, keys=self.keys, tiers=(Tier.L1,), stored=True
        )
        self.steps.append((event, None, None))

    def compact(self) -> None:
        """A declared edit: one summary in the place of everything."""
        operation = ReplaceMessages(seq=1, ctx="c", span=(0, len(self.messages)), n=1)
        self.observe(OperationReceived(at_ns=self.now, source="s", operation=operation))


def message_sizes(rng: random.Random, num_messages: int, num_tokens: int) -> list[int]:
    """Sizes of a long tail (log-normal, sigma 1) with the given sum, each at least one token."""
    weights = [rng.lognormvariate(0, 1) for _ in range(num_messages)]
    return [max(1, int(w / sum(weights) * num_tokens)) for w in weights]


def apply_all(index: ChunkIndex, steps: list[Step]) -> float:
    """Seconds to take in the steps."""
    began = time.perf_counter()
    for step in steps:
        index.apply(*step)
    return time.perf_counter() - began


def books(rng: random.Random, system: bytes, num_contexts: int, num_tokens: int) -> Iterator[ContextState]:
    """States of contexts after one call on their whole list."""
    for number in range(num_contexts):
        agent = Agent(rng, f"context-{number}", system)
        agent.grow(message_sizes(rng, 100, num_tokens - SYSTEM_TOKENS))
        agent.call(1)
        yield agent.state


def shown(state: ContextState) -> ChunksConfirmed:
    """The cache's report that it stored all chunks of the state."""
    keys = b"".join(v.keys for v in state.versions.values())
    return ChunksConfirmed(at_ns=0, namespace=NAMESPACE, keys=keys, tiers=(Tier.L1,), stored=True)


def memory(index: ChunkIndex, states: list[ContextState], empty: int) -> None:
    """Fill the index and print what states and index take; `empty` is the resident set before the states."""
    with_states = resident_bytes()
    took = apply_all(index, [(shown(state), None, state) for state in states])
    with_index = resident_bytes()
    for state in states:
        index.apply(shown(state), None, None)
    confirmed = resident_bytes()
    stats = index.stats(NAMESPACE)
    chunks = stats.live + stats.dead
    print(f"contexts                      {len(states):>12,}")
    print(f"chunks, shared ones once      {chunks:>12,}")
    print(f"runs                          {stats.runs:>12,}")
    print(f"states                        {(with_states - empty) / GIB:>12.2f} GiB")
    print(f"index                         {(with_index - with_states) / GIB:>12.2f} GiB")
    print(f"both, all chunks confirmed    {(confirmed - empty) / GIB:>12.2f} GiB")
    print(f"states, bytes a chunk         {(with_states - empty) / chunks:>12.0f}")
    print(f"index, bytes a chunk          {(confirmed - with_states) / chunks:>12.0f}")
    print(f"whole process                 {confirmed / GIB:>12.2f} GiB")
    print(f"index built from states in    {took:>12.1f} s")


def speed(index: ChunkIndex, rng: random.Random, system: bytes, num_agents: int) -> None:
    """Run agents on top of the books and print events and calls a second."""
    agents = []
    for number in range(num_agents):
        agent = Agent(rng, f"agent-{number}", system)
        for _ in range(TURNS):
            agent.grow(message_sizes(rng, 2, 3000))
            agent.call(rng.randint(50, 600))
        agent.compact()
        agents.append(agent)
    steps = [step for agent in agents for step in agent.steps]
    calls = num_agents * TURNS
    core = sum(agent.core_seconds for agent in agents)
    took = apply_all(index, steps)
    print(f"agents of {TURNS} turns            {num_agents:>12,}")
    print(f"events a call                 {len(steps) / calls:>12.1f}")
    print(f"index, events a second        {len(steps) / took:>12,.0f}")
    print(f"index, calls a second         {calls / took:>12,.0f}")
    print(f"decide + evolve + index       {calls / (took + core):>12,.0f} calls a second")


def long_context(index: ChunkIndex, rng: random.Random, system: bytes) -> None:
    """Print what one event costs a context of very many versions."""
    agent = Agent(rng, "long", system)
    agent.grow([200] * LONG_CONTEXT_MESSAGES)
    agent.call(200)
    apply_all(index, agent.steps)
    agent.steps.clear()
    for _ in range(20):
        agent.grow([400])
        agent.call(200)
    costs = [apply_all(index, [step]) * 1e6 for step in agent.steps]
    print(f"event of {LONG_CONTEXT_MESSAGES} versions        {statistics.median(costs):>12.0f} us")
    print(f"the dearest of them           {max(costs):>12.0f} us")


def plan(index: ChunkIndex) -> None:
    """Print what a full directive costs: planned, recorded, settled."""
    began = time.perf_counter()
    directive = plan_reclaim(index, NAMESPACE, 2 * 10**18, 0, "directive", lambda owner: True)
    planned = time.perf_counter()
    if directive is None:
        raise RuntimeError("compacted agents left nothing to reclaim")
    num_keys = len(directive.keys) // KEY_BYTES
    result = DirectiveResult(outcome=DirectiveOutcome.APPLIED, applied=num_keys, gone=directive.keys)
    settled = DirectiveSettled(at_ns=2 * 10**18, directive_id="directive", namespace=NAMESPACE, result=result)
    proposed = DirectiveProposed(at_ns=2 * 10**18, directive=directive, as_of=0)
    took = apply_all(index, [(proposed, None, None), (settled, None, None)])
    print(f"plan of {num_keys:,} keys (of {MAX_KEYS:,})  {(planned - began) * 1e3:>10.1f} ms")
    print(f"its proposal and its outcome  {took * 1e3:>12.1f} ms")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--contexts", type=int, default=10_000)
    parser.add_argument("--tokens", type=int, default=100_000, help="of each context")
    parser.add_argument("--agents", type=int, default=200)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    rng = random.Random(options.seed)
    system = rng.randbytes(SYSTEM_TOKENS // CHUNK * KEY_BYTES)
    empty = resident_bytes()
    states = list(books(rng, system, options.contexts, options.tokens))
    index = ChunkIndex()
    memory(index, states, empty)
    speed(index, rng, system, options.agents)
    long_context(index, rng, system)
    plan(index)


if __name__ == "__main__":
    main()
