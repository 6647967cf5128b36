"""`evolve(state, event) -> state`: what an event makes true. Total, pure, the only way a state changes."""

from collections.abc import Mapping
from typing import assert_never

from msgspec.structs import replace

from lifecycle.core.events import (
    BranchAdvanced,
    BranchDoubted,
    BranchExpired,
    BranchOpened,
    BranchRestored,
    CallArrived,
    CallEnded,
    CallMapped,
    CallVerified,
    ContextClosed,
    ContextCreated,
    ContextEvent,
    ContextResumed,
    ContextUnmapped,
    ContextVerified,
    DeclarationMismatched,
    GenerationMapped,
    ListEdited,
    ListGrown,
    OperationApplied,
    OperationHeld,
    OperationRejected,
    OutcomeDeclared,
    PinMoved,
    PinRefused,
    PinReleased,
    PinSet,
    PrefillDone,
    PrefixDiverged,
    TrackingGapHealed,
    TrackingGapOpened,
    WaitDeclared,
)
from lifecycle.core.ids import ContextKey
from lifecycle.core.observations import MarkOneOff
from lifecycle.core.prefix_loss import declared_edit, noted
from lifecycle.core.state import (
    Branch,
    ContextState,
    Flight,
    PinHold,
    Source,
    list_path,
    pruned,
)
from lifecycle.core.tree import (
    edited,
    ended_call,
    placed_call,
    placed_generation,
    placed_mapping,
)
from lifecycle.vocabulary import WaitKind

NUM_CALLS_KEPT = 64
"""Calls whose attempts are remembered; an attempt that comes later counts as a call of its own."""

NUM_SOURCES_KEPT = 64
"""Numberings of operations that are remembered, those heard of last."""

NUM_OUTCOMES_KEPT = 64


def evolve(state: ContextState | None, event: ContextEvent) -> ContextState:
    """The state after the event. Raises `TypeError` if the first event is not `ContextCreated`."""
    if isinstance(event, ContextCreated):
        return _created(event)
    if state is None:
        raise TypeError(f"a context begins with ContextCreated, not {type(event).__name__}")
    state = replace(state, last_ns=max(state.last_ns, event.at_ns))
    match event:
        case CallArrived():
            return _arrived(state, event)
        case CallMapped():
            return _mapped(state, event)
        case PrefixDiverged():
            return replace(state, lint=noted(state.lint, event))
        case PrefillDone():
            return _with_flight(state, event.call_id, event.attempt, prefilled=True)
        case CallEnded():
            return _ended(state, event)
        case GenerationMapped():
            return placed_generation(state, event)
        case BranchOpened():
            return _opened(state, event)
        case BranchAdvanced():
            return _advanced(state, event)
        case BranchDoubted():
            return _with_branch(state, event.branch, doubted_ns=max(event.at_ns, 1))
        case BranchRestored():
            return _with_branch(state, event.branch, doubted_ns=0)
        case BranchExpired():
            return pruned(replace(state, branches=tuple(b for b in state.branches if b.id != event.branch)))
        case PinSet():
            return _pin_set(state, event)
        case PinMoved():
            return _pin_moved(state, event)
        case PinReleased():
            return pruned(replace(state, pins=tuple(p for p in state.pins if p.pin_id != event.pin_id)))
        case ListEdited():
            return replace(edited(state, event), edit=declared_edit(state, event))
        case ListGrown():
            base = _declared_base(state)
            return replace(state, declared_length=base + event.num_new, declares_appends=True)
        case OperationApplied():
            return _operation_applied(state, event)
        case OperationHeld():
            source = state.sources.get(event.source, Source())
            held = {**source.held, event.operation.seq: event.operation}
            since = source.held_since_ns or event.at_ns
            return _with_source(state, event.source, replace(source, held=held, held_since_ns=since))
        case OperationRejected():
            return _consumed(state, event.source, event.seq, event.at_ns)
        case WaitDeclared():
            return replace(
                state,
                wait=event.kind,
                wait_tool=event.tool,
                wait_eta=event.eta,
                active_ns=event.at_ns,
                branches=_rewaited(state, event.kind, event.tool, event.eta),
            )
        case ContextResumed():
            return replace(state, active_ns=event.at_ns, wait_eta=0.0)
        case OutcomeDeclared():
            entry = (event.start, event.end, str(event.result))
            return replace(state, outcomes=(*state.outcomes, entry)[-NUM_OUTCOMES_KEPT:])
        case TrackingGapOpened():
            return replace(state, gap=event.reason, sources=_without_held(state.sources))
        case TrackingGapHealed():
            return replace(state, gap="")
        case ContextUnmapped():
            return _with_doubts(state, unverified=event.reason)
        case ContextVerified():
            return _with_doubts(state, unverified="")
        case ContextClosed():
            return pruned(replace(state, closed=event.reason, branches=(), declared_length=None))
        case DeclarationMismatched() | PinRefused() | CallVerified():
            return state
        case _:
            assert_never(event)


def _created(event: ContextCreated) -> ContextState:
    branches: tuple[Branch, ...] = ()
    if event.inherited:
        inherited = Branch(
            id=0,
            tip=event.inherited_tip,
            tails=event.inherited_tails,
            since_ns=event.at_ns,
            closed_tip=event.inherited_tip,
        )
        branches = (inherited,)
    lost = "" if all(v.mapped for v in event.inherited) else "a fork of tokens that are not known"
    return ContextState(
        uid=event.uid,
        key=ContextKey(event.tenant, event.context_id),
        namespace=event.namespace,
        rung=event.rung,
        parent_uid=event.parent_uid,
        forked=event.forked,
        one_off=event.one_off,
        agent=event.agent,
        flow=event.flow,
        versions={v.id: v for v in event.inherited},
        next_version=max((v.id for v in event.inherited), default=-1) + 1,
        next_branch=len(branches),
        branches=branches,
        chunk_size=event.chunk_size,
        tools_end=event.tools_end,
        unmapped=lost,
        mapping_lost=lost,
        created_ns=event.at_ns,
        active_ns=event.at_ns,
        last_ns=event.at_ns,
    )


def _arrived(state: ContextState, event: CallArrived) -> ContextState:
    attempts = {call: n for call, n in state.attempts.items() if call != event.call_id}
    attempts[event.call_id] = event.attempt
    while len(attempts) > NUM_CALLS_KEPT:
        attempts.pop(next(iter(attempts)))
    state = replace(
        placed_call(state, event),
        attempts=attempts,
        declared_length=None,
        closed="",
        one_off=state.one_off or event.one_off,
        active_ns=event.at_ns,
        backend=event.backend or state.backend,
    )
    if event.source:
        source = state.sources.get(event.source, Source())
        source = replace(source, rendered=max(source.rendered, event.seq))
        state = _with_source(state, event.source, source)
    return state


def _mapped(state: ContextState, event: CallMapped) -> ContextState:
    flight = state.flight(event.call_id, event.attempt)
    if flight is not None and flight.pins:
        pinned = (*(c for c in state.pinned_calls if c != event.call_id), event.call_id)
        state = replace(state, pinned_calls=pinned[-NUM_CALLS_KEPT:])
    state = _with_flight(state, event.call_id, event.attempt, mapping_known=True)
    if flight is not None and not flight.stale and state.edit is not None:
        state = replace(state, edit=None)
    if event.reason:
        return _with_doubts(state, mapping_lost=event.reason)
    state = placed_mapping(state, event)
    lists = [b.tip for b in state.branches] + [f.tail for f in state.flights if f.mapping_known]
    if all(state.versions[tip].mapped for tip in lists):
        state = _with_doubts(state, mapping_lost="")
    return state


def _ended(state: ContextState, event: CallEnded) -> ContextState:
    flight = state.flight(event.call_id, event.attempt)
    if flight is not None and flight.prefilled and not flight.mapping_known:
        state = _with_doubts(state, mapping_lost="a call ended before its tokens were known")
    if event.backend:
        state = replace(state, backend=event.backend)
    return ended_call(state, event)


def _with_doubts(
    state: ContextState, *, mapping_lost: str | None = None, unverified: str | None = None
) -> ContextState:
    lost = state.mapping_lost if mapping_lost is None else mapping_lost
    unproven = state.unverified if unverified is None else unverified
    return replace(state, mapping_lost=lost, unverified=unproven, unmapped=unproven or lost)


def _opened(state: ContextState, event: BranchOpened) -> ContextState:
    flight = state.flight(event.call_id, event.attempt)
    assert flight is not None
    tip = flight.cut if flight.stale else flight.tip
    branch = Branch(id=event.branch, tip=tip, since_ns=event.at_ns)
    return replace(
        state, branches=(*state.branches, branch), next_branch=max(state.next_branch, event.branch + 1)
    )


def _advanced(state: ContextState, event: BranchAdvanced) -> ContextState:
    flight = state.flight(event.call_id, event.attempt)
    branch = state.branch(event.branch)
    assert flight is not None
    assert branch is not None
    left_behind = branch.tip != flight.tip or event.leftover >= 0
    state = _with_branch(
        state,
        event.branch,
        tip=flight.tip,
        tails=() if left_behind else branch.tails,
        since_ns=event.at_ns,
    )
    if event.leftover >= 0:
        leftover = replace(branch, id=event.leftover, doubted_ns=max(event.at_ns, 1))
        state = replace(
            state,
            branches=(*state.branches, leftover),
            next_branch=max(state.next_branch, event.leftover + 1),
        )
    return pruned(state)


def _pin_set(state: ContextState, event: PinSet) -> ContextState:
    version = state.versions[event.tip]
    pin = PinHold(
        pin_id=event.pin_id,
        tip=event.tip,
        index=event.index,
        message=version.digest,
        until_ns=event.until_ns,
        size_bytes=event.size_bytes,
        bytes_per_token=event.size_bytes // version.end if version.end > 0 else 0,
        priority=event.priority,
    )
    others = tuple(p for p in state.pins if p.pin_id != event.pin_id)
    return pruned(replace(state, pins=(*others, pin)))


def _pin_moved(state: ContextState, event: PinMoved) -> ContextState:
    pins = tuple(
        replace(p, tip=event.tip, index=event.index, size_bytes=event.size_bytes, moving=False)
        if p.pin_id == event.pin_id
        else p
        for p in state.pins
    )
    return pruned(replace(state, pins=pins))


def _operation_applied(state: ContextState, event: OperationApplied) -> ContextState:
    state = _consumed(state, event.source, event.operation.seq, event.at_ns)
    match event.operation:
        case MarkOneOff():
            return replace(state, one_off=True)
        case _:
            return state


def _consumed(state: ContextState, name: str, seq: int, at_ns: int) -> ContextState:
    source = state.sources.get(name, Source())
    held = {s: op for s, op in source.held.items() if s != seq}
    source = replace(
        source,
        applied=max(source.applied, seq),
        held=held,
        held_since_ns=at_ns if held else 0,
    )
    return _with_source(state, name, source)


def _without_held(sources: Mapping[str, Source]) -> dict[str, Source]:
    return {
        name: replace(s, applied=max([s.applied, *s.held]), held={}, held_since_ns=0)
        for name, s in sources.items()
    }


def _declared_base(state: ContextState) -> int:
    if state.declared_length is not None:
        return state.declared_length
    branch = state.current_branch()
    return len(list_path(state, branch.tip)) if branch else 0


def _rewaited(state: ContextState, kind: WaitKind, tool: str, eta: float | None) -> tuple[Branch, ...]:
    current = state.current_branch()
    return tuple(
        replace(b, wait=kind, tool=tool, eta=eta) if current and b.id == current.id else b
        for b in state.branches
    )


def _with_source(state: ContextState, name: str, source: Source) -> ContextState:
    sources = {n: s for n, s in state.sources.items() if n != name}
    sources[name] = source
    while len(sources) > NUM_SOURCES_KEPT:
        sources.pop(next(iter(sources)))
    return replace(state, sources=sources)


def _with_branch(state: ContextState, branch_id: int, **changes: object) -> ContextState:
    branches: tuple[Branch, ...] = tuple(
        replace(b, **changes) if b.id == branch_id else b for b in state.branches
    )
    return replace(state, branches=branches)


def _with_flight(state: ContextState, call_id: str, attempt: int, **changes: object) -> ContextState:
    flights: tuple[Flight, ...] = tuple(
        replace(f, **changes) if f.call_id == call_id and f.attempt == attempt else f for f in state.flights
    )
    return replace(state, flights=flights)
