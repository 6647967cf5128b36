"""What the passing of time does: doubts, pins, gaps and leases run out. The core has no clock; it is told."""

from lifecycle.core.decision import Decision
from lifecycle.core.events import BranchExpired, ContextClosed, PinReleased, TrackingGapOpened
from lifecycle.core.state import ContextState
from lifecycle.vocabulary import DOUBT_SECONDS, LEASE_SECONDS

LEASE_OVER = "lease over"
"""Begins the reason of whatever ended because nothing was heard of it."""

HELD_SECONDS = 5.0
"""How long an operation waits for its predecessor before the numbering counts as torn."""


def tick(decision: Decision) -> None:
    """Everything whose time is over by `decision.at_ns`.

    While a tracking gap is open doubts do not run out, and silence only after the longest lease.
    """
    state, now = decision.state, decision.at_ns
    for pin in state.pins:
        if pin.until_ns <= now:
            decision.emit(PinReleased(at_ns=now, pin_id=pin.pin_id, reason=LEASE_OVER))
    if any(s.held and now - s.held_since_ns > HELD_SECONDS * 1e9 for s in state.sources.values()):
        decision.emit(TrackingGapOpened(at_ns=now, reason="an operation is missing"))
    for branch in state.branches if not decision.state.gap else ():
        if branch.doubted_ns and now - branch.doubted_ns >= DOUBT_SECONDS * 1e9:
            decision.emit(
                BranchExpired(at_ns=now, branch=branch.id, reason=f"doubted for {DOUBT_SECONDS:.0f} s")
            )
    if state.open and not state.flights and now >= lease_end_ns(decision.state):
        decision.emit(ContextClosed(at_ns=now, reason=f"{LEASE_OVER} ({state.wait})"))


def lease_end_ns(state: ContextState) -> int:
    """When the context ends unless it is heard of again."""
    seconds = max(LEASE_SECONDS.values()) if state.gap else LEASE_SECONDS[state.wait]
    return state.active_ns + int(seconds * 1e9)


def next_deadline_ns(state: ContextState) -> int | None:
    """The earliest moment at which a tick could change the context; None if only an observation can."""
    moments = [p.until_ns for p in state.pins]
    moments += [s.held_since_ns + int(HELD_SECONDS * 1e9) + 1 for s in state.sources.values() if s.held]
    if not state.gap:
        moments += [b.doubted_ns + int(DOUBT_SECONDS * 1e9) for b in state.branches if b.doubted_ns]
    if state.open and not state.flights:
        moments.append(lease_end_ns(state))
    return min(moments, default=None)
