"""What the proxy's events say, held against what the harness really did and what lies in the cache."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import pairwise
from typing import Any, TypeAlias

import msgspec

from engine_bridge.mapping.prompts import ChatPrompt
from harnesses.conversation import text_of
from harnesses.engine import Computed
from harnesses.model_server import Exchange
from harnesses.truth import Relation, TrueRequest, contexts
from lifecycle.core.events import (
    CallArrived,
    CallMapped,
    ContextClosed,
    ContextCreated,
    DeclarationMismatched,
    OperationApplied,
    RecordedEvent,
)
from lifecycle.core.ids import KEY_BYTES, context_stream
from lifecycle.core.observations import RemoveMessages, ReplaceMessages

EndsOf: TypeAlias = Callable[[ChatPrompt], Sequence[int]]


class Seen(msgspec.Struct, frozen=True):
    """A call as the proxy followed it: in which context, and where its arrival stands in the log."""

    uid: str
    call_id: str
    attempt: int
    position: int
    at_ns: int
    one_off: bool
    num_tokens: int = -1
    last_key: bytes = b""


class Leftovers(msgspec.Struct, frozen=True):
    """Chunks that lie in the cache: some context refers to them, or none does and they are proven to be of
    the proxy's own calls, or they are not."""

    referred: set[bytes]
    unreferenced: set[bytes]
    unproven: set[bytes]

    @property
    def all(self) -> set[bytes]:
        return self.referred | self.unreferenced | self.unproven


class Verdict(msgspec.Struct, frozen=True, kw_only=True):
    """Counts of a run. Edits are those that really happened to a list on the wire: told exactly by an
    operation, inferred by the proxy in the right context, or missed (it took the list for another's).

    `unfollowed` are requests that the proxy did not follow at all. Of what is dead by the truth and lies in
    the cache, `zombies` are chunks that no context refers to, `held` those of contexts whose lease is not
    over, `unproven` those that the proxy does not know to be of its own calls, and so may not free.
    `lost` are chunks that a living context needed again and found gone; there must be none.
    """

    contexts_right: int = 0
    contexts_wrong: int = 0
    edits_exact: int = 0
    edits_inferred: int = 0
    edits_missed: int = 0
    one_offs_seen: int = 0
    one_offs: int = 0
    ends_seen: int = 0
    ends: int = 0
    unfollowed: int = 0
    unmapped: int = 0
    zombies: int = 0
    held: int = 0
    unproven: int = 0
    lost: int = 0
    requests: int = 0


def calls_seen(events: Sequence[RecordedEvent]) -> list[Seen]:
    """Every call of the log, in order of arrival."""
    one_off = {e.event.uid: e.event.one_off for e in events if isinstance(e.event, ContextCreated)}
    mapped: dict[tuple[str, str, int], CallMapped] = {}
    for each in events:
        if isinstance(each.event, CallMapped):
            mapped[(each.stream, each.event.call_id, each.event.attempt)] = each.event
    seen = []
    for each in events:
        event = each.event
        if not isinstance(event, CallArrived):
            continue
        told = mapped.get((each.stream, event.call_id, event.attempt))
        uid = uid_of(each)
        seen.append(
            Seen(
                uid,
                event.call_id,
                event.attempt,
                each.position,
                event.at_ns,
                event.one_off or one_off.get(uid, False),
                told.num_tokens if told is not None else -1,
                told.keys[-KEY_BYTES:] if told is not None else b"",
            )
        )
    return sorted(seen, key=lambda each: each.at_ns)


def uid_of(recorded: RecordedEvent) -> str:
    """The context whose stream an event stands in."""
    return recorded.stream.removeprefix(context_stream(""))


def matched(seen: Sequence[Seen], exchanges: Iterable[Exchange]) -> dict[int, Seen]:
    """The call of each exchange, by its number: that of the same tokens, else the next that came.

    A request reaches the model after the proxy has recorded or at least begun it, in much the same order.
    """
    found: dict[int, Seen] = {}
    left = list(seen)
    waiting = [each for each in exchanges if each.computed is not None]
    for sure in (True, False):
        for exchange in waiting:
            if exchange.number in found:
                continue
            fits = [each for each in left if (_same_tokens(each, exchange) if sure else each.num_tokens < 0)]
            if fits:
                nearest = min(fits, key=lambda each: abs(each.at_ns - exchange.at_ns))
                found[exchange.number] = nearest
                left.remove(nearest)
    return found


def _same_tokens(seen: Seen, exchange: Exchange) -> bool:
    computed = exchange.computed
    if computed is None or seen.num_tokens != len(computed.prompt):
        return False
    return not seen.last_key or seen.last_key in computed.prompt_keys


def judge(
    requests: Sequence[TrueRequest],
    events: Sequence[RecordedEvent],
    *,
    ended: Iterable[str],
    left: Leftovers,
    removed: Mapping[bytes, int],
    ends_of: EndsOf,
) -> Verdict:
    """The counts of a run. `ended` are the contexts that are truly over; `left` is what the cache still
    holds, `removed` what it once held and gave up, and when. `ends_of` tells where head and messages of a
    prompt end in its tokens.
    """
    calls = matched(calls_seen(events), [each.exchange for each in requests])
    lasting = contexts(requests)
    over = set(ended)
    right = sum(_is_right(ctx, lasting, calls) for ctx in lasting)
    exact, inferred, missed = _edits(lasting, calls, events)
    one_offs = [each for each in requests if each.one_off]
    closed = {uid_of(each) for each in events if isinstance(each.event, ContextClosed)}
    ends = [ctx for ctx in lasting if ctx in over]
    uids = {ctx: {c.uid for e in of if (c := calls.get(e.exchange.number))} for ctx, of in lasting.items()}
    alive = {key for ctx, of in lasting.items() if ctx not in over for key in _keys(of[-1].exchange)}
    dead = {key for each in requests for key in _keys(each.exchange)} - alive
    return Verdict(
        contexts_right=right,
        contexts_wrong=len(lasting) - right,
        edits_exact=exact,
        edits_inferred=inferred,
        edits_missed=missed,
        one_offs_seen=sum(bool((c := calls.get(e.exchange.number)) and c.one_off) for e in one_offs),
        one_offs=len(one_offs),
        ends_seen=sum(bool(uids[ctx]) and uids[ctx] <= closed for ctx in ends),
        ends=len(ends),
        unfollowed=sum(each.exchange.number not in calls for each in requests),
        unmapped=sum(calls[n].num_tokens <= 0 for e in requests if (n := e.exchange.number) in calls),
        zombies=len(dead & left.unreferenced),
        held=len(dead & left.referred),
        unproven=len(dead & left.unproven),
        lost=lost(requests, ends_of) + len(_taken(lasting, over, removed) - left.all),
        requests=len(requests),
    )


def lost(requests: Sequence[TrueRequest], ends_of: EndsOf) -> int:
    """Chunks that a context had at its last request, needed at its next, and that were gone by then.

    Only what was freed since its last request counts: what was dead before may have come alive again without
    being stored again, where the engine itself still had it. Of a list that was edited only the messages
    before the edit live on: what comes in may begin with the same words as what went out, but what went out
    was dead.
    """
    gone = 0
    for each in requests:
        computed = each.exchange.computed
        before = each.before.computed if each.before is not None else None
        if computed is None or before is None:
            continue
        since = each.before.at_ns if each.before is not None else 0
        missing = {key for key, at_ns in computed.missing.items() if at_ns > since} & set(before.keys)
        if missing:
            living = computed.prompt_keys[: _living_chunks(before, computed, ends_of)]
            gone += len(missing & set(living))
    return gone


def _living_chunks(before: Computed, after: Computed, ends_of: EndsOf) -> int:
    """How many chunks at the start of a prompt hold nothing but messages that were in the list before."""
    if before.chat is None or after.chat is None:
        return after.num_prompt_keys
    earlier, later = ([_told(m) for m in each.chat.messages] for each in (before, after) if each.chat)
    shared = next((n for n, (a, b) in enumerate(zip(earlier, later, strict=False)) if a != b), None)
    shared = min(len(earlier), len(later)) if shared is None else shared
    if shared == len(earlier):
        return after.num_prompt_keys
    return ends_of(after.chat)[shared] // after.chunk_tokens


def _told(message: Mapping[str, Any]) -> tuple[object, ...]:
    """What of a message makes it another one."""
    calls = [call.get("function") for call in message.get("tool_calls") or ()]
    return (message.get("role"), text_of(message.get("content")), message.get("tool_call_id"), calls)


def _taken(
    lasting: Mapping[str, Sequence[TrueRequest]], over: set[str], removed: Mapping[bytes, int]
) -> set[bytes]:
    """What was freed of the prompts of the last answered requests of contexts that live on."""
    taken: set[bytes] = set()
    for ctx, of in lasting.items():
        last = of[-1].exchange
        if ctx not in over and last.answered_at and last.computed is not None:
            taken |= {key for key in last.computed.prompt_keys if removed.get(key, 0) > last.at_ns}
    return taken


def _keys(exchange: Exchange) -> tuple[bytes, ...]:
    return exchange.computed.keys if exchange.computed is not None else ()


def _is_right(ctx: str, lasting: Mapping[str, Sequence[TrueRequest]], calls: Mapping[int, Seen]) -> bool:
    """Whether one context of the proxy holds all calls of this one and none of another."""
    uids = {calls[n].uid if (n := e.exchange.number) in calls else "" for e in lasting[ctx]}
    if len(uids) != 1 or "" in uids:
        return False
    others = (e for other, of in lasting.items() if other != ctx for e in of)
    return not any((c := calls.get(e.exchange.number)) and c.uid in uids for e in others)


def _edits(
    lasting: Mapping[str, Sequence[TrueRequest]], calls: Mapping[int, Seen], events: Sequence[RecordedEvent]
) -> tuple[int, int, int]:
    """Edits told, inferred and missed."""
    told = [
        (uid_of(each), each.position)
        for each in events
        if isinstance(each.event, OperationApplied)
        and isinstance(each.event.operation, RemoveMessages | ReplaceMessages)
    ]
    wrong = {
        (uid_of(each), each.event.call_id) for each in events if isinstance(each.event, DeclarationMismatched)
    }
    exact = inferred = missed = 0
    for of in lasting.values():
        for before, after in pairwise(of):
            if after.relation not in (Relation.EDIT, Relation.COMPACTION):
                continue
            one, other = calls.get(before.exchange.number), calls.get(after.exchange.number)
            if one is None or other is None or one.uid != other.uid:
                missed += 1
            elif (other.uid, other.call_id) not in wrong and any(
                uid == other.uid and one.position < at < other.position for uid, at in told
            ):
                exact += 1
            else:
                inferred += 1
    return exact, inferred, missed
