"""What follows from a call after its arrival: mapping, first token, generation, end."""

from itertools import pairwise

from lifecycle.core.decision import Decision
from lifecycle.core.events import (
    BranchAdvanced,
    BranchDoubted,
    BranchExpired,
    BranchOpened,
    BranchRestored,
    CallEnded,
    CallMapped,
    ContextClosed,
    GenerationMapped,
    PrefillDone,
    TrackingGapHealed,
)
from lifecycle.core.ids import KEY_BYTES
from lifecycle.core.observations import CallEnding, CallMapping, FirstToken, GenerationKeys
from lifecycle.core.pins import follow_pins, pin_from_call
from lifecycle.core.prefix_loss import diverged, prompt_left
from lifecycle.core.state import ROOT, Branch, ContextState, Flight, Version, chain, live_ids, path
from lifecycle.core.tree import tail_of, tail_tag
from lifecycle.errors import InvalidObservation
from lifecycle.vocabulary import CallEnd, MappingKind, WaitKind

MAX_BRANCHES = 64
"""Branches of a context with a tracking gap, above which the doubted ones expire all the same."""

BRANCH_LIMIT_REASON = "branch limit: the context has as many as it may"


def mapped(decision: Decision, observation: CallMapping) -> None:
    """The prompt's tokens are known, or why not. Once per attempt, during the call or after it."""
    state = decision.state
    flight = state.flight(observation.call_id, observation.attempt)
    tail = tail_of(state, observation.call_id, observation.attempt)
    if tail is None or tail.mapped or (flight is not None and flight.mapping_known):
        return
    mapping = observation.mapping
    left = prompt_left(state, flight, mapping) if flight is not None else ()
    if mapping.kind is MappingKind.NONE:
        if flight is None:
            return
        decision.emit(
            CallMapped(
                at_ns=decision.at_ns,
                call_id=observation.call_id,
                attempt=observation.attempt,
                kind=mapping.kind,
                reason=mapping.reason or "unknown",
            )
        )
    else:
        decision.emit(_mapped_event(decision, observation, tail))
        if decision.state.gap:
            decision.emit(TrackingGapHealed(at_ns=decision.at_ns))
    for each in left:
        decision.emit(diverged(decision.at_ns, observation, each))
    flight = decision.state.flight(observation.call_id, observation.attempt)
    if flight is None:
        return
    if flight.pins and flight.call_id not in state.pinned_calls:
        pin_from_call(decision, flight, observation)
    if flight.prefilled and not flight.stale and decision.state.open and not decision.state.one_off:
        follow_pins(decision, flight)


def _mapped_event(decision: Decision, observation: CallMapping, tail: Version) -> CallMapped:
    mapping = observation.mapping
    steps = path(decision.state.versions, tail.id)
    ends = (mapping.head_end, *mapping.message_ends, mapping.num_tokens)
    if len(ends) != len(steps):
        raise InvalidObservation(f"mapping of {len(ends) - 2} messages for a list of {len(steps) - 2}")
    if any(a > b for a, b in pairwise(ends)):
        raise InvalidObservation("token ends of a mapping must not decrease")
    size = mapping.chunk_size
    if size <= 0 or len(mapping.chunk_keys) != mapping.num_tokens // size * KEY_BYTES:
        raise InvalidObservation("a mapping carries one key for each full chunk")
    first = 0
    start = 0
    for version, end in zip(steps, ends, strict=True):
        run = mapping.chunk_keys[start // size * KEY_BYTES : end // size * KEY_BYTES]
        if not version.mapped or version.end != end or version.start != start or version.keys != run:
            break
        first += 1
        start = end
    first_chunk = start // size
    return CallMapped(
        at_ns=decision.at_ns,
        call_id=observation.call_id,
        attempt=observation.attempt,
        kind=mapping.kind,
        num_tokens=mapping.num_tokens,
        tools_end=mapping.tools_end,
        chunk_size=size,
        first_changed=first,
        ends=ends[first:],
        first_chunk=first_chunk,
        keys=mapping.chunk_keys[first_chunk * KEY_BYTES :],
        bytes_per_token=observation.bytes_per_token,
    )


def first_token(decision: Decision, observation: FirstToken) -> None:
    """The prompt is computed: the call's list becomes the context's."""
    flight = decision.state.flight(observation.call_id, observation.attempt)
    if flight is not None and not flight.prefilled:
        _commit(decision, flight)
        _expire_beyond(decision, flight, observation.max_branches)


def end(decision: Decision, observation: CallEnding) -> None:
    """The call is over. A completed one that showed no first token (not streamed) computed its prompt too.

    One that computed nothing does not close its context: it will be tried again. Nor does it open a closed
    one: a client that hung up may be overtaken by its own farewell.
    """
    flight = decision.state.flight(observation.call_id, observation.attempt)
    if flight is None:
        return
    completed = observation.end is CallEnd.COMPLETED
    if completed and not flight.prefilled:
        _commit(decision, flight)
        _expire_beyond(decision, flight, observation.max_branches)
    said = flight.wait is not None
    decision.emit(
        CallEnded(
            at_ns=decision.at_ns,
            call_id=flight.call_id,
            attempt=flight.attempt,
            end=observation.end,
            wait=flight.wait or observation.wait or WaitKind.UNKNOWN,
            tool=flight.tool if said else observation.tool,
            eta=flight.eta,
            finish_reason=observation.finish_reason,
            prompt_tokens=observation.prompt_tokens,
            cached_tokens=observation.cached_tokens,
            output_tokens=observation.output_tokens,
            detail=observation.detail,
            answers=observation.answers,
            backend=observation.backend,
        )
    )
    state = decision.state
    others = any(f.call_id == flight.call_id for f in state.flights)
    computed = completed or flight.prefilled
    closes = flight.closes and computed
    if state.open and not others and (closes or state.one_off):
        reason = "the call said so" if flight.closes else "a one-off ends with its call"
        decision.emit(ContextClosed(at_ns=decision.at_ns, reason=reason))
    elif flight.reopened and state.open and not (computed or state.flights or state.branches):
        decision.emit(ContextClosed(at_ns=decision.at_ns, reason=flight.reopened))


def generated(decision: Decision, observation: GenerationKeys) -> None:
    """Generated tokens filled chunks: held behind a live tail, else dead on arrival."""
    state = decision.state
    tail = tail_of(state, observation.call_id, observation.attempt)
    if tail is not None and not tail.mapped:
        return
    size = observation.chunk_size
    if tail is None:
        decision.emit(
            GenerationMapped(
                at_ns=decision.at_ns,
                call_id=observation.call_id,
                attempt=observation.attempt,
                choice=observation.choice,
                parent=ROOT,
                end=observation.num_tokens,
                first_chunk=0,
                keys=observation.chain,
            )
        )
        return
    first_chunk = tail.end // size
    prefix = observation.chain[: first_chunk * KEY_BYTES]
    if observation.num_tokens < tail.end or prefix != chain(state.versions, tail.id):
        raise InvalidObservation("the generation's chain does not continue the call's prompt")
    keys = observation.chain[first_chunk * KEY_BYTES :]
    tag = tail_tag(observation.call_id, observation.attempt, observation.choice)
    if any(
        v.digest == tag and v.parent == tail.id and v.end == observation.num_tokens and v.keys == keys
        for v in state.versions.values()
    ):
        return
    decision.emit(
        GenerationMapped(
            at_ns=decision.at_ns,
            call_id=observation.call_id,
            attempt=observation.attempt,
            choice=observation.choice,
            parent=tail.id,
            end=observation.num_tokens,
            first_chunk=first_chunk,
            keys=keys,
        )
    )


def _commit(decision: Decision, flight: Flight) -> None:
    """The prompt is computed: move, open, doubt, restore and expire branches.

    A list that goes on with a branch advances it. One that diverges while another call is in flight opens a
    branch; alone, it is an undeclared edit, and the branch it left becomes doubtful. What was doubtful before
    this call came expires when a branch grows.
    """
    decision.emit(PrefillDone(at_ns=decision.at_ns, call_id=flight.call_id, attempt=flight.attempt))
    state = decision.state
    current = state.flight(flight.call_id, flight.attempt)
    if current is None or not state.open or state.one_off:
        return
    flight = current
    if flight.stale:
        if not state.branches and flight.cut != ROOT:
            _open(decision, flight)
        return
    branch = _gone_on_with(state, flight)
    if branch is not None:
        _advance(decision, flight, branch)
    else:
        left = state.branch(flight.branch)
        if left is None or left.doubted_ns:
            left = state.current_branch()
        _open(decision, flight)
        if left is not None and not flight.concurrent and not _overlaps(decision.state, left, flight):
            _doubt(decision, left, "the next list left it")
    follow_pins(decision, flight)


def _gone_on_with(state: ContextState, flight: Flight) -> Branch | None:
    """The branch whose whole list lies on the flight's: the one it continued on arrival, else the longest."""
    on_path = {v.id for v in path(state.versions, flight.tip)}
    branch = state.branch(flight.branch)
    if branch is not None and branch.tip in on_path:
        return branch
    return max(
        (b for b in state.branches if b.tip in on_path),
        key=lambda b: (state.versions[b.tip].index, not b.doubted_ns, b.id),
        default=None,
    )


def _overlaps(state: ContextState, branch: Branch, flight: Flight) -> bool:
    """Whether a call on the branch is, or was, in flight together with this one: then both go on."""
    others = (f for f in state.flights if (f.call_id, f.attempt) != (flight.call_id, flight.attempt))
    return branch.since_ns > flight.arrived_ns or branch.tip in live_ids(
        state.versions, (f.tip for f in others)
    )


def _open(decision: Decision, flight: Flight) -> None:
    decision.emit(
        BranchOpened(
            at_ns=decision.at_ns,
            branch=decision.state.next_branch,
            call_id=flight.call_id,
            attempt=flight.attempt,
        )
    )


def _advance(decision: Decision, flight: Flight, branch: Branch) -> None:
    grows = branch.tip != flight.tip
    returns = bool(branch.doubted_ns)
    if grows:
        _expire_doubted(decision, flight, branch)
    if returns:
        decision.emit(BranchRestored(at_ns=decision.at_ns, branch=branch.id))
    unlike = (
        not _reproduced(decision.state, branch, flight)
        if grows
        else _resampled(decision.state, branch, flight)
    )
    leftover = decision.state.next_branch if unlike else -1
    decision.emit(
        BranchAdvanced(
            at_ns=decision.at_ns,
            branch=branch.id,
            call_id=flight.call_id,
            attempt=flight.attempt,
            leftover=leftover,
        )
    )
    if grows or returns:
        for other in decision.state.branches:
            if other.id == branch.id or other.doubted_ns or _overlaps(decision.state, other, flight):
                continue
            _doubt(decision, other, "another branch went on")


def _doubt(decision: Decision, branch: Branch, reason: str) -> None:
    if not branch.doubted_ns:
        decision.emit(BranchDoubted(at_ns=decision.at_ns, branch=branch.id, reason=reason))


def _expire_doubted(decision: Decision, flight: Flight, branch: Branch) -> None:
    """While there is a tracking gap we may have missed something: nothing expires below `MAX_BRANCHES`."""
    if decision.state.gap and len(decision.state.branches) < MAX_BRANCHES:
        return
    for other in decision.state.branches:
        if other.id != branch.id and 0 < other.doubted_ns <= flight.arrived_ns:
            decision.emit(
                BranchExpired(at_ns=decision.at_ns, branch=other.id, reason="the context went on without it")
            )


def _expire_beyond(decision: Decision, flight: Flight, limit: int | None) -> None:
    """Expire branches above the limit: the doubted first, then the one that was silent longest.

    The one that just went on stays, and so do those that calls are on.
    """
    while limit is not None and len(decision.state.branches) > limit:
        state = decision.state
        in_use = live_ids(state.versions, (flight.tip, *(f.tip for f in state.flights)))
        spare = [b for b in state.branches if b.tip not in in_use]
        if not spare:
            return
        silent = min(spare, key=lambda b: (not b.doubted_ns, b.since_ns, b.id))
        decision.emit(BranchExpired(at_ns=decision.at_ns, branch=silent.id, reason=BRANCH_LIMIT_REASON))


def _reproduced(state: ContextState, branch: Branch, flight: Flight) -> bool:
    """Whether everything the branch had generated lies on the flight's chain, token for token."""
    if not branch.tails:
        return True
    tail = state.versions[flight.tail]
    whole = chain(state.versions, flight.tail)
    return tail.mapped and all(
        state.versions[t].mapped and whole.startswith(chain(state.versions, t)) for t in branch.tails
    )


def _resampled(state: ContextState, branch: Branch, flight: Flight) -> bool:
    """Whether another call, over before this one came, had generated behind the very same list."""
    ours = f"{flight.call_id}\0".encode()
    return branch.since_ns <= flight.arrived_ns and any(
        not state.versions[t].digest.startswith(ours) for t in branch.tails
    )
