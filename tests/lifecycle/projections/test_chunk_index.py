"""The index against a model that recounts everything from scratch after every step."""

from dataclasses import dataclass
from hashlib import blake2b

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from msgspec.structs import replace

from lifecycle.core.decide import decide, open_context
from lifecycle.core.directives import Demote, DirectiveResult, Reclaim
from lifecycle.core.events import (
    CallArrived,
    ChunksConfirmed,
    ChunksGone,
    ContextClosed,
    ContextCreated,
    DirectiveProposed,
    DirectiveSettled,
    Event,
    GenerationMapped,
    UntrackedForwarded,
)
from lifecycle.core.evolve import evolve
from lifecycle.core.ids import ContextKey, Namespace, split_keys
from lifecycle.core.observations import (
    CallArrival,
    CallEnding,
    CallMapping,
    CloseRequested,
    ContextOpened,
    FirstToken,
    MessageFact,
    OperationReceived,
    PromptMapping,
    ReplaceMessages,
)
from lifecycle.core.plan import ChunkFlag, plan_reclaim
from lifecycle.core.state import ROOT, ContextState, Flight, Version
from lifecycle.projections.chunk_index import RETRY_NS, UNPROVEN_NS, ChunkIndex
from lifecycle.vocabulary import (
    UNTRACKED_RECENT_SECONDS,
    CallEnd,
    DirectiveOutcome,
    IdentityRung,
    MappingKind,
    Tier,
)

SECOND = 10**9
NAMESPACES = (Namespace("m"), Namespace("m", salt="tenant"))
DEPTH = 6
PATHS = [()]
for _length in range(DEPTH):
    PATHS += [(*p, t) for p in PATHS if len(p) == _length for t in (0, 1)]

FINAL = [o for o in DirectiveOutcome if o not in (DirectiveOutcome.PROPOSED, DirectiveOutcome.ACCEPTED)]


def key_of(path: tuple[int, ...], *, crowded: bool) -> bytes:
    """A chained key: it names the whole path. Crowded ones share their first eight bytes with many others."""
    name = blake2b(bytes(path), digest_size=32).digest()
    return bytes([name[8] % 3]) * 8 + name[8:] if crowded else name


def chain_of(path: tuple[int, ...], start: int, *, crowded: bool) -> bytes:
    return b"".join(key_of(path[: i + 1], crowded=crowded) for i in range(start, len(path)))


@dataclass
class Chunk:
    """What the model knows of a key."""

    flags: int = 0
    dead_ns: int = 0
    retry_ns: int = 0
    owner: str = ""


def anybody(owner: str) -> bool:
    return True


class Model:
    """Books of one index, recounted from the contexts."""

    def __init__(self) -> None:
        self.now = 0
        self.contexts: dict[str, ContextState] = {}
        self.chunks: dict[Namespace, dict[bytes, Chunk]] = {n: {} for n in NAMESPACES}
        self.directives: dict[str, Reclaim | Demote] = {}
        self.untracked: dict[Namespace, int] = {}
        self.unknown_confirmed = dict.fromkeys(NAMESPACES, 0)

    def references(self, namespace: Namespace) -> dict[bytes, int]:
        counts: dict[bytes, int] = {}
        for state in self.contexts.values():
            if state.namespace == namespace:
                for version in state.versions.values():
                    for key in split_keys(version.keys):
                        counts[key] = counts.get(key, 0) + 1
        return counts

    def asked(self, namespace: Namespace) -> set[bytes]:
        return {k for d in self.directives.values() if d.namespace == namespace for k in split_keys(d.keys)}

    def apply(self, event: Event, after: ContextState | None) -> None:
        self.now = max(self.now, event.at_ns)
        for chunks in self.chunks.values():
            for key, chunk in list(chunks.items()):
                if chunk.dead_ns and not chunk.flags & 2 and self.now - chunk.dead_ns >= UNPROVEN_NS:
                    del chunks[key]
        if after is not None:
            self.contexts[after.uid] = after
            self._recount(after)
            if isinstance(event, GenerationMapped) and event.parent == ROOT:
                for key in split_keys(event.keys):
                    self.chunks[after.namespace].setdefault(key, Chunk(dead_ns=self.now, owner=after.uid))
        elif isinstance(event, ChunksConfirmed):
            for key in split_keys(event.keys):
                chunk = self.chunks[event.namespace].get(key)
                if chunk is None:
                    self.unknown_confirmed[event.namespace] += 1
                else:
                    chunk.flags |= 3 if event.stored else 1
        elif isinstance(event, ChunksGone):
            self._gone(event.namespace, event.keys)
        elif isinstance(event, UntrackedForwarded):
            self.untracked[event.namespace] = event.at_ns
        elif isinstance(event, DirectiveProposed):
            assert isinstance(event.directive, Reclaim | Demote)
            self.directives.setdefault(event.directive.directive_id, event.directive)
        elif isinstance(event, DirectiveSettled) and event.result.outcome in FINAL:
            self._settled(event)
        for namespace, chunks in self.chunks.items():
            asked = self.asked(namespace)
            for key, chunk in chunks.items():
                chunk.flags = chunk.flags & ~4 | (4 if key in asked else 0)

    def _recount(self, context: ContextState) -> None:
        counts = self.references(context.namespace)
        chunks = self.chunks[context.namespace]
        for key in counts:
            chunk = chunks.setdefault(key, Chunk())
            if chunk.dead_ns:
                chunk.dead_ns = 0
                chunk.flags &= ~8
        for key, chunk in chunks.items():
            if key not in counts and not chunk.dead_ns:
                chunk.dead_ns = self.now
                chunk.owner = context.uid

    def _gone(self, namespace: Namespace, keys: bytes) -> None:
        for key in split_keys(keys):
            chunk = self.chunks[namespace].get(key)
            if chunk and chunk.dead_ns:
                del self.chunks[namespace][key]
            elif chunk:
                chunk.flags &= 4

    def _settled(self, event: DirectiveSettled) -> None:
        directive = self.directives.pop(event.directive_id, None)
        if directive is None:
            return
        chunks = self.chunks[event.namespace]
        outcome = event.result.outcome
        self._gone(event.namespace, event.result.gone)
        if outcome is DirectiveOutcome.EXPIRED:
            return
        for key in split_keys(directive.keys):
            chunk = chunks.get(key)
            if chunk is None or key in split_keys(event.result.gone):
                continue
            if outcome is DirectiveOutcome.SUPPRESSED:
                if chunk.dead_ns:
                    del chunks[key]
            elif isinstance(directive, Demote) and outcome in (
                DirectiveOutcome.APPLIED,
                DirectiveOutcome.UNSUPPORTED,
            ):
                chunk.flags |= 8 if chunk.dead_ns else 0
            else:
                chunk.retry_ns = self.now + RETRY_NS


PATH = st.lists(st.integers(0, 1), max_size=DEPTH).map(tuple)
NS = st.sampled_from(NAMESPACES)
PICK = st.randoms(use_true_random=False)


class IndexMachine(RuleBasedStateMachine):
    """Contexts come, grow, lose versions, end; the cache talks; directives are proposed and settled."""

    crowded = False

    def __init__(self) -> None:
        super().__init__()
        self.index = ChunkIndex()
        self.model = Model()
        self.steps: list[tuple[Event, ContextState | None, ContextState | None]] = []
        self.now = SECOND
        self.serial = 0

    def step(self, event: Event, after: ContextState | None = None) -> None:
        before = self.model.contexts.get(after.uid) if after is not None else None
        self.steps.append((event, before, after))
        self.index.apply(event, before, after)
        self.model.apply(event, after)

    def fresh(self, prefix: str) -> str:
        self.serial += 1
        return f"{prefix}{self.serial}"

    def some_keys(self, namespace: Namespace, pick) -> bytes:
        """Known keys, unknown keys, in chain order or not."""
        known = list(self.model.chunks[namespace])
        chosen = pick.sample(known, pick.randint(0, len(known)))
        if pick.random() < 0.3:
            chosen.append(key_of((7, pick.randint(0, 1)), crowded=self.crowded))
        return b"".join(chosen)

    def changed(self, state: ContextState, **changes) -> None:
        arrived = CallArrived(at_ns=self.now, call_id="c", attempt=1, kept=ROOT)
        self.step(arrived, replace(state, **changes))

    def pick_context(self, pick) -> ContextState:
        return self.model.contexts[pick.choice(sorted(self.model.contexts))]

    @initialize()
    def something_to_share(self) -> None:
        self.context_begins(NAMESPACES[0], (0, 0, 0, 0), {2})

    @rule(namespace=NS, path=PATH, cuts=st.sets(st.integers(1, DEPTH - 1)))
    def context_begins(self, namespace, path, cuts) -> None:
        uid = self.fresh("u")
        versions, start = {}, 0
        for number, stop in enumerate([*sorted(c for c in cuts if c < len(path)), len(path)]):
            keys = chain_of(path[:stop], start, crowded=self.crowded)
            versions[number] = Version(number, number - 1, number, "user", b"", keys=keys)
            start = stop
        created = ContextCreated(
            at_ns=self.now,
            uid=uid,
            tenant="t",
            context_id=uid,
            namespace=namespace,
            rung=IdentityRung.NEW,
        )
        state = ContextState(
            uid=uid,
            key=ContextKey("t", uid),
            namespace=namespace,
            rung=IdentityRung.NEW,
            versions=versions,
            next_version=len(versions),
        )
        self.step(created, state)

    @precondition(lambda self: self.model.contexts)
    @rule(pick=PICK, path=PATH, start=st.integers(0, DEPTH), known=st.booleans())
    def context_grows(self, pick, path, start, known) -> None:
        """A version more; or, if `known`, one that is there gets other keys."""
        state = self.pick_context(pick)
        number = state.next_version
        if known and state.versions:
            number = pick.choice(sorted(state.versions))
        keys = chain_of(path, min(start, len(path)), crowded=self.crowded)
        versions = {**state.versions, number: Version(number, ROOT, 0, "user", b"", keys=keys)}
        self.changed(state, versions=versions, next_version=max(state.next_version, number + 1))

    @precondition(lambda self: self.model.contexts)
    @rule(pick=PICK)
    def versions_leave(self, pick) -> None:
        state = self.pick_context(pick)
        self.changed(state, versions={i: v for i, v in state.versions.items() if pick.random() < 0.5})

    @precondition(lambda self: self.model.contexts)
    @rule(pick=PICK, path=PATH, start=st.integers(0, DEPTH))
    def one_version_takes_the_place_of_another(self, pick, path, start) -> None:
        """The new one may be too short to hold a chunk's end."""
        state = self.pick_context(pick)
        versions = dict(state.versions)
        if versions:
            versions.pop(pick.choice(sorted(versions)))
        keys = chain_of(path, min(start, len(path)), crowded=self.crowded)
        number = state.next_version
        versions[number] = Version(number, ROOT, 0, "user", b"", keys=keys)
        self.changed(state, versions=versions, next_version=number + 1)

    @precondition(lambda self: self.model.contexts)
    @rule(pick=PICK)
    def context_closes(self, pick) -> None:
        state = replace(self.pick_context(pick), versions={}, flights=(), closed="over")
        self.step(ContextClosed(at_ns=self.now, reason="over"), state)

    @precondition(lambda self: self.model.contexts)
    @rule(pick=PICK, known=st.lists(st.booleans(), max_size=2), unmapped=st.sampled_from(["", "", "lost"]))
    def calls_and_mapping(self, pick, known, unmapped) -> None:
        flights = tuple(
            Flight(call_id=f"c{i}", attempt=1, tip=0, tail=0, tails=(), arrived_ns=self.now, mapping_known=k)
            for i, k in enumerate(known)
        )
        self.changed(self.pick_context(pick), flights=flights, unmapped=unmapped)

    @precondition(lambda self: self.model.contexts)
    @rule(pick=PICK, path=PATH, start=st.integers(0, DEPTH))
    def generation_came_late(self, pick, path, start) -> None:
        keys = chain_of(path, min(start, len(path)), crowded=self.crowded)
        event = GenerationMapped(
            at_ns=self.now,
            call_id="c",
            attempt=1,
            choice=0,
            parent=ROOT,
            end=0,
            first_chunk=start,
            keys=keys,
        )
        self.step(event, self.pick_context(pick))

    @rule(namespace=NS, pick=PICK, stored=st.booleans())
    def cache_shows(self, namespace, pick, stored) -> None:
        keys = self.some_keys(namespace, pick)
        self.step(
            ChunksConfirmed(at_ns=self.now, namespace=namespace, keys=keys, tiers=(Tier.L1,), stored=stored)
        )

    @rule(namespace=NS)
    def cache_stored_all(self, namespace) -> None:
        keys = b"".join(self.model.chunks[namespace])
        self.step(
            ChunksConfirmed(at_ns=self.now, namespace=namespace, keys=keys, tiers=(Tier.L1,), stored=True)
        )

    @rule(namespace=NS, pick=PICK)
    def cache_lost(self, namespace, pick) -> None:
        keys = self.some_keys(namespace, pick)
        self.step(ChunksGone(at_ns=self.now, namespace=namespace, keys=keys))

    @rule(namespace=NS)
    def untracked(self, namespace) -> None:
        self.step(UntrackedForwarded(at_ns=self.now, namespace=namespace, reason="embeddings"))

    @rule(seconds=st.sampled_from([1, 29, 30, 119, 120, int(UNTRACKED_RECENT_SECONDS)]))
    def time_passes(self, seconds) -> None:
        self.now += seconds * SECOND

    @rule(namespace=NS, pick=PICK, demote=st.booleans())
    def somebody_asks(self, namespace, pick, demote) -> None:
        """A directive that is not the plan's: it may name live and unknown chunks."""
        kind = Demote if demote else Reclaim
        keys = self.some_keys(namespace, pick)
        directive = kind(directive_id=self.fresh("d"), namespace=namespace, reason="asked", keys=keys)
        self.step(DirectiveProposed(at_ns=self.now, directive=directive, as_of=0))

    @rule(namespace=NS, pick=PICK)
    def plan_asks(self, namespace, pick) -> None:
        """For the chunks that some contexts let go, and dead before any call of unknown chain came."""
        owners = {uid for uid in self.model.contexts if pick.random() < 0.8}
        directive = plan_reclaim(
            self.index, namespace, self.now, len(self.steps), self.fresh("d"), owners.__contains__
        )
        contexts = [c for c in self.model.contexts.values() if c.namespace == namespace]
        chunks = self.model.chunks[namespace]
        untracked = self.model.untracked.get(namespace)
        doubt = any(c.unmapped and c.open for c in contexts) or (
            untracked is not None and self.now - untracked < UNTRACKED_RECENT_SECONDS * SECOND
        )
        free = {
            key
            for key, chunk in chunks.items()
            if chunk.dead_ns and chunk.retry_ns <= self.now and chunk.flags in ({3} if doubt else {3, 11})
            if chunk.owner in owners
            if all(f.mapping_known or chunk.dead_ns < f.arrived_ns for c in contexts for f in c.flights)
        }
        if not free:
            assert directive is None
            return
        assert isinstance(directive, Demote if doubt else Reclaim)
        assert sorted(split_keys(directive.keys)) == sorted(free)
        self.step(DirectiveProposed(at_ns=self.now, directive=directive, as_of=len(self.steps)))

    @precondition(lambda self: self.model.directives)
    @rule(pick=PICK, outcome=st.sampled_from(list(DirectiveOutcome)), all_gone=st.booleans())
    def directive_settles(self, pick, outcome, all_gone) -> None:
        directive = self.model.directives[pick.choice(sorted(self.model.directives))]
        gone = [k for k in split_keys(directive.keys) if all_gone or pick.random() < 0.3]
        if outcome is not DirectiveOutcome.APPLIED:
            gone = []
        result = DirectiveResult(outcome=outcome, gone=b"".join(gone))
        self.step(
            DirectiveSettled(
                at_ns=self.now,
                directive_id=directive.directive_id,
                namespace=directive.namespace,
                result=result,
            )
        )

    @invariant()
    def every_key_is_as_recounted(self) -> None:
        for namespace in NAMESPACES:
            counts = self.model.references(namespace)
            chunks = self.model.chunks[namespace]
            for path in PATHS[1:]:
                key = key_of(path, crowded=self.crowded)
                assert self.index.references(namespace, key) == counts.get(key, 0)
                chunk = chunks.get(key)
                told = self.index.describe(namespace, key)
                if chunk is None:
                    assert told is None
                    continue
                assert told is not None
                flags = sum(ChunkFlag[name] for name in told.flags)
                assert (flags, told.dead_ns, told.retry_ns) == (chunk.flags, chunk.dead_ns, chunk.retry_ns)
                named = {d.directive_id for d in self.model.directives.values() if d.namespace == namespace}
                named &= {i for i, d in self.model.directives.items() if key in split_keys(d.keys)}
                assert set(told.directives) == named

    @invariant()
    def totals_add_up(self) -> None:
        for namespace in NAMESPACES:
            chunks = self.model.chunks[namespace].values()
            stats = self.index.stats(namespace)
            assert stats.live + stats.dead == len(chunks)
            assert stats.dead == sum(c.dead_ns > 0 for c in chunks)
            assert stats.verified == sum(c.flags & 1 for c in chunks)
            assert stats.pending == sum(c.flags & 4 > 0 for c in chunks)
            assert stats.unknown_confirmed == self.model.unknown_confirmed[namespace]
            assert stats.runs <= len(chunks)
            keys = b"".join(self.model.chunks[namespace])
            unshown = [k for k, c in self.model.chunks[namespace].items() if not c.flags & 1]
            assert self.index.unverified(namespace, keys) == unshown
            for run in self.index.dead_runs(namespace, demoted=True):
                assert {self.model.chunks[namespace][k].owner for k in split_keys(run.keys)} == {run.owner}
            dead = {k: c.owner for k, c in self.model.chunks[namespace].items() if c.dead_ns}
            for owner in {"nobody", *dead.values()}:
                expected = sorted(k for k, last in dead.items() if last == owner)
                assert sorted(self.index.dead_keys(namespace, owner.__eq__)) == expected

    @invariant()
    def who_is_in_the_way_is_known(self) -> None:
        for namespace in NAMESPACES:
            contexts = [c for c in self.model.contexts.values() if c.namespace == namespace]
            unmapped = sorted(c.uid for c in contexts if c.unmapped and c.open)
            assert list(self.index.unmapped_contexts(namespace)) == unmapped
            unknown = [f.arrived_ns for c in contexts for f in c.flights if not f.mapping_known]
            assert self.index.oldest_unknown_ns(namespace) == min(unknown, default=None)
            still_dead = self.index.still_dead(namespace)
            counts = self.model.references(namespace)
            for path in PATHS[1:]:
                key = key_of(path, crowded=self.crowded)
                assert still_dead(key) == (key not in counts)

    def teardown(self) -> None:
        """Replayed steps give the same books, also when the versions of a state come in another order."""
        again, reordered = ChunkIndex(), ChunkIndex()
        for event, before, after in self.steps:
            again.apply(event, before, after)
            reordered.apply(event, before, after and replace(after, versions=reverse(after.versions)))
        assert again.digest() == self.index.digest() == reordered.digest()
        for state in list(self.model.contexts.values()):
            self.step(ContextClosed(at_ns=self.now, reason="end"), replace(state, versions={}, closed="end"))
        assert all(self.index.stats(namespace).live == 0 for namespace in NAMESPACES)


def reverse(versions):
    return dict(reversed(versions.items()))


class CrowdedIndexMachine(IndexMachine):
    """The same where many keys share their first eight bytes."""

    crowded = True


BOUNDS = settings(max_examples=50, stateful_step_count=25, deadline=None)
TestIndex = IndexMachine.TestCase
TestIndex.settings = BOUNDS
TestCrowdedIndex = CrowdedIndexMachine.TestCase
TestCrowdedIndex.settings = BOUNDS


def test_a_version_that_only_moved_never_looks_dead():
    """An edit copies a message to another version: its chunks keep what the cache said of them."""
    keys = chain_of((0, 1, 0), 0, crowded=False)
    state = ContextState(
        uid="u",
        key=ContextKey("t", "c"),
        namespace=NAMESPACES[0],
        rung=IdentityRung.NEW,
        versions={0: Version(0, ROOT, 0, "user", b"", keys=keys)},
    )
    moved = replace(state, versions={1: Version(1, ROOT, 0, "user", b"", keys=keys)})
    index = ChunkIndex()
    event = CallArrived(at_ns=SECOND, call_id="c", attempt=1, kept=ROOT)
    index.apply(event, None, state)
    index.apply(
        ChunksConfirmed(at_ns=SECOND, namespace=NAMESPACES[0], keys=keys, tiers=(Tier.L1,), stored=True),
        None,
        None,
    )
    index.apply(event, state, moved)
    assert index.verified_chunks(NAMESPACES[0], keys) == 3
    assert index.stats(NAMESPACES[0]).dead == 0


@pytest.mark.parametrize("shown", [0, 1, 2])
def test_verified_chunks_counts_from_the_start_of_the_chain(shown):
    keys = chain_of((0, 1, 0), 0, crowded=False)
    index = ChunkIndex()
    state = ContextState(
        uid="u",
        key=ContextKey("t", "c"),
        namespace=NAMESPACES[0],
        rung=IdentityRung.NEW,
        versions={0: Version(0, ROOT, 0, "user", b"", keys=keys)},
    )
    index.apply(CallArrived(at_ns=SECOND, call_id="c", attempt=1, kept=ROOT), None, state)
    known = split_keys(keys)
    seen = b"".join(k for i, k in enumerate(known) if i != shown)
    index.apply(
        ChunksConfirmed(at_ns=SECOND, namespace=NAMESPACES[0], keys=seen, tiers=(Tier.L1,)), None, None
    )
    assert index.verified_chunks(NAMESPACES[0], keys) == shown


class Agent:
    """A context driven through the core by what a proxy sees, its events fed to an index."""

    def __init__(self, index: ChunkIndex, uid: str, parent: ContextState | None = None) -> None:
        self.index = index
        self.state: ContextState | None = None
        opened = ContextOpened(
            at_ns=SECOND,
            uid=uid,
            tenant="t",
            context_id=uid,
            namespace=NAMESPACES[0],
            rung=IdentityRung.EXPLICIT,
            parent=parent.key.context_id if parent else "",
            fork=parent is not None,
        )
        self.take(open_context(opened, parent))

    def take(self, events) -> None:
        for event in events:
            before, self.state = self.state, evolve(self.state, event)
            self.index.apply(event, before, self.state)

    def see(self, observation) -> None:
        self.take(decide(self.state, observation))

    def call(self, texts: tuple[int, ...], call_id: str) -> bytes:
        """A call with these messages, two chunks each behind a head of one, all stored. Its chain."""
        path = tuple(half for text in texts for half in (text, text))
        keys = key_of((), crowded=False) + chain_of(path, 0, crowded=False)
        arrival = CallArrival(
            at_ns=SECOND,
            call_id=call_id,
            head=b"h",
            messages=tuple(MessageFact(bytes([t]), "user") for t in texts),
        )
        self.see(arrival)
        mapping = PromptMapping(
            kind=MappingKind.EXACT,
            num_tokens=len(keys) // 32,
            head_end=1,
            message_ends=tuple(1 + 2 * (i + 1) for i in range(len(texts))),
            chunk_size=1,
            chunk_keys=keys,
        )
        self.see(CallMapping(at_ns=SECOND, call_id=call_id, attempt=1, mapping=mapping))
        self.see(FirstToken(at_ns=SECOND, call_id=call_id, attempt=1))
        self.see(CallEnding(at_ns=SECOND, call_id=call_id, attempt=1, end=CallEnd.COMPLETED))
        stored = ChunksConfirmed(
            at_ns=SECOND, namespace=NAMESPACES[0], keys=keys, tiers=(Tier.L1,), stored=True
        )
        self.index.apply(stored, None, None)
        return keys


def planned(index: ChunkIndex) -> set[bytes]:
    directive = plan_reclaim(index, NAMESPACES[0], 2 * SECOND, 1, "d", anybody)
    assert directive is None or isinstance(directive, Reclaim)
    return set(split_keys(directive.keys)) if directive else set()


def test_a_compaction_frees_what_lies_on_the_old_chain_only():
    index = ChunkIndex()
    agent = Agent(index, "agent")
    for turn in range(1, 13):
        old = agent.call(tuple(range(turn)), f"c{turn}")
    assert planned(index) == set()
    edit = ReplaceMessages(seq=1, ctx="agent", span=(1, 12), n=1)
    agent.see(OperationReceived(at_ns=SECOND, source="s", operation=edit))
    new = agent.call((0, 99), "c13")
    assert planned(index) == set(split_keys(old)) - set(split_keys(new))
    agent.see(CloseRequested(at_ns=SECOND, reason="done"))
    assert planned(index) == set(split_keys(old)) | set(split_keys(new))


@pytest.mark.parametrize("parent_first", [True, False])
def test_a_fork_keeps_what_it_shares_until_both_are_gone(parent_first):
    index = ChunkIndex()
    parent = Agent(index, "parent")
    shared = parent.call((1, 2), "c1")
    child = Agent(index, "child", parent.state)
    parents = parent.call((1, 2, 3), "c2")
    childs = child.call((1, 2, 4), "c1")
    first, second = (parent, child) if parent_first else (child, parent)
    first.see(CloseRequested(at_ns=SECOND, reason="done"))
    gone = parents if parent_first else childs
    assert planned(index) == set(split_keys(gone)) - set(split_keys(shared))
    second.see(CloseRequested(at_ns=SECOND, reason="done"))
    assert first.state is not None
    of_first = plan_reclaim(index, NAMESPACES[0], 2 * SECOND, 1, "d", first.state.uid.__eq__)
    assert of_first is not None, "what was shared counts as the last one's"
    assert set(split_keys(of_first.keys)) == set(split_keys(gone)) - set(split_keys(shared))
    assert planned(index) == set(split_keys(parents)) | set(split_keys(childs))


def one_version(keys: bytes) -> ContextState:
    return ContextState(
        uid="u",
        key=ContextKey("t", "c"),
        namespace=NAMESPACES[0],
        rung=IdentityRung.NEW,
        versions={0: Version(0, ROOT, 0, "user", b"", keys=keys)},
    )


def moment(seconds: int) -> CallArrived:
    return CallArrived(at_ns=seconds * SECOND, call_id="c", attempt=1, kept=ROOT)


def test_a_chunk_that_died_twice_is_remembered_from_its_second_death():
    keys = chain_of((0, 1, 0), 0, crowded=False)
    live, dead = one_version(keys), replace(one_version(keys), versions={})
    index = ChunkIndex()
    index.apply(moment(1), None, live)
    index.apply(moment(2), live, dead)
    index.apply(moment(100), dead, live)
    index.apply(moment(101), live, dead)
    index.apply(moment(123), dead, dead)
    assert index.stats(NAMESPACES[0]).dead == 3
    index.apply(moment(221), dead, dead)
    assert index.stats(NAMESPACES[0]).dead == 0


def test_a_demoted_chunk_that_lived_again_may_be_demoted_again():
    keys = chain_of((0, 1), 0, crowded=False)
    live, dead = one_version(keys), replace(one_version(keys), versions={})
    namespace = NAMESPACES[0]
    index = ChunkIndex()
    index.apply(moment(1), None, live)
    index.apply(
        ChunksConfirmed(at_ns=SECOND, namespace=namespace, keys=keys, tiers=(Tier.L1,), stored=True),
        None,
        None,
    )
    index.apply(UntrackedForwarded(at_ns=SECOND, namespace=namespace, reason="bypass"), None, None)
    index.apply(moment(2), live, dead)
    for number, outcome in enumerate((DirectiveOutcome.APPLIED, DirectiveOutcome.UNSUPPORTED)):
        demote = plan_reclaim(index, namespace, 3 * SECOND, 1, f"d{number}", anybody)
        assert isinstance(demote, Demote)
        index.apply(DirectiveProposed(at_ns=3 * SECOND, directive=demote, as_of=1), None, None)
        settled = DirectiveSettled(
            at_ns=3 * SECOND,
            directive_id=demote.directive_id,
            namespace=namespace,
            result=DirectiveResult(outcome=outcome),
        )
        index.apply(settled, None, None)
        assert plan_reclaim(index, namespace, 3 * SECOND, 1, "again", anybody) is None
        index.apply(moment(3), dead, live)
        index.apply(moment(3), live, dead)
