"""What an index knows beyond the states goes from one index to another, or says that it does not fit."""

from collections.abc import Mapping

import pytest
from msgspec.structs import replace

from lifecycle.core.directives import DirectiveResult, Reclaim
from lifecycle.core.events import CallArrived, ChunksConfirmed, DirectiveProposed, DirectiveSettled
from lifecycle.core.ids import KEY_BYTES, ContextKey, Namespace
from lifecycle.core.state import ROOT, ContextState, Version
from lifecycle.projections.chunk_index import ChunkIndex
from lifecycle.projections.index_facts import (
    DeadRunFacts,
    IndexFacts,
    LiveRun,
    Mismatch,
    dead_in_order,
    dead_owners,
    live_in_order,
    put,
    taken,
)
from lifecycle.vocabulary import DirectiveOutcome, IdentityRung, Tier

NAMESPACE = Namespace("m")


def keys(*names: int) -> bytes:
    return b"".join(bytes([n]) * KEY_BYTES for n in names)


def state(uid: str, *runs: bytes) -> ContextState:
    return ContextState(
        uid=uid,
        key=ContextKey("t", uid),
        namespace=NAMESPACE,
        rung=IdentityRung.NEW,
        versions={n: Version(n, n - 1, n, "user", b"", keys=run) for n, run in enumerate(runs)},
    )


EVENT = CallArrived(at_ns=1, call_id="c", attempt=1, kept=ROOT)


def indexed(*states: ContextState) -> ChunkIndex:
    index = ChunkIndex()
    for each in states:
        index.apply(EVENT, None, each)
    return index


def facts_of(index: ChunkIndex) -> IndexFacts:
    (facts,) = (f for f in taken(index) if f is not None)
    return facts


def moved(index: ChunkIndex, states: Mapping[str, ContextState]) -> ChunkIndex:
    """Another index with the same facts, by way of what would be written down."""
    facts, owners = facts_of(index), dict[str, int]()
    live = [run for run in live_in_order(facts, states.values(), owners) if run is not None]
    dead = {books.namespace: list(dead_in_order(books, owners)) for books in facts.books}
    other = ChunkIndex()
    put(other, facts, states, iter(live), dead, list(owners))
    return other


def test_shared_and_cut_runs_and_the_dead_come_over() -> None:
    one, two = state("one", keys(1, 2), keys(3, 4, 5)), state("two", keys(1, 2), keys(3, 9))
    gone = state("gone", keys(1, 2), keys(7, 8))
    index = indexed(one, two, gone)
    shown = ChunksConfirmed(at_ns=2, namespace=NAMESPACE, keys=keys(1, 4, 7), tiers=(Tier.L1,), stored=True)
    index.apply(shown, None, None)
    index.apply(replace(EVENT, at_ns=3), gone, replace(gone, versions={}))
    other = moved(index, {"one": one, "two": two})
    assert other.digest() == index.digest()
    assert other.stats(NAMESPACE) == index.stats(NAMESPACE)
    assert dead_owners(other) == dead_owners(index) == {"gone"}
    assert other.references(NAMESPACE, keys(1)) == 2


def test_what_was_asked_for_and_what_waits_for_another_try_come_over() -> None:
    """A directive names a chunk that left the books and comes back, and a live one that it did not free."""
    one, late = state("one", keys(1, 2)), state("late", keys(5))
    index = indexed(one)
    directives = [
        Reclaim(directive_id=name, namespace=NAMESPACE, reason="r", keys=run)
        for name, run in (("failed", keys(1)), ("open", keys(5)))
    ]
    for directive in directives:
        index.apply(DirectiveProposed(at_ns=2, directive=directive, as_of=1), None, None)
    failed = DirectiveResult(outcome=DirectiveOutcome.FAILED)
    settled = DirectiveSettled(at_ns=3, directive_id="failed", namespace=NAMESPACE, result=failed)
    index.apply(settled, None, None)
    other = moved(index, {"one": one})
    assert other.digest() == index.digest()
    told = index.describe(NAMESPACE, keys(1))
    assert told is not None
    assert told.retry_ns > 0
    assert told == other.describe(NAMESPACE, keys(1))
    for each in (index, other):
        each.apply(replace(EVENT, at_ns=4), None, late)
    told = other.describe(NAMESPACE, keys(5))
    assert told is not None
    assert told.flags == ("PENDING",)
    assert other.digest() == index.digest()


def test_a_whole_run_keeps_the_bytes_of_its_version() -> None:
    one = state("one", keys(1, 2))
    other = moved(indexed(one), {"one": one})
    (run,) = facts_of(other).books[0].live
    assert run[0] is one.versions[0].keys


@pytest.mark.parametrize("lacking", ["a context", "a chunk"])
def test_states_that_are_not_the_indexs_are_found_when_it_is_written_down(lacking: str) -> None:
    one, two = state("one", keys(1, 2)), state("two", keys(3))
    states = [one] if lacking == "a context" else [one, two, state("three", keys(4))]
    with pytest.raises(Mismatch):
        list(live_in_order(facts_of(indexed(one, two)), states, {}))


@pytest.mark.parametrize(
    "live",
    [
        [],
        [LiveRun(2, b"\0", 1, 0, 0)],
        [LiveRun(3, b"\0", 1, 0, 0), LiveRun(1, b"\0", 1, 0, 0)],
        [LiveRun(4, b"\0", 1, 0, 0)],
        [LiveRun(3, b"\0", 0, 0, 0)],
        [LiveRun(0, b"", 1, 0, 0)],
        [LiveRun(3, b"\0\0", 1, 0, 0)],
        [LiveRun(3, b"\0", 1, 0, 7)],
    ],
)
def test_facts_that_do_not_fit_the_states_are_refused(live: list[LiveRun]) -> None:
    one = state("one", keys(1, 2, 3))
    facts = facts_of(indexed(one))
    with pytest.raises(Mismatch):
        put(ChunkIndex(), facts, {"one": one}, iter(live), {}, ["one"])


def test_a_chunk_that_is_told_dead_but_referred_to_is_refused() -> None:
    one = state("one", keys(1))
    dead = {NAMESPACE: [DeadRunFacts(keys(1), b"\0", 1, 0, 0)]}
    with pytest.raises(Mismatch):
        put(ChunkIndex(), facts_of(indexed(one)), {"one": one}, iter(()), dead, ["one"])
