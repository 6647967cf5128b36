"""What follows from a call's arrival."""

from contextlib import suppress

import msgspec

from lifecycle.core.calls import mapped
from lifecycle.core.decision import Decision
from lifecycle.core.events import CallArrived, DeclarationMismatched
from lifecycle.core.message_diff import match_list
from lifecycle.core.observations import CallArrival
from lifecycle.core.state import ROOT, ContextState
from lifecycle.errors import InvalidObservation


def arrive(decision: Decision, call: CallArrival) -> None:
    """A call came: its versions are Active from now on.

    What it leaves behind is judged at its first token only, so that a call which never computes anything
    changes nothing. Only a context's first call can make it a one-off: a used one has more to lose.
    """
    state = decision.state
    declared = state.declared_length if state.declares_appends else None
    if declared is not None and declared != (actual := len(call.messages)):
        call_id, now = call.call_id, decision.at_ns
        decision.emit(DeclarationMismatched(at_ns=now, call_id=call_id, expected=declared, actual=actual))
    match = match_list(decision.state, call.head, call.messages)
    attempt = _next_attempt(state, call.call_id)
    decision.emit(
        CallArrived(
            at_ns=decision.at_ns,
            call_id=call.call_id,
            attempt=attempt,
            kept=match.kept,
            head=call.head if match.kept == ROOT else b"",
            messages=call.messages[match.num_kept :],
            branch=match.branch.id if match.branch else -1,
            diverges=match.diverges,
            concurrent=any(f.call_id != call.call_id for f in state.flights),
            streamed=call.streamed,
            num_choices=call.num_choices,
            one_off=call.one_off and (state.one_off or not state.attempts),
            closes=call.closes,
            pins=call.pins,
            wait=call.wait,
            tool=call.tool,
            eta=call.eta,
            source=call.source,
            seq=call.seq or 0,
            arm=call.arm,
            harness=call.harness,
            num_messages=len(call.messages),
            proxy=call.proxy,
            backend=call.backend,
            placed=call.placed,
            normalised=call.normalised,
            rung=call.rung,
            reason=call.reason,
        )
    )
    if call.mapping is not None:
        # What cannot be true of the mapping is told to who records it by itself; the call came all the same.
        with suppress(InvalidObservation):
            mapped(decision, msgspec.structs.replace(call.mapping, attempt=attempt))


def _next_attempt(state: ContextState, call_id: str) -> int:
    in_flight = max((f.attempt for f in state.flights if f.call_id == call_id), default=0)
    return max(state.attempts.get(call_id, 0), in_flight) + 1
