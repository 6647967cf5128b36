"""What follows from a declared operation: ordered and idempotent per source."""

from typing import assert_never

from lifecycle.core.decision import Decision
from lifecycle.core.events import (
    ContextClosed,
    ContextResumed,
    ListEdited,
    ListGrown,
    OperationApplied,
    OperationHeld,
    OperationRejected,
    OutcomeDeclared,
    PinReleased,
    TrackingGapOpened,
    WaitDeclared,
)
from lifecycle.core.observations import (
    AppendMessages,
    CloseContext,
    DeclareOutcome,
    DeclareResumed,
    DeclareWaiting,
    ForkContext,
    MarkOneOff,
    Operation,
    OperationReceived,
    PinRequest,
    PinSpan,
    RemoveMessages,
    ReplaceMessages,
    Span,
    SpawnContext,
    UnpinSpan,
)
from lifecycle.core.pins import PinRoom, grant_pin, release_held_pin, release_pin
from lifecycle.core.state import ROOT, ContextState, Source, path
from lifecycle.core.tree import editable_list

MAX_HELD = 256
"""Operations of one source that may wait for a predecessor."""


def receive(decision: Decision, observation: OperationReceived) -> None:
    """One operation: applied, held for its predecessor, rejected, or (seen before) nothing at all.

    Numbering begins at 1 per source and context. An operation that closes a gap releases those behind it.
    """
    name, operation = observation.source, observation.operation
    before, room = decision.state.pins, PinRoom.seen_with(observation)
    source = decision.state.sources.get(name, Source())
    seq = operation.seq
    if seq <= source.applied or seq in source.held:
        return
    if seq > source.applied + 1:
        if len(source.held) >= MAX_HELD:
            decision.emit(TrackingGapOpened(at_ns=decision.at_ns, reason="too many operations are missing"))
            decision.emit(
                OperationRejected(
                    at_ns=decision.at_ns,
                    source=name,
                    seq=seq,
                    reason="too many operations wait for a missing one",
                )
            )
        else:
            decision.emit(OperationHeld(at_ns=decision.at_ns, source=name, operation=operation))
        return
    _apply(decision, name, operation, room)
    while True:
        source = decision.state.sources[name]
        following = source.held.get(source.applied + 1)
        if following is None:
            return
        _apply(decision, name, following, room.since(before, decision.state.pins))


def _apply(decision: Decision, name: str, operation: Operation, room: PinRoom) -> None:
    reason = _objection(decision.state, operation)
    source = decision.state.sources.get(name, Source())
    if not reason and isinstance(operation, PinSpan | UnpinSpan):
        reason = _pin(decision, operation, room)
    if reason:
        decision.emit(OperationRejected(at_ns=decision.at_ns, source=name, seq=operation.seq, reason=reason))
        return
    decision.emit(OperationApplied(at_ns=decision.at_ns, source=name, operation=operation))
    if isinstance(operation, AppendMessages | ReplaceMessages | RemoveMessages) and (
        decision.state.gap or operation.seq <= source.rendered
    ):
        # Either an operation before it is missing, so that its span counts from a list we do not know, or a
        # call that was sent after it has come: that call's list shows the edit. The next list tells.
        return
    _effect(decision, operation)


def _objection(state: ContextState, operation: Operation) -> str:
    """Why the operation cannot be applied to this context, or an empty string."""
    match operation:
        case AppendMessages(n=n):
            return "" if n >= 0 else "n must not be negative"
        case ReplaceMessages(span=span, n=n):
            return _span_objection(state, span) or ("" if n >= 0 else "n must not be negative")
        case RemoveMessages(span=span) | DeclareOutcome(span=span):
            return _span_objection(state, span)
        case MarkOneOff():
            return "the context is in use already" if state.attempts else ""
        case ForkContext() | SpawnContext():
            return "the context is in use already" if state.attempts else ""
        case DeclareWaiting(eta=eta):
            return "" if eta is None or eta >= 0 else "eta must not be negative"
        case PinSpan() | UnpinSpan() | DeclareResumed() | CloseContext():
            return ""
        case _:
            assert_never(operation)


def _span_objection(state: ContextState, span: Span) -> str:
    start, end = span
    if not 0 <= start <= end:
        return f"[{start}, {end}) is not a span"
    if not editable_list(state):
        return "the context has no list yet"
    return ""


def edit_cost(state: ContextState, operation: Operation) -> int | None:
    """Tokens of messages that live on and must be computed again after an edit, were it applied now.

    Chunks before the one that the edit falls into can still be hit. What the edit brings in is not counted.
    None for other operations, for spans that cannot be, and while the list's tokens are not known.
    """
    match operation:
        case AppendMessages():
            return 0
        case ReplaceMessages(span=span) | RemoveMessages(span=span):
            messages = editable_list(state)
        case _:
            return None
    if _span_objection(state, span) or not state.chunk_size or not all(v.mapped for v in messages):
        return None
    start, end = (min(at, len(messages)) for at in span)
    if start == len(messages):
        return 0
    behind = messages[-1].end - (messages[end - 1].end if end else messages[0].start)
    return messages[start].start % state.chunk_size + behind


def _pin(decision: Decision, operation: PinSpan | UnpinSpan, room: PinRoom) -> str:
    branch = decision.state.current_branch()
    if branch is None:
        if isinstance(operation, UnpinSpan) and decision.state.pins:
            return release_held_pin(decision, operation.span)
        return "the context has no list"
    if isinstance(operation, UnpinSpan):
        return release_pin(decision, branch.tip, operation.span)
    request = PinRequest(operation.span, operation.ttl)
    return grant_pin(decision, branch.tip, request, operation.priority, room)


def _effect(decision: Decision, operation: Operation) -> None:
    now = decision.at_ns
    match operation:
        case AppendMessages(n=n):
            decision.emit(ListGrown(at_ns=now, num_new=n))
        case ReplaceMessages(span=span, n=n):
            _edit(decision, span, n)
        case RemoveMessages(span=span):
            _edit(decision, span, 0)
        case DeclareWaiting(kind=kind, tool=tool, eta=eta):
            decision.emit(WaitDeclared(at_ns=now, kind=kind, tool=tool or "", eta=eta))
        case DeclareOutcome(span=span, result=result):
            decision.emit(OutcomeDeclared(at_ns=now, start=span[0], end=span[1], result=result))
        case DeclareResumed():
            decision.emit(ContextResumed(at_ns=now))
        case CloseContext():
            if decision.state.open:
                decision.emit(ContextClosed(at_ns=now, reason="closed by its agent"))
        case MarkOneOff() | ForkContext() | SpawnContext() | PinSpan() | UnpinSpan():
            pass
        case _:
            assert_never(operation)


def _edit(decision: Decision, span: Span, num_new: int) -> None:
    start, end = span
    if start == end and num_new == 0:
        return
    state = decision.state
    messages = editable_list(state)
    root = messages[start].id if start < len(messages) else ROOT
    for pin in state.pins:
        ours = pin.moving or any(v.id == root for v in path(state.versions, pin.tip))
        if ours and start <= pin.index < end:
            decision.emit(
                PinReleased(at_ns=decision.at_ns, pin_id=pin.pin_id, reason="its message was removed")
            )
    decision.emit(ListEdited(at_ns=decision.at_ns, start=start, end=end, num_new=num_new))
