"""Whole logs of random lives, as a test tool: contexts, a cache that talks, directives, time that passes."""

import random
from collections.abc import AsyncIterator, Iterable, Sequence

from lifecycle.core.digest import digest_all
from lifecycle.core.directives import DirectiveResult
from lifecycle.core.events import (
    ChunksConfirmed,
    ChunksGone,
    DirectiveProposed,
    DirectiveSettled,
    EnforcementRearmed,
    HarmBudgetExceeded,
    NamespaceEvent,
    RecordedEvent,
    UntrackedForwarded,
)
from lifecycle.core.ids import Namespace, split_keys
from lifecycle.core.observations import OperationReceived, PinSpan, ReplaceMessages, VerificationResult
from lifecycle.core.plan import plan_reclaim
from lifecycle.errors import InvalidObservation, UnknownContext
from lifecycle.log_keeper import LogKeeper
from lifecycle.ports import EventLog, SnapshotStore
from lifecycle.projections.contexts import Contexts
from lifecycle.projections.index_facts import IndexFacts, taken
from lifecycle.store.memory import MemoryEventLog
from lifecycle.store.snapshots import MemorySnapshots
from lifecycle.tracker import Tracker
from lifecycle.vocabulary import CallEnd, DirectiveOutcome, Tier
from tests.lifecycle.core.story import BYTES_PER_TOKEN, NAMESPACE
from tests.lifecycle.lives import Agent, ManualClock, books, chain_of

NAMESPACES = (NAMESPACE, Namespace(NAMESPACE.model, salt="tenant", fingerprint="f"))
WORDS = ("s1", "u1", "u2", "u3", "a1", "a2", "t1")
RETENTION_SECONDS = 7200.0
KEEP_RECURRING_SECONDS = 40.0
OUTCOMES = tuple(DirectiveOutcome)
PAUSES = (0.5, 5, 31, 61, 121, 1000, 3700, 8000)
OPERATIONS = (
    *("open", "fork", "call", "call", "call", "call", "arrive", "map", "abort", "pin", "replace", "close"),
    *(
        "show",
        "store",
        "store",
        "gone",
        "untracked",
        "unverified",
        "harm",
        "rearm",
        "plan",
        "plan",
        "settle",
        "settle",
    ),
    *("wait", "wait"),
)


def facts(contexts: Contexts) -> bytes:
    """Digest of everything that what follows may depend on, also of what is not true of anything yet."""
    (index,) = (f for f in taken(contexts.index) if isinstance(f, IndexFacts))
    return digest_all((books(contexts), contexts.held(), index.now_ns, index.unproven))


def plans(contexts: Contexts, now_ns: int) -> list[object]:
    """What would be freed now and later, whoever let go last."""
    return [
        plan_reclaim(contexts.index, namespace, now_ns + later * 10**9, 1, "d", wanted)
        for namespace in contexts.index.namespaces()
        for later in (0, 60, 7200)
        for wanted in (lambda _: True, lambda owner: owner in contexts.states)
    ]


def busy(seed: int, num_steps: int) -> list[str]:
    """Steps with the odds of a busy day, with snapshots and trims among them."""
    rng = random.Random(seed)
    odds = [1 / OPERATIONS.count(o) if o in ("open", "close", "wait") else 1 for o in OPERATIONS]
    steps = rng.choices(OPERATIONS, odds, k=num_steps)
    for at in range(num_steps, 0, -20):
        steps[at:at] = rng.choice([["snapshot"], ["snapshot", "trim"], ["trim"], []])
    return [*steps, "snapshot", "store", "call", "snapshot", "later", "trim", "call", "store"]


class RandomBooks:
    """A tracker over `log` that lives by `step`; `recorded` is the log as if nothing were trimmed."""

    def __init__(self, log: EventLog, snapshots: SnapshotStore, seed: int) -> None:
        self.rng = random.Random(seed)
        self.clock = ManualClock()
        self.log = log
        self.snapshots = snapshots
        self.tracker = Tracker(log, self.clock, RETENTION_SECONDS, KEEP_RECURRING_SECONDS)
        self.keeper = LogKeeper(self.tracker, log)
        self.tracker.listeners.append(self._heard)
        self.recorded: list[RecordedEvent] = []
        self.agents: list[Agent] = []
        self.lists: dict[str, str] = {}
        self.serial = 0

    def _heard(self, batch: Sequence[RecordedEvent]) -> None:
        self.recorded.extend(batch)

    async def start(self) -> "RandomBooks":
        await self.keeper.start(self.snapshots)
        return self

    def fresh(self, prefix: str) -> str:
        self.serial += 1
        return f"{prefix}{self.serial}"

    async def step(self, operation: str) -> None:
        """One thing that happens; where it cannot, nothing does."""
        if operation == "snapshot":
            await self.keeper.snapshot(in_a_hurry=True)
            return
        if operation == "trim":
            await self.keeper.trim()
            return
        if operation == "later":
            self.clock.advance(RETENTION_SECONDS)
            return
        self.clock.advance(0.001)
        if operation in ("open", "fork") or not self.agents:
            await self._open(operation == "fork")
            return
        agent = self.rng.choice(self.agents)
        if agent.uid not in self.tracker.contexts.states:
            self.agents.remove(agent)
            return
        try:
            await self._of_context(agent, operation)
        except (InvalidObservation, UnknownContext):
            return
        await self._of_cache(agent.namespace, operation)

    async def _open(self, fork: bool) -> None:
        namespace = self.rng.choice(NAMESPACES)
        parents = [a for a in self.agents if a.namespace == namespace]
        parent = self.rng.choice(parents) if fork and parents else None
        agent = Agent(self.tracker, self.fresh("u"), self.rng.choice(["", "", "n1", "n2"]), namespace)
        await agent.open(parent, one_off=self.rng.random() < 0.2)
        if agent.uid not in {a.uid for a in self.agents}:
            self.agents.append(agent)

    async def _of_context(self, agent: Agent, operation: str) -> None:
        if operation in ("call", "arrive", "map", "abort"):
            words = self._list(agent)
            call = self.fresh("c")
            if operation == "call":
                await agent.call(
                    words, call, self.rng.choice([CallEnd.COMPLETED, CallEnd.COMPLETED, CallEnd.ABORTED])
                )
                return
            await agent.arrive(words, call)
            if operation == "map":
                await agent.map(words, call)
            if operation == "abort":
                await agent.end(call, how=CallEnd.ABORTED)
        elif operation in ("pin", "replace"):
            span = (self.rng.randint(0, 1), self.rng.randint(2, 3))
            seq = max((s.applied for s in agent.state.sources.values()), default=0) + 1
            pinned = PinSpan(seq=seq, ctx=agent.name, span=span)
            replaced = ReplaceMessages(seq=seq, ctx=agent.name, span=span, n=1)
            await self.tracker.observe(
                agent.uid,
                OperationReceived(
                    at_ns=agent.now,
                    source="s",
                    operation=pinned if operation == "pin" else replaced,
                    bytes_per_token=BYTES_PER_TOKEN,
                ),
            )
        elif operation == "close":
            await agent.close()
        elif operation == "unverified":
            reason = self.rng.choice(["", "the cache shows other keys"])
            await self.tracker.observe(agent.uid, VerificationResult(at_ns=agent.now, reason=reason))
        elif operation == "wait":
            self.clock.advance(self.rng.choice(PAUSES))
            await self.tracker.tick()

    async def _of_cache(self, namespace: Namespace, operation: str) -> None:
        now = self.clock.now_ns()
        event: NamespaceEvent | None = None
        if operation in ("show", "store", "gone"):
            keys = self._keys(operation == "store")
            if operation == "gone":
                event = ChunksGone(at_ns=now, namespace=namespace, keys=keys)
            else:
                stored = operation == "store"
                event = ChunksConfirmed(
                    at_ns=now, namespace=namespace, keys=keys, tiers=(Tier.L1,), stored=stored
                )
        elif operation == "untracked" and self.rng.random() < 0.2:
            event = UntrackedForwarded(at_ns=now, namespace=namespace, reason="embeddings")
        elif operation == "harm":
            event = HarmBudgetExceeded(
                at_ns=now,
                namespace=namespace,
                tenant="t",
                regretted_tokens=9,
                prompt_tokens=9,
                allowed_tokens=0,
                window_seconds=60.0,
            )
        elif operation == "rearm":
            event = EnforcementRearmed(at_ns=now, namespace=namespace, tenant="t")
        elif operation == "plan":
            contexts = self.tracker.contexts
            directive = plan_reclaim(contexts.index, namespace, now, contexts.position, self.fresh("d"), bool)
            if directive is not None:
                event = DirectiveProposed(at_ns=now, directive=directive, as_of=contexts.position)
        elif operation == "settle":
            event = self._settled(now)
            namespace = event.namespace if event is not None else namespace
        if event is not None:
            await self.tracker.record(namespace, [event])

    def _settled(self, now: int) -> DirectiveSettled | None:
        under_way = [r.directive for r in self.tracker.contexts.directives.values() if r.result is None]
        if not under_way:
            return None
        directive = self.rng.choice(under_way)
        outcome = self.rng.choice(OUTCOMES)
        gone = [k for k in split_keys(getattr(directive, "keys", b"")) if self.rng.random() < 0.7]
        done = outcome is DirectiveOutcome.APPLIED
        result = DirectiveResult(outcome=outcome, applied=len(gone), gone=b"".join(gone) if done else b"")
        return DirectiveSettled(
            at_ns=now, directive_id=directive.directive_id, namespace=directive.namespace, result=result
        )

    def _list(self, agent: Agent) -> str:
        words = self.lists.get(agent.name, "s1").split()
        words += self.rng.choices(WORDS, k=self.rng.randint(1, 3))
        if self.rng.random() < 0.2:
            words[self.rng.randrange(len(words))] = self.rng.choice(WORDS)
        self.lists[agent.name] = " ".join(words[-9:])
        return self.lists[agent.name]

    def _keys(self, everything: bool) -> bytes:
        if not self.lists:
            return chain_of("s1 u1")
        known = chain_of(self.rng.choice(sorted(self.lists.values())))
        return known if everything else b"".join(k for k in split_keys(known) if self.rng.random() < 0.4)


async def each(recorded: Iterable[RecordedEvent]) -> AsyncIterator[RecordedEvent]:
    for one in recorded:
        yield one


async def from_zero(recorded: list[RecordedEvent]) -> Contexts:
    contexts = Contexts(RETENTION_SECONDS, KEEP_RECURRING_SECONDS)
    await contexts.rebuild(each(recorded))
    return contexts


async def lived(seed: int, steps: Iterable[str]) -> tuple[RandomBooks, MemorySnapshots]:
    """A life with snapshots and trims, each of which is a chance to be wrong."""
    log, snapshots = MemoryEventLog(), MemorySnapshots()
    it = RandomBooks(log, snapshots, seed)
    await it.start()
    for step in steps:
        await it.step(step)
    return it, snapshots


async def all_agree(it: RandomBooks, snapshots: MemorySnapshots) -> bytes:
    """Live state, replay from zero, and a restart on what is left are the same, and plan the same."""
    now = it.clock.now_ns()
    live = it.tracker.contexts
    whole = await from_zero(it.recorded)
    assert facts(whole) == facts(live)
    again = Tracker(it.log, it.clock, RETENTION_SECONDS, KEEP_RECURRING_SECONDS)
    await again.start(snapshots)
    assert facts(again.contexts) == facts(whole)
    assert plans(again.contexts, now) == plans(whole, now) == plans(live, now)
    for namespace in live.index.namespaces():
        assert again.contexts.index.stats(namespace) == live.index.stats(namespace)
    return facts(whole)
