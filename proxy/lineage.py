"""Whose call is this, told by its messages alone: which known list it goes on with, edits or forks.

Three kinds of evidence, strongest first: ids of tool calls that we saw go out, the echo of an answer, and the
longest common beginning of the two lists. A guess here may cost a prefill; it never decides what is deleted,
for the next call's own tokens correct it.
"""

import re
from collections import Counter, OrderedDict
from collections.abc import Container, Iterator, Sequence
from itertools import islice

from lifecycle.core.ids import DIGEST_BYTES
from proxy.followed_call import FollowedCall, MessageShape
from proxy.harness_identity import Groups, groups_differ
from proxy.known_lists import KnownList, LineageMatch, Relation, Scope, Standing, system_of
from proxy.list_chains import (
    HEAD_ROLES,
    cumulative,
    digests_of,
    link,
    num_head,
    shared_messages,
    split_digests,
)
from proxy.postings import Postings

BY_CALL_IDS = "tool_call_ids"
BY_ECHO = "answer_echoed"
ANSWER_RETURNED = frozenset({BY_CALL_IDS, BY_ECHO})
"""Reasons that say: the context's latest answer came back."""

BY_BEGINNING = "shared_beginning"
BY_END = "shared_beginning_and_end"
ONE_OFF_REPEATED = "one_off_repeated"
ONE_OFF_WENT_ON = "one_off_went_on"

_COUNTED_ID = re.compile(r"[:_.\-]\d{1,4}$")
_MIN_ID_LENGTH = 8
_MAX_ECHOES = 16


class LineageIndex:
    """The last list of every context we follow, in memory. Not thread-safe; costs microseconds a message.

    The least recently used contexts are forgotten beyond `max_contexts` contexts or `max_messages` messages.
    Lists whose session-level keys differ never meet.
    """

    def __init__(
        self, max_contexts: int = 50_000, max_messages: int = 4_000_000, max_known_calls: int = 512
    ) -> None:
        self._max_contexts = max_contexts
        self._max_messages = max_messages
        self._max_known_calls = max_known_calls
        self._num_messages = 0
        self._records: OrderedDict[tuple[str, str], KnownList] = OrderedDict()
        self._num_lists: Counter[str] = Counter()
        self._lists = Postings()
        self._anchors = Postings()
        self._echoes = Postings()
        self._calls = Postings()
        self._chained: tuple[FollowedCall, bytes] | None = None

    def __len__(self) -> int:
        return len(self._records)

    def knows(self, tenant: str, context_id: str) -> bool:
        """Whether a list of this context is known."""
        return (tenant, context_id) in self._records

    def is_done(self, tenant: str, context_id: str, recorded: Container[str]) -> bool:
        """Whether each call given to this context is over, the last one among those that were `recorded`."""
        record = self._records.get((tenant, context_id))
        return record is None or (not record.in_flight and record.call_id in recorded)

    def find(self, tenant: str, call: FollowedCall, groups: Groups = ()) -> LineageMatch:
        """Where the call belongs, within what its `groups` allow. Changes nothing that is known."""
        scope = (tenant, call.model)
        chain = self._chain_of(scope, call)
        continued, fork = self._by_list(scope, call, chain, groups)
        if continued is not None:
            return continued
        edited = self._by_answer(scope, call, chain, groups)
        if edited is not None:
            return edited
        nearest = self._by_prefix(scope, call, chain, groups)
        if nearest is not None and (fork is None or nearest.shared > fork.shared):
            fork = nearest
        return fork or LineageMatch(Relation.UNRELATED, "no_shared_messages")

    def standing(self, tenant: str, context_id: str, call: FollowedCall, window: str = "") -> Standing | None:
        """How the call stands to that context; None if no list of it is known."""
        record = self._records.get((tenant, context_id))
        if record is None:
            return None
        chain = self._chain_of((tenant, call.model), call, record)
        shared = shared_messages(record.chain, chain)
        return Standing(
            shared=shared,
            num_head=num_head(call.messages),
            whole=shared == record.num_messages,
            longer=len(call.messages) > shared,
            same_head=record.head == call.head,
            other_system=record.system != system_of(call),
            lost_tools=record.has_tools and not call.has_tools,
            has_tools=record.has_tools,
            other_window=bool(window and record.window and window != record.window),
        )

    def observe_call(
        self,
        tenant: str,
        context_id: str,
        call_id: str,
        call: FollowedCall,
        *,
        groups: Groups = (),
        window: str = "",
        one_off: bool = False,
        beside: str = "",
    ) -> int:
        """The call was given to this context, by whatever evidence; its list is the context's list now.

        A `one_off` serves itself alone, or the context `beside` it. Answers how many of the list's messages
        were the context's before.
        """
        key, scope = (tenant, context_id), (tenant, call.model)
        old = self._records.get(key)
        record = KnownList(scope, context_id, call_id, call, self._chain_of(scope, call, old))
        record.groups, record.window, record.one_off, record.beside = groups, window, one_off, beside
        self._chained = None
        num_old = 0
        if old is not None:
            num_old = shared_messages(old.chain, record.chain)
            self._drop(key)
            if old.scope == record.scope:
                record.in_flight |= old.in_flight
                record.known_calls = old.known_calls
        self._records[key] = record
        self._num_lists[tenant] += 1
        self._num_messages += record.num_messages
        self._lists.add((scope, record.chain[-DIGEST_BYTES:]), context_id)
        self._anchors.add((scope, record.anchor), context_id)
        for known in record.known_calls:
            self._calls.add((scope, _id_bytes(known)), context_id)
        self._shrink()
        return num_old

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
                self._calls.add((record.scope, _id_bytes(known)), context_id)
        for stale in list(
            islice(record.known_calls, max(0, len(record.known_calls) - self._max_known_calls))
        ):
            del record.known_calls[stale]
            self._calls.remove((record.scope, _id_bytes(stale)), context_id)
        if call_id == record.call_id and answers:
            self._forget_echoes(record)
            record.answered = True
            record.echoes = frozenset(answer.echo for answer in answers if answer.echo)
            record.answer_calls = frozenset(known for answer in answers for known in answer.tool_call_ids)
            for echo in record.echoes:
                self._echoes.add((record.scope, echo), context_id)

    def forget(self, tenant: str, context_id: str) -> None:
        """The context is closed: nothing belongs to it any more."""
        if (tenant, context_id) in self._records:
            self._drop((tenant, context_id))

    def forget_tenant(self, tenant: str) -> None:
        """Nothing is known of any list of the tenant any more. Where there is none it costs nothing."""
        self._chained = None
        if self._num_lists[tenant]:
            for key in [key for key in self._records if key[0] == tenant]:
                self._drop(key)

    def _chain_of(self, scope: Scope, call: FollowedCall, near: KnownList | None = None) -> bytes:
        """The cumulative chain of a call's list; most of it is known from the list that it goes on with."""
        if self._chained is not None and self._chained[0] is call:
            return self._chained[1]
        near = near or self._likely(scope, call)
        known, chain = (near.digests, near.chain) if near is not None else (b"", b"")
        self._chained = call, cumulative(digests_of(call.messages), known, chain)
        return self._chained[1]

    def _likely(self, scope: Scope, call: FollowedCall) -> KnownList | None:
        """A context whose answer stands last in the list."""
        for message in reversed(call.messages):
            for known in message.tool_call_ids:
                for context_id in self._calls.get((scope, _id_bytes(known)), 1):
                    return self._records[scope[0], context_id]
            if message.echo:
                for context_id in self._echoes.get((scope, message.echo), 1):
                    return self._records[scope[0], context_id]
                return None
        return None

    def _by_list(
        self, scope: Scope, call: FollowedCall, chain: bytes, groups: Groups
    ) -> tuple[LineageMatch | None, LineageMatch | None]:
        """A context whose whole list this one begins with, the longest first: gone on with, or else
        forked."""
        fork: LineageMatch | None = None
        for length in range(len(call.messages), 0, -1):
            ranked = []
            for record in self._of(scope, self._lists.get((scope, link(chain, length))), groups):
                match = self._extension(record, call, length)
                if match is not None and (match.relation is not Relation.FORKS or record.head == call.head):
                    ranked.append((_RANK[match.relation], match))
            if not ranked:
                continue
            best = min(ranked, key=lambda pair: pair[0])[1]
            if best.relation is not Relation.FORKS:
                return best, None
            if fork is None and length > num_head(call.messages):
                fork = best
        return None, fork

    @classmethod
    def _extension(cls, record: KnownList, call: FollowedCall, length: int) -> LineageMatch | None:
        following = call.messages[length] if length < len(call.messages) else None
        relation, reason = cls._extends(record, following)
        if record.one_off:
            if relation is Relation.CONTINUES:
                return LineageMatch(Relation.UNRELATED, ONE_OFF_WENT_ON)
            if following is not None or not record.beside:
                return None  # nothing of it is kept that could be shared
            return LineageMatch(Relation.ONE_OFF, ONE_OFF_REPEATED, record.beside)
        if relation is Relation.CONTINUES and record.head != call.head:
            relation = Relation.EDITS  # what stands before the messages is another: so is every token
        lost_tools = record.has_tools and not call.has_tools
        return LineageMatch(relation, reason, record.context_id, length, lost_tools)

    @staticmethod
    def _extends(record: KnownList, following: MessageShape | None) -> tuple[Relation, str]:
        """What a list does with a context's whole list that it begins with, by the message behind it."""
        if following is not None and record.answered:
            if record.answer_calls.intersection(following.tool_call_ids):
                return Relation.CONTINUES, BY_CALL_IDS
            if following.echo and following.echo in record.echoes:
                return Relation.CONTINUES, BY_ECHO
        begins = record.num_messages <= record.num_head + 1
        if record.in_flight or (record.answered and following is None and begins):
            return Relation.FORKS, "list_in_use"
        if following is None:
            return Relation.RETRIES, "answer_dropped" if record.answered else "same_list"
        if not record.answered:
            return Relation.CONTINUES, "list_extended"
        if following.fact.role == "assistant":
            return Relation.CONTINUES, "answer_rewritten"
        return Relation.FORKS, "answer_missing"

    def _by_answer(
        self, scope: Scope, call: FollowedCall, chain: bytes, groups: Groups
    ) -> LineageMatch | None:
        """A context whose latest answer comes back in a list that is otherwise not its own: an edit."""
        ids = _all_call_ids(call.messages)
        best: tuple[int, int, LineageMatch] | None = None
        for order, (record, reason) in enumerate(self._echoing(scope, call, ids, groups)):
            shared = shared_messages(record.chain, chain)
            if shared == 0 and not _has_more_in_common(record, call, ids):
                continue
            lost_tools = record.has_tools and not call.has_tools
            candidate = LineageMatch(Relation.EDITS, reason, record.context_id, shared, lost_tools)
            if record.one_off:
                candidate = LineageMatch(Relation.UNRELATED, ONE_OFF_WENT_ON)
            if best is None or (shared, order) > best[:2]:
                best = (shared, order, candidate)
        return best[2] if best is not None else None

    def _echoing(
        self, scope: Scope, call: FollowedCall, ids: frozenset[str], groups: Groups
    ) -> Iterator[tuple[KnownList, str]]:
        echoes = [message.echo for message in call.messages if message.echo][-_MAX_ECHOES:]
        for echo in echoes:
            for record in self._of(scope, self._echoes.get((scope, echo)), groups):
                yield record, BY_ECHO
        for known in sorted(ids):
            for record in self._of(scope, self._calls.get((scope, _id_bytes(known))), groups):
                if known in record.answer_calls:
                    yield record, BY_CALL_IDS
                elif not record.answered and not record.in_flight:
                    # its last call broke off: there is no later answer that the list could lack
                    yield record, BY_CALL_IDS

    def _by_prefix(
        self, scope: Scope, call: FollowedCall, chain: bytes, groups: Groups
    ) -> LineageMatch | None:
        """The context that shares most beyond the head, the latest among equals: a fork of it, or an edit of
        its middle if its end came back as well."""
        begin = num_head(call.messages) + 1
        if begin > len(call.messages):
            return None
        best: LineageMatch | None = None
        for record in self._of(scope, self._anchors.get((scope, link(chain, begin))), groups):
            shared = shared_messages(record.chain, chain)
            same = record.head == call.head and not record.one_off
            if not same or (best is not None and shared <= best.shared):
                continue
            best = LineageMatch(Relation.FORKS, BY_BEGINNING, record.context_id, shared)
            if not record.in_flight and record.returns_in(digests_of(call.messages[shared:]), shared):
                best = LineageMatch(Relation.EDITS, BY_END, record.context_id, shared)
        return best

    def _of(self, scope: Scope, context_ids: Sequence[str], groups: Groups) -> Iterator[KnownList]:
        for context_id in context_ids:
            record = self._records[scope[0], context_id]
            if not groups_differ(record.groups, groups):
                yield record

    def _shrink(self) -> None:
        while len(self._records) > self._max_contexts or (
            self._num_messages > self._max_messages and len(self._records) > 1
        ):
            self._drop(next(iter(self._records)))

    def _drop(self, key: tuple[str, str]) -> None:
        record = self._records.pop(key)
        self._num_lists[key[0]] -= 1
        if not self._num_lists[key[0]]:
            del self._num_lists[key[0]]
        self._num_messages -= record.num_messages
        self._lists.remove((record.scope, record.chain[-DIGEST_BYTES:]), record.context_id)
        self._anchors.remove((record.scope, record.anchor), record.context_id)
        self._forget_echoes(record)
        for known in record.known_calls:
            self._calls.remove((record.scope, _id_bytes(known)), record.context_id)

    def _forget_echoes(self, record: KnownList) -> None:
        for echo in record.echoes:
            self._echoes.remove((record.scope, echo), record.context_id)


_RANK = {
    Relation.CONTINUES: 0,
    Relation.EDITS: 0,
    Relation.RETRIES: 1,
    Relation.UNRELATED: 2,
    Relation.ONE_OFF: 3,
    Relation.FORKS: 4,
}


def _all_call_ids(messages: Sequence[MessageShape]) -> frozenset[str]:
    ids = {known for message in messages for known in message.tool_call_ids}
    return frozenset(ids | {message.answers for message in messages if message.answers})


def _has_more_in_common(record: KnownList, call: FollowedCall, ids: frozenset[str]) -> bool:
    """Whether an echo alone convinces though the lists begin differently: a random id, or another message."""
    if any(_is_random(known) for known in record.answer_calls & ids):
        return True
    known = frozenset(split_digests(record.digests))
    return any(m.fact.digest in known for m in call.messages if m.fact.role not in HEAD_ROLES)


def _id_bytes(call_id: str) -> bytes:
    return call_id.encode("utf-8", "surrogatepass")


def _is_random(call_id: str) -> bool:
    """Whether an id is one of its kind: some engines only count calls (`functions.ls:0`)."""
    return len(call_id) >= _MIN_ID_LENGTH and _COUNTED_ID.search(call_id) is None
