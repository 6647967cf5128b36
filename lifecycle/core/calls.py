"""What follows from a call: arrival, mapping, first token, generation, end."""

from itertools import pairwise

from lifecycle.core.decision import Decision
from lifecycle.core.events import (
    BranchAdvanced,
    BranchDoubted,
    BranchExpired,
    BranchOpened,
    BranchRestored,
    CallArrived,
    CallEnded,
    CallMapped,
    ContextClosed,
    DeclarationMismatched,
    GenerationMapped,
    PrefillDone,
    TrackingGapHealed,
)
from lifecycle.core.ids import KEY_BYTES
from lifecycle.core.message_diff import match_list
from lifecycle.core.observations import (
    CallArrival,
    CallEnding,
    CallMapping,
    FirstToken,
    GenerationKeys,
    PromptMapping,
)
from lifecycle.core.pins import follow_pins, pin_from_call
from lifecycle.core.state import ROOT, Branch, ContextState, Flight, Version, chain, live_ids, path
from lifecycle.core.tree import tail_tag
from lifecycle.errors import InvalidObservation
from lifecycle.vocabulary import CallEnd, MappingKind, WaitKind


def arrive(decision: Decision, call: CallArrival) -> None:
    """A call came: its versions are Active from now on.

    What it leaves behind is judged at its first token only, so that a call which never computes anything
    changes nothing.
    """
    state = decision.state
    if state.declared_length is not None and state.declared_length != len(call.messages):
        decision.emit(
            DeclarationMismatched(
                at_ns=decision.at_ns,
                call_id=call.call_id,
                expected=state.declared_length,
                actual=len(call.messages),
            )
        )
    match = match_list(decision.state, call.head, call.messages)
    decision.emit(
        CallArrived(
            at_ns=decision.at_ns,
            call_id=call.call_id,
            attempt=state.attempts.get(call.call_id, 0) + 1,
            kept=match.kept,
            head=call.head if match.kept == ROOT else b"",
            messages=call.messages[match.num_kept :],
            branch=match.branch.id if match.branch else -1,
            diverges=match.diverges,
            concurrent=any(f.call_id != call.call_id for f in state.flights),
            streamed=call.streamed,
            num_choices=call.num_choices,
            one_off=call.one_off,
            closes=call.closes,
            pins=call.pins,
            wait=call.wait,
            tool=call.tool,
            eta=call.eta,
            source=call.source,
            seq=call.seq or 0,
        )
    )


def mapped(decision: Decision, observation: CallMapping) -> None:
    """The prompt's tokens are known, or it is known why not."""
    flight = decision.state.flight(observation.call_id, observation.attempt)
    if flight is None or flight.mapping_known:
        return
    mapping = observation.mapping
    if mapping.kind is MappingKind.NONE:
        decision.emit(
            CallMapped(
                at_ns=decision.at_ns,
                call_id=flight.call_id,
                attempt=flight.attempt,
                kind=mapping.kind,
                reason=mapping.reason or "unknown",
            )
        )
    else:
        decision.emit(_mapped_event(decision, flight, mapping))
        if decision.state.gap:
            decision.emit(TrackingGapHealed(at_ns=decision.at_ns))
    flight = decision.state.flight(observation.call_id, observation.attempt)
    if flight is not None and flight.pins:
        pin_from_call(decision, flight, observation)


def _mapped_event(decision: Decision, flight: Flight, mapping: PromptMapping) -> CallMapped:
    steps = path(decision.state.versions, flight.tail)
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
        call_id=flight.call_id,
        attempt=flight.attempt,
        kind=mapping.kind,
        num_tokens=mapping.num_tokens,
        tools_end=mapping.tools_end,
        chunk_size=size,
        first_changed=first,
        ends=ends[first:],
        first_chunk=first_chunk,
        keys=mapping.chunk_keys[first_chunk * KEY_BYTES :],
    )


def first_token(decision: Decision, observation: FirstToken) -> None:
    """The prompt is computed: the call's list becomes the context's."""
    flight = decision.state.flight(observation.call_id, observation.attempt)
    if flight is not None and not flight.prefilled:
        _commit(decision, flight)


def end(decision: Decision, observation: CallEnding) -> None:
    """The call is over. A completed one that showed no first token (not streamed) computed its prompt too."""
    flight = decision.state.flight(observation.call_id, observation.attempt)
    if flight is None:
        return
    completed = observation.end is CallEnd.COMPLETED
    if completed and not flight.prefilled:
        _commit(decision, flight)
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
        )
    )
    state = decision.state
    others = any(f.call_id == flight.call_id for f in state.flights)
    if state.open and not others and (flight.closes or state.one_off):
        reason = "the call said so" if flight.closes else "a one-off ends with its call"
        decision.emit(ContextClosed(at_ns=decision.at_ns, reason=reason))


def generated(decision: Decision, observation: GenerationKeys) -> None:
    """Generated tokens filled chunks: held behind a live tail, else dead on arrival."""
    state = decision.state
    tag = tail_tag(observation.call_id, observation.attempt)
    tail = next((v for v in state.versions.values() if v.digest == tag), None)
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
    if prefix != chain(state.versions, tail.id):
        raise InvalidObservation("the generation's chain does not continue the call's prompt")
    decision.emit(
        GenerationMapped(
            at_ns=decision.at_ns,
            call_id=observation.call_id,
            attempt=observation.attempt,
            choice=observation.choice,
            parent=tail.id,
            end=observation.num_tokens,
            first_chunk=first_chunk,
            keys=observation.chain[first_chunk * KEY_BYTES :],
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
    if current is None or not state.open or current.stale or state.one_off:
        return
    flight = current
    on_path = {v.id for v in path(state.versions, flight.tip)}
    branch = state.branch(flight.branch)
    if branch is None or branch.tip not in on_path:
        branch = max(
            (b for b in state.branches if b.tip in on_path),
            key=lambda b: (state.versions[b.tip].index, not b.doubted_ns, b.id),
            default=branch,
        )
    if branch is None:
        _open(decision, flight)
    elif branch.tip in on_path:
        _advance(decision, flight, branch)
    elif flight.concurrent or not flight.diverges:
        _open(decision, flight)
    else:
        _open(decision, flight)
        _doubt(decision, branch, "the next list left it")
    follow_pins(decision, flight)


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
    leftover = -1
    if grows and not _reproduced(decision.state, branch, flight):
        leftover = decision.state.next_branch
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
        busy = _busy(decision.state, flight)
        for other in decision.state.branches:
            if other.id not in (branch.id, leftover) and other.tip not in busy:
                _doubt(decision, other, "another branch went on")


def _busy(state: ContextState, flight: Flight) -> set[int]:
    """Versions that other calls in flight compute with."""
    others = (f for f in state.flights if (f.call_id, f.attempt) != (flight.call_id, flight.attempt))
    return live_ids(state.versions, (f.tip for f in others))


def _doubt(decision: Decision, branch: Branch, reason: str) -> None:
    if not branch.doubted_ns:
        decision.emit(BranchDoubted(at_ns=decision.at_ns, branch=branch.id, reason=reason))


def _expire_doubted(decision: Decision, flight: Flight, branch: Branch) -> None:
    """A tracking gap means that we may have missed something: then nothing expires."""
    if decision.state.gap:
        return
    for other in decision.state.branches:
        if other.id != branch.id and 0 < other.doubted_ns <= flight.arrived_ns:
            decision.emit(
                BranchExpired(at_ns=decision.at_ns, branch=other.id, reason="the context went on without it")
            )


def _reproduced(state: ContextState, branch: Branch, flight: Flight) -> bool:
    """Whether everything the branch had generated lies on the flight's chain, token for token."""
    if not branch.tails:
        return True
    tail = state.versions[flight.tail]
    if not tail.mapped:
        return False
    whole = chain(state.versions, flight.tail)
    return all(_lies_on(state.versions[t], whole, state) for t in branch.tails)


def _lies_on(tail: Version, whole: bytes, state: ContextState) -> bool:
    return tail.mapped and whole.startswith(chain(state.versions, tail.id))
