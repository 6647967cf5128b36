"""Rows of the read models: what each event writes into tables that people query.

An event puts whole rows (what began: a context, a call, a directive, a pin) and patches single columns (what
became of it). Every value is absolute, never a count to be raised, so that the same events in the same order
leave the same rows however often they come, and a replay of the later part of a log mends the later values of
rows whose beginning the log has forgotten. No text, no token ids: the log holds none.
"""

from collections.abc import Iterable, Mapping
from datetime import UTC, datetime, timedelta
from typing import NamedTuple, TypeAlias, get_args

from lifecycle.core.directives import Admit, Demote, Directive, Pin, Reclaim, Unpin
from lifecycle.core.events import (
    CallArrived,
    CallEnded,
    CallMapped,
    ContextClosed,
    ContextCreated,
    ContextEvent,
    ContextResumed,
    ContextUnmapped,
    ContextVerified,
    DirectiveProposed,
    DirectiveSettled,
    OperationApplied,
    PinMoved,
    PinReleased,
    PinSet,
    PrefillDone,
    RecordedEvent,
    TrackingGapHealed,
    TrackingGapOpened,
    WaitDeclared,
)
from lifecycle.core.ids import KEY_BYTES, context_stream
from lifecycle.core.observations import MarkOneOff
from lifecycle.vocabulary import DirectiveOutcome

Value: TypeAlias = str | int | bool | datetime | None
Row: TypeAlias = dict[str, Value]

CONTEXTS = "kv_contexts"
CALLS = "kv_calls"
DIRECTIVES = "kv_directives"
PINS = "kv_pins"

KEYS: Mapping[str, tuple[str, ...]] = {
    CONTEXTS: ("uid",),
    CALLS: ("uid", "call_id", "attempt"),
    DIRECTIVES: ("directive_id",),
    PINS: ("pin_id",),
}
"""The columns that name a row, by table."""

NOT_MAPPED_YET = "the tokens of its last call are not known yet"
FORK_OF_UNKNOWN = "a fork of tokens that are not known"

_UNSENT = frozenset({DirectiveOutcome.SUPPRESSED, DirectiveOutcome.UNSUPPORTED})

CONTEXT_EVENTS = get_args(ContextEvent)

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


class Change(NamedTuple):
    """What an event does to a row: `whole` replaces or creates it, else `values` go into what is there."""

    table: str
    values: Row
    whole: bool

    @property
    def key(self) -> tuple[Value, ...]:
        """Values of the columns that name the row."""
        return tuple(self.values[name] for name in KEYS[self.table])


def moment(at_ns: int) -> datetime:
    """Nanoseconds since the epoch as a time in UTC, to the microsecond below."""
    return _EPOCH + timedelta(microseconds=at_ns // 1000)


def merged(changes: Iterable[Change]) -> list[Change]:
    """The same effect with one change a row."""
    out: dict[tuple[str, tuple[Value, ...]], Change] = {}
    for change in changes:
        place = (change.table, change.key)
        before = out.get(place)
        if before is None or change.whole:
            out[place] = change
        else:
            out[place] = Change(change.table, before.values | change.values, before.whole)
    return list(out.values())


def changes(recorded: RecordedEvent) -> list[Change]:
    """What an event writes, in order. Pure; an event without columns of its own moves its context's time."""
    event = recorded.event
    uid = recorded.stream.removeprefix(context_stream(""))
    match event:
        case ContextCreated():
            return [Change(CONTEXTS, _context(recorded.position, event), whole=True)]
        case CallArrived():
            context: Row = {
                "state": "open",
                "closed_at": None,
                "close_reason": "",
                "messages": event.num_messages,
                "unmapped": NOT_MAPPED_YET,
                "wait": "",
                "wait_tool": "",
            }
            if event.one_off:
                context["one_off"] = True
            return [_patch(uid, event.at_ns, **context), _call(recorded.position, uid, event)]
        case CallMapped():
            return _mapped(uid, event)
        case PrefillDone():
            call = _call_patch(uid, event, first_token_at=moment(event.at_ns))
            return [_patch(uid, event.at_ns), call]
        case CallEnded():
            return _ended(uid, event)
        case WaitDeclared(kind=kind, tool=tool):
            return [_patch(uid, event.at_ns, wait=str(kind), wait_tool=_text(tool))]
        case ContextResumed():
            return [_patch(uid, event.at_ns, wait="", wait_tool="")]
        case OperationApplied(operation=MarkOneOff()):
            return [_patch(uid, event.at_ns, one_off=True)]
        case ContextUnmapped(reason=reason):
            return [_patch(uid, event.at_ns, unverified=_text(reason))]
        case ContextVerified():
            return [_patch(uid, event.at_ns, unverified="")]
        case TrackingGapOpened(reason=reason):
            return [_patch(uid, event.at_ns, gap=_text(reason))]
        case TrackingGapHealed():
            return [_patch(uid, event.at_ns, gap="")]
        case ContextClosed(reason=reason):
            closed: Row = {"state": "closed", "closed_at": moment(event.at_ns), "close_reason": _text(reason)}
            return [_patch(uid, event.at_ns, wait="", wait_tool="", **closed)]
        case PinSet():
            return [_patch(uid, event.at_ns), Change(PINS, _pin(recorded.position, uid, event), whole=True)]
        case PinMoved(pin_id=pin_id):
            moved: Row = {"message": event.index, "size_bytes": event.size_bytes}
            return [_patch(uid, event.at_ns), Change(PINS, {"pin_id": pin_id, **moved}, whole=False)]
        case PinReleased(pin_id=pin_id):
            released: Row = {"released_at": moment(event.at_ns), "release_reason": _text(event.reason)}
            return [_patch(uid, event.at_ns), Change(PINS, {"pin_id": pin_id, **released}, whole=False)]
        case DirectiveProposed():
            return [Change(DIRECTIVES, _directive(recorded.position, event), whole=True)]
        case DirectiveSettled():
            return [Change(DIRECTIVES, _outcome(event), whole=False)]
        case _:
            return [_patch(uid, event.at_ns)] if isinstance(event, CONTEXT_EVENTS) else []


def _context(position: int, event: ContextCreated) -> Row:
    known = all(version.mapped for version in event.inherited)
    return {
        "uid": event.uid,
        "tenant": _text(event.tenant),
        "context_id": _text(event.context_id),
        "model": _text(event.namespace.model),
        "salt": _text(event.namespace.salt),
        "agent": _text(event.agent),
        "flow": _text(event.flow),
        "parent_uid": event.parent_uid,
        "forked": event.forked,
        "one_off": event.one_off,
        "rung": str(event.rung),
        "state": "open",
        "messages": 0,
        "tokens": None,
        "unmapped": "" if known else FORK_OF_UNKNOWN,
        "unverified": "",
        "gap": "",
        "wait": "",
        "wait_tool": "",
        "opened_at": moment(event.at_ns),
        "last_at": moment(event.at_ns),
        "closed_at": None,
        "close_reason": "",
        "position": position,
    }


def _call(position: int, uid: str, event: CallArrived) -> Change:
    row: Row = {
        "uid": uid,
        "call_id": _text(event.call_id),
        "attempt": event.attempt,
        "streamed": event.streamed,
        "choices": event.num_choices,
        "messages": event.num_messages,
        "arrived_at": moment(event.at_ns),
        "first_token_at": None,
        "ended_at": None,
        "outcome": "",
        "finish_reason": "",
        "prompt_tokens": None,
        "cached_tokens": None,
        "output_tokens": None,
        "mapping": "",
        "mapping_reason": "",
        "mapped_tokens": None,
        "position": position,
    }
    return Change(CALLS, row, whole=True)


def _mapped(uid: str, event: CallMapped) -> list[Change]:
    context: Row = {"unmapped": _text(event.reason)}
    call: Row = {"mapping": str(event.kind), "mapping_reason": _text(event.reason)}
    if not event.reason:
        context["tokens"] = call["mapped_tokens"] = event.num_tokens
    return [_patch(uid, event.at_ns, **context), _call_patch(uid, event, **call)]


def _ended(uid: str, event: CallEnded) -> list[Change]:
    context: Row = {"wait": str(event.wait), "wait_tool": _text(event.tool)}
    if event.prompt_tokens >= 0:
        context["tokens"] = event.prompt_tokens
    call: Row = {
        "ended_at": moment(event.at_ns),
        "outcome": str(event.end),
        "finish_reason": _text(event.finish_reason),
        "prompt_tokens": _told(event.prompt_tokens),
        "cached_tokens": _told(event.cached_tokens),
        "output_tokens": _told(event.output_tokens),
    }
    return [_patch(uid, event.at_ns, **context), _call_patch(uid, event, **call)]


def _pin(position: int, uid: str, event: PinSet) -> Row:
    return {
        "pin_id": event.pin_id,
        "uid": uid,
        "message": event.index,
        "size_bytes": event.size_bytes,
        "priority": event.priority,
        "leased_at": moment(event.at_ns),
        "until_at": moment(event.until_ns),
        "released_at": None,
        "release_reason": "",
        "position": position,
    }


def _directive(position: int, event: DirectiveProposed) -> Row:
    directive = event.directive
    return {
        "directive_id": directive.directive_id,
        "kind": type(directive).__name__.lower(),
        "model": _text(directive.namespace.model),
        "salt": _text(directive.namespace.salt),
        "fingerprint": directive.namespace.fingerprint,
        "subject": _text(_subject(directive)),
        "reason": _text(directive.reason),
        "chunks": 0 if isinstance(directive, Admit) else len(directive.keys) // KEY_BYTES,
        "as_of": event.as_of,
        "proposed_at": moment(event.at_ns),
        "outcome": str(DirectiveOutcome.PROPOSED),
        "outcome_reason": "",
        "sent": None,
        "applied": 0,
        "skipped": 0,
        "settled_at": None,
        "position": position,
    }


def _subject(directive: Directive) -> str:
    match directive:
        case Admit(call_id=call_id):
            return call_id
        case Pin(pin_id=pin_id) | Unpin(pin_id=pin_id):
            return pin_id
        case Reclaim() | Demote():
            return ""


def _outcome(event: DirectiveSettled) -> Row:
    result = event.result
    expired = result.outcome is DirectiveOutcome.EXPIRED
    return {
        "directive_id": event.directive_id,
        "outcome": str(result.outcome),
        "outcome_reason": _text(result.reason),
        "sent": None if expired else result.outcome not in _UNSENT,
        "applied": result.applied,
        "skipped": result.skipped,
        "settled_at": moment(event.at_ns),
    }


def _patch(uid: str, at_ns: int, **values: Value) -> Change:
    return Change(CONTEXTS, {"uid": uid, "last_at": moment(at_ns), **values}, whole=False)


def _call_patch(uid: str, event: CallMapped | PrefillDone | CallEnded, **values: Value) -> Change:
    key: Row = {"uid": uid, "call_id": _text(event.call_id), "attempt": event.attempt}
    return Change(CALLS, key | values, whole=False)


def _told(count: int) -> int | None:
    return count if count >= 0 else None


def _text(text: str) -> str:
    """Text as every database takes it: PostgreSQL knows no NUL."""
    return text.replace("\x00", "\ufffd")
