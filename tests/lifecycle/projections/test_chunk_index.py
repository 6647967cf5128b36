"""Chunks live as long as some context needs them, and what was dead once may live and die again."""

import pytest
from msgspec.structs import replace

from lifecycle.core.decide import decide, open_context
from lifecycle.core.directives import Demote, DirectiveResult, Reclaim
from lifecycle.core.events import (
    CallArrived,
    ChunksConfirmed,
    DirectiveProposed,
    DirectiveSettled,
    UntrackedForwarded,
)
from lifecycle.core.evolve import evolve
from lifecycle.core.ids import ContextKey, split_keys
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
from lifecycle.core.plan import plan_reclaim
from lifecycle.core.state import ROOT, ContextState, Version
from lifecycle.projections.chunk_index import ChunkIndex
from lifecycle.vocabulary import CallEnd, DirectiveOutcome, IdentityRung, MappingKind, Tier
from tests.lifecycle.projections.index_model import NAMESPACES, SECOND, chain_of, key_of


def anybody(owner: str) -> bool:
    return True


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
