"""Why a prompt leaves the one before it: the texts of last calls, compared in memory and kept nowhere else.

Where it leaves it, and what that costs, follows from the events alone (`lifecycle.core.prefix_loss`). What is
found here is a category: it goes into the log with the call's mapping. After a restart it is missing for a
context's first call, and for contexts whose texts had to make room.
"""

from collections import OrderedDict
from collections.abc import Sequence

import msgspec
import structlog

from engine_bridge.mapping.ranges import MappedPrompt
from lifecycle.core.events import CallEnded, ContextClosed, PrefixDiverged, RecordedEvent
from lifecycle.core.ids import context_stream
from lifecycle.core.observations import Beside
from lifecycle.tracker import Tracker
from lifecycle.vocabulary import PrefixBreak
from proxy.followed_call import FollowedCall
from proxy.forgetting import ERASED
from proxy.known_heads import KnownHeads
from proxy.request_log import MAX_SHOWN
from proxy.text_change import flat_text, head_change, text_change
from proxy.tracked_call import TrackedCall

log = structlog.get_logger(__name__)

MAX_BYTES = 64 << 20
"""Request bodies that are held at most: of each context the last one, those heard of last."""

_LISTS = ("messages", "input")
_PREFIX = context_stream("")


class _LastCall(msgspec.Struct):
    """What a context's last call looked like, and how its answers look when they come back."""

    asked: FollowedCall
    call_id: str
    echoes: frozenset[bytes] = frozenset()


class PrefixLint:
    """Listens to the tracker: what was answered, what closed, and what was found, which it writes down."""

    def __init__(self, tracker: Tracker, max_bytes: int = MAX_BYTES) -> None:
        self._tracker = tracker
        self._max_bytes = max_bytes
        self._size_bytes = 0
        self._last: OrderedDict[str, _LastCall] = OrderedDict()
        self._heads = KnownHeads()
        tracker.listeners.append(self._heard)
        tracker.own_listeners.append(self._tell)

    @property
    def size_bytes(self) -> int:
        """Request bodies that are held."""
        return self._size_bytes

    def begin(self, call: TrackedCall, uid: str) -> None:
        """A call of context `uid` is about to be mapped: compare its texts with those of the last one.

        Never raises: what cannot be compared has no category.
        """
        request = call.request
        last = self._forget(uid)
        call.opens = last is None and not request.fields.one_off
        if last is not None:
            try:
                call.change = change_of(last.asked, request.asked, last.echoes)
            except Exception:
                log.exception("two calls cannot be compared", call=request.call_id)
        self._remember(uid, _LastCall(request.asked, request.call_id))

    def beside(self, call: TrackedCall, uid: str, mapped: MappedPrompt | None) -> Beside | None:
        """Which other context's head this one's is like, if the call is the context's first. Asked once."""
        if call.opens:
            call.opens = False
            try:
                call.beside = self._heads.compared(call.request, uid, mapped)
            except Exception:
                log.exception("a head cannot be compared", call=call.request.call_id)
        return call.beside

    def inherit(self, parent_uid: str, uid: str) -> None:
        """A fork goes on with its parent's last list."""
        last = self._last.get(parent_uid)
        if last is not None and uid not in self._last:
            self._remember(uid, last)

    def forget(self, uid: str) -> None:
        """Drop the last request of a context that there is not."""
        self._forget(uid)

    def _remember(self, uid: str, last: _LastCall) -> None:
        self._last[uid] = last
        self._size_bytes += last.asked.size_bytes
        while self._size_bytes > self._max_bytes:
            self._forget(next(iter(self._last)))

    def _forget(self, uid: str) -> _LastCall | None:
        last = self._last.pop(uid, None)
        self._size_bytes -= last.asked.size_bytes if last is not None else 0
        return last

    def _heard(self, batch: Sequence[RecordedEvent]) -> None:
        for recorded in batch:
            uid = recorded.stream.removeprefix(_PREFIX)
            match recorded.event:
                case CallEnded(call_id=call_id, answers=answers) if uid in self._last:
                    if self._last[uid].call_id == call_id:
                        self._last[uid].echoes = frozenset(a.echo for a in answers if a.echo)
                case ContextClosed(reason=reason):
                    self._forget(uid)
                    state = self._tracker.contexts.states.get(uid)
                    if reason == ERASED and state is not None:
                        self._heads.forget_tenant(state.key.tenant)
                case _:
                    pass

    def _tell(self, batch: Sequence[RecordedEvent]) -> None:
        for recorded in batch:
            if isinstance(recorded.event, PrefixDiverged):
                uid = recorded.stream.removeprefix(_PREFIX)
                state = self._tracker.contexts.states.get(uid)
                _write(recorded.event, uid, state.key.context_id if state is not None else "")


def _write(event: PrefixDiverged, uid: str, context_id: str) -> None:
    """What costs and nobody declared at info, the rest at debug."""
    say = log.info if event.lost_tokens > 0 and not event.declared else log.debug
    fields: dict[str, object] = {"kind": event.kind.value, "message": event.index, "declared": event.declared}
    if event.lost_tokens >= 0:
        fields["lost_tokens"] = event.lost_tokens
    for name, text in (("role", event.role), ("against", event.against)):
        if text:
            fields[name] = text
    say("a prompt left the one before it", ctx=context_id[:MAX_SHOWN], uid=uid, call=event.call_id, **fields)


def change_of(
    old: FollowedCall, new: FollowedCall, echoes: frozenset[bytes] = frozenset()
) -> PrefixBreak | None:
    """In what the first place differs where a call's list leaves the last one; None if it is no category.

    `echoes` are those of the answers to the last one: a list that goes on with another answer has `ANSWER`.
    """
    if old.head != new.head:
        return head_change(old.document, new.document)
    before, after = old.messages, new.messages
    at = next(
        (n for n, (a, b) in enumerate(zip(before, after, strict=False)) if a.fact.digest != b.fact.digest),
        min(len(before), len(after)),
    )
    if at == len(after):
        return None
    if at == len(before):
        echo = after[at].echo
        return PrefixBreak.ANSWER if echo and echoes and echo not in echoes else None
    texts = _text_at(old, at), _text_at(new, at)
    return text_change(*texts) if all(texts) else None


def _text_at(call: FollowedCall, index: int) -> str:
    """A message's texts as they stand in the body; empty for one that another request had brought."""
    own = next((found for name in _LISTS if isinstance(found := call.document.get(name), list)), [])
    at = index - (len(call.messages) - len(own))
    return flat_text(own[at]) if 0 <= at < len(own) else ""
