"""The plan's rules, each on arbitrary books, and on contexts made by real events."""

import dataclasses
from collections import Counter
from dataclasses import dataclass, field
from itertools import count

from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from lifecycle.core.directives import Demote, Pin, Reclaim, Unpin
from lifecycle.core.events import (
    BranchOpened,
    CallArrived,
    CallEnded,
    CallMapped,
    ContextCreated,
    PrefillDone,
)
from lifecycle.core.evolve import evolve
from lifecycle.core.ids import KEY_BYTES, ContextKey, Namespace, split_keys
from lifecycle.core.observations import MessageFact
from lifecycle.core.plan import (
    MAX_KEYS,
    UNKNOWN_HOLD_NS,
    UNTRACKED_RECENT_NS,
    ChunkFlag,
    plan_admission,
    plan_pins,
    plan_reclaim,
)
from lifecycle.core.state import ROOT, ContextState, PinHold, Version, chain, path
from lifecycle.vocabulary import CallEnd, IdentityRung, MappingKind

NS = Namespace("m")
NOW = 10**18


@dataclass
class Run:
    keys: bytes
    flags: bytes
    dead_ns: int = 1
    retry_ns: int = 0
    owner: str = "ours"


@dataclass
class Books:
    """A hand-written `ReclaimView`."""

    runs: list[Run] = field(default_factory=list)
    unknown_ns: int | None = None
    unmapped: list[str] = field(default_factory=list)
    untracked_ns: int | None = None

    def dead_runs(self, namespace, *, demoted):
        assert namespace == NS
        return self.runs

    def oldest_unknown_ns(self, namespace):
        return self.unknown_ns

    def unmapped_contexts(self, namespace):
        return self.unmapped

    def last_untracked_ns(self, namespace):
        return self.untracked_ns


def key(number: int) -> bytes:
    return number.to_bytes(KEY_BYTES, "big")


@st.composite
def dead_runs(draw):
    numbers = count()
    runs = []
    for flags in draw(st.lists(st.lists(st.integers(0, 15), min_size=1, max_size=6), max_size=8)):
        keys = b"".join(key(next(numbers)) for _ in flags)
        dead_ns = draw(st.integers(1, 3))
        retry_ns = draw(st.sampled_from([0, NOW, NOW + 1]))
        runs.append(Run(keys, bytes(flags), dead_ns, retry_ns))
    return runs


def reclaim(books: Books, now_ns: int = NOW):
    return plan_reclaim(books, NS, now_ns, 7, "d1", lambda owner: owner == "ours")


@given(dead_runs())
def test_only_what_is_proven_ours_and_not_asked_for_is_reclaimed(runs):
    wanted = [
        k
        for run in runs
        if run.retry_ns <= NOW
        for k, flags in zip(split_keys(run.keys), run.flags, strict=True)
        if flags & ChunkFlag.VERIFIED and flags & ChunkFlag.OURS and not flags & ChunkFlag.PENDING
    ]
    directive = reclaim(Books(runs))
    if not wanted:
        assert directive is None
        return
    assert isinstance(directive, Reclaim)
    assert Counter(split_keys(directive.keys)) == Counter(wanted)
    assert str(len(wanted)) in directive.reason
    assert "7" in directive.reason


@given(dead_runs(), st.integers(1, 4))
def test_a_call_of_unknown_chain_protects_what_was_alive_when_it_came(runs, unknown_ns):
    before = [run for run in runs if run.dead_ns < unknown_ns]
    assert reclaim(Books(runs, unknown_ns)) == reclaim(Books(before))
    soon = min((run.dead_ns for run in runs), default=1) + UNKNOWN_HOLD_NS
    assert reclaim(Books([dataclasses.replace(r, retry_ns=0) for r in runs], unknown_ns), soon) is None


@given(dead_runs(), dead_runs())
def test_chunks_of_owners_that_are_not_wanted_are_left_alone(ours, theirs):
    foreign = [dataclasses.replace(run, owner="theirs") for run in theirs]
    assert reclaim(Books([*foreign, *ours])) == reclaim(Books(ours))


@given(
    dead_runs(),
    st.lists(st.sampled_from(["u1", "u2"]), unique=True),
    st.one_of(st.none(), st.sampled_from([-5, 0, UNTRACKED_RECENT_NS - 1, UNTRACKED_RECENT_NS])),
)
def test_demoted_instead_while_others_may_use_it(runs, unmapped, age_ns):
    books = Books(runs, None, unmapped, None if age_ns is None else NOW - age_ns)
    directive = reclaim(books)
    recent = age_ns is not None and age_ns < UNTRACKED_RECENT_NS
    if directive is None:
        return
    assert isinstance(directive, Demote if unmapped or recent else Reclaim)
    if isinstance(directive, Demote):
        flags = {k: f for r in runs for k, f in zip(split_keys(r.keys), r.flags, strict=True)}
        assert not any(flags[k] & ChunkFlag.DEMOTED for k in split_keys(directive.keys))
        assert ("untracked" in directive.reason) == (not unmapped)
        assert all(uid in directive.reason for uid in unmapped[:1] if len(unmapped) == 1)


@given(dead_runs(), st.randoms(use_true_random=False))
def test_the_order_of_the_books_does_not_show(runs, random):
    shuffled = random.sample(runs, len(runs))
    assert reclaim(Books(runs)) == reclaim(Books(shuffled))


def test_a_directive_names_no_more_than_the_cache_takes():
    ripe = bytes([ChunkFlag.VERIFIED | ChunkFlag.OURS])
    old = Run(b"".join(key(i) for i in range(MAX_KEYS // 2)), ripe * (MAX_KEYS // 2), dead_ns=1)
    new = Run(b"".join(key(i + MAX_KEYS) for i in range(MAX_KEYS)), ripe * MAX_KEYS, dead_ns=2)
    directive = reclaim(Books([new, old]))
    assert isinstance(directive, Reclaim)
    assert len(directive.keys) == MAX_KEYS * KEY_BYTES
    assert directive.keys.startswith(old.keys), "longest dead first"


# -- admission --------------------------------------------------------------------------------------------

SIZE = 4


def created(uid: str, **fields) -> ContextCreated:
    return ContextCreated(
        at_ns=1, uid=uid, tenant="t", context_id=uid, namespace=NS, rung=IdentityRung.EXPLICIT, **fields
    )


def called(state: ContextState, messages: int, *, kept: int = ROOT, name: str = "c") -> ContextState:
    facts = tuple(MessageFact(f"{name}{i}".encode(), "user") for i in range(messages))
    arrived = CallArrived(
        at_ns=2, call_id=name, attempt=1, kept=kept, head=b"h", messages=facts, branch=0 if kept >= 0 else -1
    )
    return evolve(state, arrived)


def mapped(state: ContextState, tokens_each: list[int], first: int, *, name: str = "c") -> ContextState:
    """Give the call's path, from position `first` on, so many tokens each."""
    flight = state.flight(name, 1)
    assert flight is not None
    start = path(state.versions, flight.tail)[first - 1].end if first else 0
    ends = []
    for tokens in tokens_each:
        start += tokens
        ends.append(start)
    keys = b"".join(name.encode().ljust(28, b".") + i.to_bytes(4, "big") for i in range(start // SIZE))
    event = CallMapped(
        at_ns=3,
        call_id=name,
        attempt=1,
        kind=MappingKind.EXACT,
        num_tokens=start,
        chunk_size=SIZE,
        first_changed=first,
        ends=tuple(ends),
        first_chunk=0,
        keys=keys,
    )
    return evolve(state, event)


@given(st.booleans())
def test_a_spawned_one_off_stores_nothing_even_before_it_is_mapped(is_mapped):
    state = called(evolve(None, created("u", one_off=True, parent_uid="p")), 2)
    if is_mapped:
        state = mapped(state, [9, 9, 9, 3], 0)
    directive = plan_admission(state, "c", lambda keys: len(keys) // KEY_BYTES, "d")
    assert directive is not None
    assert (directive.call_id, directive.bypass_from_token) == ("c", 0)


def test_a_retry_of_a_spawned_one_off_stores_nothing_either():
    """Its own first attempt is no parent of it."""
    state = mapped(called(evolve(None, created("u", one_off=True)), 2), [9, 9, 9, 3], 0)
    opened = evolve(state, BranchOpened(at_ns=4, branch=0, call_id="c", attempt=1))
    retry = CallArrived(at_ns=5, call_id="c", attempt=2, kept=opened.branches[0].tip, branch=0)
    directive = plan_admission(evolve(opened, retry), "c", lambda keys: len(keys) // KEY_BYTES, "d")
    assert directive is not None
    assert directive.bypass_from_token == 0


def test_a_context_that_stays_is_admitted():
    state = called(evolve(None, created("u")), 2)
    assert plan_admission(state, "c", lambda keys: 0, "d") is None
    one_off = called(evolve(None, created("u", one_off=True)), 2)
    assert plan_admission(one_off, "another call", lambda keys: 0, "d") is None


@given(
    st.lists(st.integers(1, 11), min_size=3, max_size=3),
    st.integers(0, 40),
    st.integers(1, 40),
)
def test_a_forked_one_off_may_touch_its_parents_proven_chunks_and_no_more(tokens, shown, own):
    parent = mapped(called(evolve(None, created("p")), 2, name="p"), [*tokens, 2], 0, name="p")
    tip = parent.flights[0].tip
    inherited = tuple(v for v in parent.versions.values() if v.role != "tail")
    fork = created("u", one_off=True, forked=True, inherited=inherited, inherited_tip=tip)
    state = mapped(called(evolve(None, fork), 1, kept=tip), [own, 2], 4 - 1)
    parents_chunks = chain(parent.versions, tip)
    asked: list[bytes] = []

    def verified(keys: bytes) -> int:
        asked.append(keys)
        return min(shown, len(keys) // KEY_BYTES)

    directive = plan_admission(state, "c", verified, "d")
    assert directive is not None
    assert asked == [parents_chunks]
    assert directive.bypass_from_token == SIZE * min(shown, len(parents_chunks) // KEY_BYTES)
    assert directive.bypass_from_token <= sum(tokens)
    done = evolve(state, PrefillDone(at_ns=4, call_id="c", attempt=1))
    ended = evolve(done, CallEnded(at_ns=5, call_id="c", attempt=1, end=CallEnd.COMPLETED))
    assert plan_admission(ended, "c", verified, "d") is None


# -- pins -------------------------------------------------------------------------------------------------


@st.composite
def pinned_states(draw, *, base: ContextState | None = None):
    """A chain of versions, some without whole chunks or not mapped yet, with pins on any of them."""
    versions = {}
    for number, chunks in enumerate(draw(st.lists(st.integers(0, 2), min_size=1, max_size=5))):
        run = b"".join(key(100 * number + 10 * chunks + i) for i in range(chunks))
        versions[number] = Version(number, number - 1, number, "user", b"", keys=run)
    names = draw(st.lists(st.sampled_from(["p1", "p2", "p3"]), unique=True))
    pins = tuple(
        PinHold(
            pin_id=name,
            tip=draw(st.sampled_from(sorted(versions))),
            index=0,
            message=b"",
            until_ns=draw(st.integers(1, 2)),
        )
        for name in names
    )
    state = ContextState(
        uid="u", key=ContextKey("t", "c"), namespace=NS, rung=IdentityRung.NEW, versions=versions, pins=pins
    )
    return draw(st.sampled_from([state, base])) if base else state


def holds(state: ContextState) -> dict[tuple[str, bytes], int]:
    found = {(p.pin_id, chain(state.versions, p.tip)): p.until_ns for p in state.pins}
    return {name: until for name, until in found.items() if name[1]}


def ids():
    return map("d{}".format, count()).__next__


@given(st.data())
def test_carrying_out_pins_turns_the_old_holds_into_the_new_ones(data):
    before = data.draw(pinned_states())
    after = data.draw(pinned_states(base=before))
    ledger = holds(before)
    kept = {k for _, keys in ledger for k in split_keys(keys)}
    kept &= {k for _, keys in holds(after) for k in split_keys(keys)}
    stays = {p.pin_id for p in before.pins} & {p.pin_id for p in after.pins}
    directives = plan_pins(before, after, ids())
    assert len({d.directive_id for d in directives}) == len(directives)
    for directive in directives:
        if isinstance(directive, Pin):
            ledger[(directive.pin_id, directive.keys)] = directive.lease_until_ns
        else:
            assert isinstance(directive, Unpin)
            del ledger[(directive.pin_id, directive.keys)]
        for pin_id in stays:
            old = {k for p, keys in holds(before) if p == pin_id for k in split_keys(keys)}
            new = {k for p, keys in holds(after) if p == pin_id for k in split_keys(keys)}
            now = {k for p, keys in ledger if p == pin_id for k in split_keys(keys)}
            assert old & new <= now, "a pin that moves never lets go of what it keeps"
    assert ledger == holds(after)


@given(pinned_states())
def test_an_event_that_is_not_about_pins_asks_for_nothing(state):
    assert plan_pins(state, replace(state, last_ns=5), ids()) == []
    assert {(p.pin_id, p.keys) for p in plan_pins(None, state, ids())} == set(holds(state))
