"""The index against a model that recounts everything from scratch after every step."""

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from msgspec.structs import replace

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
from lifecycle.core.ids import ContextKey, Namespace, split_keys
from lifecycle.core.plan import ChunkFlag, plan_reclaim
from lifecycle.core.state import ROOT, ContextState, Flight, Version
from lifecycle.projections.chunk_index import ChunkIndex
from lifecycle.vocabulary import UNTRACKED_RECENT_SECONDS, DirectiveOutcome, IdentityRung, Tier
from tests.lifecycle.projections.index_model import DEPTH, NAMESPACES, PATHS, SECOND, Model, chain_of, key_of

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
            counts = self.model.references(namespace)
            for path in PATHS[1:]:
                key = key_of(path, crowded=self.crowded)
                assert self.index.references(namespace, key) == counts.get(key, 0)

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
