"""Whose call is this, told by its messages alone: which known list it goes on with, edits or forks.

Three kinds of evidence, strongest first: ids of tool calls that we saw go out, the echo of an answer, and the
longest common beginning of the two lists. A guess here may cost a prefill; it never decides what is deleted,
for the next call's own tokens correct it.
"""

import re
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from enum import StrEnum
from hashlib import blake2b
from itertools import islice
from typing import TypeAlias

import msgspec

from lifecycle.core.ids import DIGEST_BYTES
from proxy.followed_call import FollowedCall, MessageShape

Scope: TypeAlias = tuple[str, str]
"""Tenant and model: lists are compared only within one."""

BY_CALL_IDS = "tool_call_ids"
BY_ECHO = "answer_echoed"
ANSWER_RETURNED = frozenset({BY_CALL_IDS, BY_ECHO})
"""Reasons that say: the context's latest answer came back."""

_HEAD_ROLES = ("system", "developer")
_COUNTED_ID = re.compile(r"[:_.\-]\d{1,4}$")
_MIN_ID_LENGTH = 8
_MAX_SIBLINGS = 256
_MAX_ECHOES = 16


class Relation(StrEnum):
    """How a call's list stands to a known one."""

    CONTINUES = "continues"
    RETRIES = "retries"
    EDITS = "edits"
    FORKS = "forks"
    UNRELATED = "unrelated"


class LineageMatch(msgspec.Struct, frozen=True):
    """What the messages tell. `shared` counts the messages both lists begin with; `reason` names the
    evidence."""

    relation: Relation
    reason: str
    context_id: str = ""
    shared: int = 0


class _Record:
    """The last list of one context, and the answer to it once it is there."""

    def __init__(self, scope: Scope, context_id: str, call_id: str, call: FollowedCall, chain: bytes) -> None:
        self.scope = scope
        self.context_id = context_id
        self.call_id = call_id
        self.head = call.head
        self.chain = chain
        self.num_head = _num_head(call.messages)
        self.digests = b"".join(message.fact.digest for message in call.messages)
        self.in_flight: set[str] = {call_id}
        self.answered = False
        self.echoes: frozenset[bytes] = frozenset()
        self.answer_calls: frozenset[str] = frozenset()
        self.known_calls: dict[str, None] = {}

    @property
    def num_messages(self) -> int:
        return len(self.chain) // DIGEST_BYTES

    @property
    def anchor(self) -> bytes:
        """Digest of the list up to its first message behind the head."""
        return _link(self.chain, min(self.num_head + 1, self.num_messages))


class LineageIndex:
    """The last list of every context we follow, in memory. Not thread-safe; costs microseconds a message.

    The least recently used contexts are forgotten beyond `max_contexts` contexts or `max_messages` messages.
    """

    def __init__(
        self, max_contexts: int = 50_000, max_messages: int = 4_000_000, max_known_calls: int = 512
    ) -> None:
        self._max_contexts = max_contexts
        self._max_messages = max_messages
        self._max_known_calls = max_known_calls
        self._num_messages = 0
        self._records: OrderedDict[tuple[str, str], _Record] = OrderedDict()
        self._lists = _Postings()
        self._anchors = _Postings()
        self._echoes = _Postings()
        self._calls = _Postings()

    def __len__(self) -> int:
        return len(self._records)

    def knows(self, tenant: str, context_id: str) -> bool:
        """Whether a list of this context is known."""
        return (tenant, context_id) in self._records

    def find(self, tenant: str, call: FollowedCall) -> LineageMatch:
        """Where the call belongs. Changes nothing."""
        scope = (tenant, call.model)
        chain = cumulative(call.messages)
        continued, fork = self._by_list(scope, call, chain)
        if continued is not None:
            return continued
        edited = self._by_answer(scope, call, chain)
        if edited is not None:
            return edited
        nearest = self._by_prefix(scope, call, chain)
        if nearest is not None and (fork is None or nearest.shared > fork.shared):
            fork = nearest
        return fork or LineageMatch(Relation.UNRELATED, "no_shared_messages")

    def observe_call(self, tenant: str, context_id: str, call_id: str, call: FollowedCall) -> None:
        """The call was given to this context, by whatever evidence; its list is the context's list now."""
        key = (tenant, context_id)
        old = self._records.get(key)
        record = _Record((tenant, call.model), context_id, call_id, call, cumulative(call.messages))
        if old is not None:
            self._drop(key)
            if old.scope == record.scope:
                record.in_flight |= old.in_flight
                record.known_calls = old.known_calls
        self._records[key] = record
        self._num_messages += record.num_messages
        self._lists.add(record.scope, record.chain[-DIGEST_BYTES:], context_id)
        self._anchors.add(record.scope, record.anchor, context_id)
        for known in record.known_calls:
            self._calls.add(record.scope, _id_bytes(known), context_id)
        self._shrink()

    def observe_end(
        self, tenant: str, context_id: str, call_id: str, answers: Sequence[MessageShape] = ()
    ) -> None:
        """A call is over; `answers` are its choices if it completed, and nothing if it broke off."""
        record = self._records.get((tenant, context_id))
        if record is None:
            return
        record.in_flight.discard(call_id)
        for answer in answers:
            for known in answer.tool_call_ids:
                record.known_calls[known] = None
                self._calls.add(record.scope, _id_bytes(known), context_id)
        for stale in list(
            islice(record.known_calls, max(0, len(record.known_calls) - self._max_known_calls))
        ):
            del record.known_calls[stale]
            self._calls.remove(record.scope, _id_bytes(stale), context_id)
        if call_id == record.call_id and answers:
            self._forget_echoes(record)
            record.answered = True
            record.echoes = frozenset(answer.echo for answer in answers if answer.echo)
            record.answer_calls = frozenset(known for answer in answers for known in answer.tool_call_ids)
            for echo in record.echoes:
                self._echoes.add(record.scope, echo, context_id)

    def forget(self, tenant: str, context_id: str) -> None:
        """The context is closed: nothing belongs to it any more."""
        if (tenant, context_id) in self._records:
            self._drop((tenant, context_id))

    def _by_list(
        self, scope: Scope, call: FollowedCall, chain: bytes
    ) -> tuple[LineageMatch | None, LineageMatch | None]:
        """A context whose whole list this one begins with, the longest first: gone on with, or else
        forked."""
        fork: LineageMatch | None = None
        for length in range(len(call.messages), 0, -1):
            link = _link(chain, length)
            ranked = []
            for record in self._of(scope, self._lists.get(scope, link)):
                match = self._extension(record, call, length)
                if match.relation is not Relation.FORKS or record.head == call.head:
                    ranked.append((_RANK[match.relation], match))
            if not ranked:
                continue
            best = min(ranked, key=lambda pair: pair[0])[1]
            if best.relation is not Relation.FORKS:
                return best, None
            if fork is None and length > _num_head(call.messages):
                fork = best
        return None, fork

    @staticmethod
    def _extension(record: _Record, call: FollowedCall, length: int) -> LineageMatch:
        following = call.messages[length] if length < len(call.messages) else None

        def match(relation: Relation, reason: str) -> LineageMatch:
            return LineageMatch(relation, reason, record.context_id, length)

        if following is not None and record.answered:
            if record.answer_calls.intersection(following.tool_call_ids):
                return match(Relation.CONTINUES, BY_CALL_IDS)
            if following.echo and following.echo in record.echoes:
                return match(Relation.CONTINUES, BY_ECHO)
        if record.in_flight or (record.answered and following is None):
            return match(Relation.FORKS, "list_in_use")
        if following is None:
            return match(Relation.RETRIES, "same_list")
        if not record.answered:
            return match(Relation.CONTINUES, "list_extended")
        if following.fact.role == "assistant":
            return match(Relation.CONTINUES, "answer_rewritten")
        return match(Relation.FORKS, "answer_missing")

    def _by_answer(self, scope: Scope, call: FollowedCall, chain: bytes) -> LineageMatch | None:
        """A context whose latest answer comes back in a list that is otherwise not its own: an edit."""
        ids = _all_call_ids(call.messages)
        best: tuple[int, int, LineageMatch] | None = None
        for order, (record, reason) in enumerate(self._echoing(scope, call, ids)):
            shared = shared_messages(record.chain, chain)
            if shared == 0 and not _has_more_in_common(record, call, ids):
                continue
            candidate = LineageMatch(Relation.EDITS, reason, record.context_id, shared)
            if best is None or (shared, order) > best[:2]:
                best = (shared, order, candidate)
        return best[2] if best is not None else None

    def _echoing(
        self, scope: Scope, call: FollowedCall, ids: frozenset[str]
    ) -> Iterator[tuple[_Record, str]]:
        echoes = [message.echo for message in call.messages if message.echo][-_MAX_ECHOES:]
        for echo in echoes:
            for record in self._of(scope, self._echoes.get(scope, echo)):
                yield record, BY_ECHO
        for known in sorted(ids):
            for record in self._of(scope, self._calls.get(scope, _id_bytes(known))):
                if known in record.answer_calls:
                    yield record, BY_CALL_IDS
                elif not record.answered and not record.in_flight:
                    # its last call broke off: there is no later answer that the list could lack
                    yield record, BY_CALL_IDS

    def _by_prefix(self, scope: Scope, call: FollowedCall, chain: bytes) -> LineageMatch | None:
        """The context that shares most beyond the head, the latest among equals: a fork of it."""
        num_head = _num_head(call.messages)
        if num_head >= len(call.messages):
            return None
        best: LineageMatch | None = None
        for record in self._of(scope, self._anchors.get(scope, _link(chain, num_head + 1))):
            shared = shared_messages(record.chain, chain)
            if record.head == call.head and (best is None or shared > best.shared):
                best = LineageMatch(Relation.FORKS, "shared_beginning", record.context_id, shared)
        return best

    def _of(self, scope: Scope, context_ids: Sequence[str]) -> Iterator[_Record]:
        for context_id in context_ids:
            yield self._records[scope[0], context_id]

    def _shrink(self) -> None:
        while len(self._records) > self._max_contexts or (
            self._num_messages > self._max_messages and len(self._records) > 1
        ):
            self._drop(next(iter(self._records)))

    def _drop(self, key: tuple[str, str]) -> None:
        record = self._records.pop(key)
        self._num_messages -= record.num_messages
        self._lists.remove(record.scope, record.chain[-DIGEST_BYTES:], record.context_id)
        self._anchors.remove(record.scope, record.anchor, record.context_id)
        self._forget_echoes(record)
        for known in record.known_calls:
            self._calls.remove(record.scope, _id_bytes(known), record.context_id)

    def _forget_echoes(self, record: _Record) -> None:
        for echo in record.echoes:
            self._echoes.remove(record.scope, echo, record.context_id)


_RANK = {Relation.CONTINUES: 0, Relation.RETRIES: 1, Relation.FORKS: 2}


class _Postings:
    """Which contexts carry a digest, in order of arrival."""

    def __init__(self) -> None:
        self._entries: dict[tuple[Scope, bytes], dict[str, None]] = {}

    def add(self, scope: Scope, digest: bytes, context_id: str) -> None:
        self._entries.setdefault((scope, digest), {})[context_id] = None

    def remove(self, scope: Scope, digest: bytes, context_id: str) -> None:
        entry = self._entries.get((scope, digest))
        if entry is not None:
            entry.pop(context_id, None)
            if not entry:
                del self._entries[scope, digest]

    def get(self, scope: Scope, digest: bytes) -> Sequence[str]:
        """The latest first, at most `_MAX_SIBLINGS`."""
        return tuple(islice(reversed(self._entries.get((scope, digest), {})), _MAX_SIBLINGS))


def cumulative(messages: Sequence[MessageShape]) -> bytes:
    """For each message the digest of the list up to it, one after the other."""
    chain = bytearray()
    link = b""
    for message in messages:
        link = blake2b(link + message.fact.digest, digest_size=DIGEST_BYTES).digest()
        chain += link
    return bytes(chain)


def shared_messages(first: bytes, second: bytes) -> int:
    """How many messages two cumulative chains have in common at their beginning, in O(log n)."""
    low, high = 0, min(len(first), len(second)) // DIGEST_BYTES
    while low < high:
        middle = (low + high + 1) // 2
        if _link(first, middle) == _link(second, middle):
            low = middle
        else:
            high = middle - 1
    return low


def _link(chain: bytes, length: int) -> bytes:
    return chain[max(0, length - 1) * DIGEST_BYTES : length * DIGEST_BYTES]


def _num_head(messages: Sequence[MessageShape]) -> int:
    return next((i for i, m in enumerate(messages) if m.fact.role not in _HEAD_ROLES), len(messages))


def _all_call_ids(messages: Sequence[MessageShape]) -> frozenset[str]:
    ids = {known for message in messages for known in message.tool_call_ids}
    return frozenset(ids | {message.answers for message in messages if message.answers})


def _has_more_in_common(record: _Record, call: FollowedCall, ids: frozenset[str]) -> bool:
    """Whether an echo alone convinces though the lists begin differently: a random id, or another message."""
    if any(_is_random(known) for known in record.answer_calls & ids):
        return True
    run = record.digests
    known = {run[i : i + DIGEST_BYTES] for i in range(0, len(run), DIGEST_BYTES)}
    return any(m.fact.digest in known for m in call.messages if m.fact.role not in _HEAD_ROLES)


def _id_bytes(call_id: str) -> bytes:
    return call_id.encode("utf-8", "surrogatepass")


def _is_random(call_id: str) -> bool:
    """Whether an id is one of its kind: some engines only count calls (`functions.ls:0`)."""
    return len(call_id) >= _MIN_ID_LENGTH and _COUNTED_ID.search(call_id) is None
