"""What the chunk index knows beyond the contexts' states: taken out of one index, put into another.

References and keys of live chunks follow from the states, so of a live run only the rest is written down: in
the order in which a walk over the states, versions and chunks first meets the runs. Whoever walks the same
states in the same order knows which chunks are meant. Dead runs belong to no state and are written down
whole.

This is the other half of `ChunkIndex` and reads its books.
"""

from collections.abc import Iterable, Iterator, Mapping
from typing import TypeAlias

import msgspec

from lifecycle.core.directives import Demote, Reclaim
from lifecycle.core.ids import KEY_BYTES, Namespace, split_keys
from lifecycle.core.state import ContextState
from lifecycle.projections.chunk_index import ChunkIndex
from lifecycle.projections.chunk_runs import Run
from lifecycle.projections.recurrence import RecurrenceFacts

RUNS_PER_STEP = 1_000
"""Runs between two breaths: about a millisecond."""

RunFacts: TypeAlias = tuple[bytes, bytes, int, int, int, str]
"""Keys, flags, references, dead since, retry at, owner of one run, as `Run` has them."""


class BookFacts(msgspec.Struct):
    """One namespace's books: `live` and `dead` runs in any order."""

    namespace: Namespace
    last_untracked_ns: int | None
    unknown_confirmed: int
    directives: list[Reclaim | Demote]
    unmapped: list[str]
    unknown_flights: dict[str, int]
    live: list[RunFacts]
    dead: list[RunFacts]
    recurrence: RecurrenceFacts = RecurrenceFacts()


class IndexFacts(msgspec.Struct):
    """All books, event time, and the dead chunks that are forgotten when they stay unproven."""

    now_ns: int
    unproven: list[tuple[int, Namespace, bytes]]
    books: list[BookFacts]


class LiveRun(msgspec.Struct, frozen=True, array_like=True):
    """A live run, the next one that a walk meets; one flag byte stands for all `num_chunks` if they agree."""

    num_chunks: int
    flags: bytes
    refs: int
    retry_ns: int
    owner: int


class DeadRunFacts(msgspec.Struct, frozen=True, array_like=True):
    """A dead run of any place; `owner` as in `LiveRun`."""

    keys: bytes
    flags: bytes
    dead_ns: int
    retry_ns: int
    owner: int


class Mismatch(Exception):
    """The facts do not fit the states that they were to be put on."""


def taken(index: ChunkIndex) -> Iterator[IndexFacts | None]:
    """The facts of an index that does not change meanwhile; yields None to let others run, then the facts."""
    facts = IndexFacts(index._now_ns, list(index._unproven), [])
    for namespace in index.namespaces():
        books = index._books[namespace]
        live: list[RunFacts] = []
        dead: list[RunFacts] = []
        for number, run in enumerate(books.runs.runs(), start=1):
            (live if run.refs else dead).append(
                (run.keys, run.flags, run.refs, run.dead_ns, run.retry_ns, run.owner)
            )
            if number % RUNS_PER_STEP == 0:
                yield None
        facts.books.append(
            BookFacts(
                namespace,
                books.last_untracked_ns,
                books.unknown_confirmed,
                [books.directives[i] for i in sorted(books.directives)],
                sorted(books.unmapped),
                dict(sorted(books.unknown_flights.items())),
                live,
                dead,
                books.recurrence.facts(),
            )
        )
        yield None
    yield facts


def dead_owners(index: ChunkIndex) -> set[str]:
    """Contexts that let go last of chunks which a plan may still ask for."""
    shelves = (shelf for b in index._books.values() for shelf in (b.runs.fresh, b.runs.demoted))
    return {run.owner for shelf in shelves for run in shelf}


def live_in_order(
    facts: IndexFacts, states: Iterable[ContextState], owners: dict[str, int]
) -> Iterator[LiveRun | None]:
    """The live runs as a walk over the states meets them; None in between to let others run.

    New owners are numbered and added to `owners`. Raises `Mismatch`.
    """
    # Filed by the first key, in many small mappings: one that grew to a million entries would stop everybody
    # each time it grew. A run that was met is its length from then on.
    firsts: dict[Namespace, list[dict[bytes, RunFacts | int]]] = {}
    for books in facts.books:
        found = firsts[books.namespace] = [{} for _ in range(256)]
        for number, run in enumerate(books.live, start=1):
            found[run[0][0]][run[0][:KEY_BYTES]] = run
            if number % RUNS_PER_STEP == 0:
                yield None
    num_met = 0
    for state in states:
        found = firsts.get(state.namespace.cache) or [{}] * 256
        for version in state.versions.values():
            at = 0
            while at < len(version.keys):
                first = version.keys[at : at + KEY_BYTES]
                known = found[first[0]].get(first)
                if known is None:
                    raise Mismatch(f"context {state.uid} refers to a chunk that the index does not know")
                if isinstance(known, int):
                    at += known
                    continue
                keys, flags, refs, _, retry_ns, owner = known
                found[first[0]][first] = len(keys)
                at += len(keys)
                packed = flags[:1] if flags.count(flags[0]) == len(flags) else flags
                yield LiveRun(len(flags), packed, refs, retry_ns, owners.setdefault(owner, len(owners)))
                num_met += 1
                if num_met % RUNS_PER_STEP == 0:
                    yield None
    if num_met != sum(len(books.live) for books in facts.books):
        raise Mismatch("the index refers to chunks of contexts that are not there")


def dead_in_order(books: BookFacts, owners: dict[str, int]) -> Iterator[DeadRunFacts]:
    """The dead runs of one namespace, with new owners added to `owners`."""
    for keys, flags, _, dead_ns, retry_ns, owner in books.dead:
        yield DeadRunFacts(keys, flags, dead_ns, retry_ns, owners.setdefault(owner, len(owners)))


def put(
    index: ChunkIndex,
    facts: IndexFacts,
    states: Mapping[str, ContextState],
    live: Iterator[LiveRun],
    dead: Mapping[Namespace, Iterable[DeadRunFacts]],
    owners: list[str],
) -> None:
    """Give an empty index the facts; `states` in the order of the walk that `live` came from.

    Raises `Mismatch` and leaves the index half filled.
    """
    index._now_ns = facts.now_ns
    index._unproven.extend(facts.unproven)
    for told in facts.books:
        books = index._of(told.namespace)
        books.last_untracked_ns = told.last_untracked_ns
        books.unknown_confirmed = told.unknown_confirmed
        books.directives = {d.directive_id: d for d in told.directives}
        for directive in told.directives:
            books.asked.update(split_keys(directive.keys))
        books.unmapped = set(told.unmapped)
        books.unknown_flights = dict(told.unknown_flights)
        books.recurrence.put(told.recurrence)
        for run in dead.get(told.namespace, ()):
            books.runs.restore(
                Run(run.keys, run.flags, 0, run.dead_ns, run.retry_ns, _owner(owners, run.owner))
            )
    for state in states.values():
        runs = index._of(state.namespace).runs if state.versions else None
        for version in state.versions.values():
            at = 0
            while runs is not None and at < len(version.keys):
                found = runs.find(version.keys[at : at + KEY_BYTES])
                if found is None:
                    known = _next(live, version.keys, at, owners)
                    runs.restore(known)
                elif found[1] or not version.keys.startswith(found[0].keys, at) or not found[0].refs:
                    raise Mismatch(f"runs of context {state.uid} are cut otherwise than its chunks")
                else:
                    known = found[0]
                at += len(known.keys)
    if next(live, None) is not None:
        raise Mismatch("there are facts about chunks that no context refers to")


def _next(live: Iterator[LiveRun], keys: bytes, at: int, owners: list[str]) -> Run:
    run = next(live, None)
    if run is None or not 0 < run.num_chunks * KEY_BYTES <= len(keys) - at or run.refs <= 0:
        raise Mismatch("facts about the chunks of a context are missing")
    stop = at + run.num_chunks * KEY_BYTES
    # The very bytes of the version where the run is all of it: an unshared run costs no copy of its keys.
    part = keys if stop - at == len(keys) else keys[at:stop]
    flags = run.flags * run.num_chunks if len(run.flags) == 1 else run.flags
    if len(flags) != run.num_chunks:
        raise Mismatch("flags of a run are missing")
    return Run(part, flags, run.refs, 0, run.retry_ns, _owner(owners, run.owner))


def _owner(owners: list[str], number: int) -> str:
    if not 0 <= number < len(owners):
        raise Mismatch("an owner is missing")
    return owners[number]
