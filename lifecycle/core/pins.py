"""Pins: leased holds on a chain that follow their message."""

from collections.abc import Sequence

import msgspec

from lifecycle.core.decision import Decision
from lifecycle.core.events import PinMoved, PinRefused, PinReleased, PinSet
from lifecycle.core.observations import CallMapping, OperationReceived, PinRequest, SpanName
from lifecycle.core.state import HEAD_INDEX, ContextState, Flight, PinHold, Version, list_path, live_ids, path
from lifecycle.vocabulary import PIN_TTL_DEFAULT_SECONDS, PIN_TTL_MAX_SECONDS

HEAD_ROLES = frozenset(("system", "developer"))

PIN_BUDGET_REASON = "pin budget"
PIN_LIMIT_REASON = "pin limit"
"""How the reason of a refusal begins that is due to a limit of the tenant."""


class PinRoom(msgspec.Struct, frozen=True):
    """What pins cost and what the tenant may still have of them; None is without limit."""

    bytes_per_token: int = 0
    bytes_left: int | None = None
    pins_left: int | None = None

    @classmethod
    def seen_with(cls, observation: CallMapping | OperationReceived) -> "PinRoom":
        """The room there was when the observation was made."""
        return cls(observation.bytes_per_token, observation.budget_left_bytes, observation.pins_left)

    def since(self, before: Sequence[PinHold], now: Sequence[PinHold]) -> "PinRoom":
        """The room that is left once `before` has become `now`: one observation may set several pins."""
        grown = sum(p.size_bytes for p in now) - sum(p.size_bytes for p in before)
        return PinRoom(
            self.bytes_per_token,
            None if self.bytes_left is None else self.bytes_left - grown,
            None if self.pins_left is None else self.pins_left - (len(now) - len(before)),
        )


def span_end(state: ContextState, tip: int, span: SpanName) -> Version | str:
    """The version at which the span's chain ends, or why there is none."""
    steps = path(state.versions, tip)
    messages = [v for v in steps if v.index >= 0]
    if span == "system":
        leading = 0
        while leading < len(messages) and messages[leading].role in HEAD_ROLES:
            leading += 1
        if leading:
            return messages[leading - 1]
        # Some APIs keep the system prompt out of the list: then it is what stands before the first message.
        head = steps[0] if steps and steps[0].index == HEAD_INDEX else None
        return head if head is not None and head.end else "the prompt begins with no system message"
    if span == "tools":
        if not state.tools_end:
            return "the prompt holds no tools, or its tokens are not known"
        return next(
            (v for v in steps if v.mapped and v.end >= state.tools_end), "the tools' tokens are not known"
        )
    if isinstance(span, str):
        return f"unknown span {span!r}"
    start, end = span
    if not 0 <= start < end:
        return f"[{start}, {end}) is not a span"
    if end > len(messages):
        return f"span ends at {end}, the list has {len(messages)} messages"
    return messages[end - 1]


def grant_pin(
    decision: Decision,
    tip: int,
    request: PinRequest,
    priority: int | None,
    room: PinRoom,
) -> str:
    """Set or renew a pin; answers why not, or an empty string. The same chain again is the same pin."""
    state = decision.state
    version = span_end(state, tip, request.span)
    if isinstance(version, str):
        return version
    if not version.mapped:
        return "the span's tokens are not known"
    ttl = PIN_TTL_DEFAULT_SECONDS if request.ttl is None else request.ttl
    if not 0 < ttl <= PIN_TTL_MAX_SECONDS:
        return f"ttl must be above 0 and at most {PIN_TTL_MAX_SECONDS:.0f} seconds"
    known = next((p for p in state.pins if p.tip == version.id and not p.moving), None)
    size_bytes = version.end * room.bytes_per_token
    needed = size_bytes - (known.size_bytes if known else 0)
    if room.bytes_left is not None and needed > max(room.bytes_left, 0):
        return f"{PIN_BUDGET_REASON}: {needed} bytes needed, {max(room.bytes_left, 0)} left"
    if room.pins_left is not None and known is None and room.pins_left <= 0:
        return f"{PIN_LIMIT_REASON}: the tenant holds as many pins as it may"
    until_ns = decision.at_ns + int(ttl * 1e9)
    if known:
        until_ns = max(until_ns, known.until_ns)
    decision.emit(
        PinSet(
            at_ns=decision.at_ns,
            pin_id=known.pin_id if known else _new_pin_id(state, version),
            tip=version.id,
            index=version.index,
            until_ns=until_ns,
            size_bytes=size_bytes,
            priority=priority if priority is not None or known is None else known.priority,
        )
    )
    return ""


def _new_pin_id(state: ContextState, version: Version) -> str:
    """An id no pin of the context has: one that moved away from the version keeps the version's number."""
    taken = {p.pin_id for p in state.pins}
    pin_id = f"{state.uid}:p{version.id}"
    while pin_id in taken:
        pin_id += "+"
    return pin_id


def release_pin(decision: Decision, tip: int, span: SpanName) -> str:
    """End the pin on the span's chain; answers why there is nothing to end, or an empty string."""
    version = span_end(decision.state, tip, span)
    if isinstance(version, str):
        return version
    for pin in decision.state.pins:
        if _waits_for(pin, version) if pin.moving else pin.tip == version.id:
            decision.emit(PinReleased(at_ns=decision.at_ns, pin_id=pin.pin_id, reason="unpinned"))
    return ""


def release_held_pin(decision: Decision, span: SpanName) -> str:
    """End the pins of a closed context whose chain the span names: what they hold is its only list."""
    state = decision.state
    ended = [pin for pin in state.pins if span_end(state, pin.tip, span) == state.versions[pin.tip]]
    for pin in ended:
        decision.emit(PinReleased(at_ns=decision.at_ns, pin_id=pin.pin_id, reason="unpinned"))
    return "" if ended else "no pin of the closed context ends there"


def pin_from_call(decision: Decision, flight: Flight, observation: CallMapping) -> None:
    """Pins and unpins that rode on a call, once its tokens are known. The caller asks once per call."""
    before, room = decision.state.pins, PinRoom.seen_with(observation)
    for request in flight.pins:
        if request.release:
            reason = release_pin(decision, flight.tip, request.span)
        else:
            left = room.since(before, decision.state.pins)
            reason = grant_pin(decision, flight.tip, request, None, left)
        if reason:
            decision.emit(PinRefused(at_ns=decision.at_ns, span=str(request.span), reason=reason))


def follow_pins(decision: Decision, flight: Flight) -> None:
    """Move pins whose message materialised behind another prefix to its new version.

    A pin on a list that goes on elsewhere stays there, though the flight's list holds an equal message. While
    the new version's tokens are not known the old hold stays.
    """
    state = decision.state
    if not state.pins:
        return
    messages = list_path(state, flight.tip)
    elsewhere = live_ids(state.versions, (b.tip for b in state.branches if not b.doubted_ns))
    for pin in state.pins:
        if pin.tip in elsewhere and not pin.moving:
            continue
        target = _same_message(messages, pin)
        if target is not None and target.mapped:
            decision.emit(
                PinMoved(
                    at_ns=decision.at_ns,
                    pin_id=pin.pin_id,
                    tip=target.id,
                    index=target.index,
                    size_bytes=target.end * pin.bytes_per_token,
                )
            )


def _same_message(messages: Sequence[Version], pin: PinHold) -> Version | None:
    same = [v for v in messages if v.digest == pin.message]
    return min(same, key=lambda v: (abs(v.index - pin.index), v.index), default=None)


def _waits_for(pin: PinHold, version: Version) -> bool:
    return pin.message == version.digest and pin.index == version.index
