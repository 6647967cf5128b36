"""`decide(state, observation) -> events`: what follows from what was seen. Pure; writes nothing."""

from typing import assert_never

from lifecycle.core.arrivals import arrive
from lifecycle.core.calls import end, first_token, generated, mapped
from lifecycle.core.decision import Decision
from lifecycle.core.events import (
    CallVerified,
    ContextClosed,
    ContextCreated,
    ContextEvent,
    ContextUnmapped,
    ContextVerified,
    PinReleased,
)
from lifecycle.core.leases import tick
from lifecycle.core.observations import (
    CallArrival,
    CallEnding,
    CallMapping,
    CloseRequested,
    ContextOpened,
    FirstToken,
    GenerationKeys,
    Observation,
    OperationReceived,
    PinsDropped,
    Tick,
    VerificationResult,
)
from lifecycle.core.operations import receive
from lifecycle.core.state import ROOT, ContextState, Version, list_path, path

_NO_TAILS: tuple[int, ...] = ()


def decide(state: ContextState, observation: Observation) -> list[ContextEvent]:
    """Events that the observation causes, in order; none if it changes nothing.

    Raises `InvalidObservation` for what cannot be true of this context.
    """
    decision = Decision(state, observation.at_ns)
    match observation:
        case CallArrival():
            arrive(decision, observation)
        case CallMapping():
            mapped(decision, observation)
        case FirstToken():
            first_token(decision, observation)
        case CallEnding():
            end(decision, observation)
        case GenerationKeys():
            generated(decision, observation)
        case OperationReceived():
            receive(decision, observation)
        case VerificationResult(reason=reason):
            if observation.num_chunks:
                decision.emit(
                    CallVerified(
                        at_ns=decision.at_ns,
                        call_id=observation.call_id,
                        attempt=observation.attempt,
                        num_chunks=observation.num_chunks,
                        num_shown=observation.num_shown,
                    )
                )
            if reason and reason != state.unverified:
                decision.emit(ContextUnmapped(at_ns=decision.at_ns, reason=reason))
            elif not reason and state.unverified:
                decision.emit(ContextVerified(at_ns=decision.at_ns))
        case CloseRequested(reason=reason):
            if state.open:
                decision.emit(ContextClosed(at_ns=decision.at_ns, reason=reason))
        case PinsDropped(reason=reason):
            for pin in state.pins:
                decision.emit(PinReleased(at_ns=decision.at_ns, pin_id=pin.pin_id, reason=reason))
        case Tick():
            tick(decision)
        case _:
            assert_never(observation)
    return decision.events


def open_context(observation: ContextOpened, parent: ContextState | None) -> list[ContextEvent]:
    """Events that begin a context.

    `parent` is the state of a known parent of the same tenant and namespace; a fork of anything else starts
    empty, for nothing proves that it shares KV. A fork takes the list of the parent's last *ended* call.
    """
    versions: tuple[Version, ...] = ()
    tip, tails = ROOT, _NO_TAILS
    fork_at = -1
    if observation.fork and parent is not None:
        versions, tip, tails = _inheritance(parent, observation.upto)
        fork_at = sum(v.index >= 0 for v in versions)
    return [
        ContextCreated(
            at_ns=observation.at_ns,
            uid=observation.uid,
            tenant=observation.tenant,
            context_id=observation.context_id,
            namespace=observation.namespace,
            rung=observation.rung,
            reason=observation.reason,
            parent_uid=parent.uid if parent is not None else "",
            forked=observation.fork and parent is not None,
            fork_at=fork_at,
            one_off=observation.one_off,
            agent=observation.agent,
            flow=observation.flow,
            inherited=versions,
            inherited_tip=tip,
            inherited_tails=tails,
            chunk_size=parent.chunk_size if parent is not None and versions else 0,
            tools_end=parent.tools_end if parent is not None and versions else 0,
        )
    ]


def _inheritance(parent: ContextState, upto: int | None) -> tuple[tuple[Version, ...], int, tuple[int, ...]]:
    closed = [b for b in parent.branches if not b.doubted_ns and b.closed_tip != ROOT]
    if not closed:
        return (), ROOT, ()
    branch = max(closed, key=lambda b: (b.since_ns, b.id))
    messages = list_path(parent, branch.closed_tip)
    tip = branch.closed_tip
    tails = branch.tails if branch.closed_tip == branch.tip else ()
    if upto is not None and upto <= len(messages):
        tails = ()
        if upto < len(messages):
            tip = messages[upto].parent
    chosen = {v.id: v for t in (tip, *tails) for v in path(parent.versions, t)}
    return tuple(chosen[i] for i in sorted(chosen)), tip, tails
