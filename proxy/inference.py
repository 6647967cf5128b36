"""What a call is for, told by the texts it quotes: a summary, a title, a subagent, the life after a summary.

Lineage knows lists that go on. These do not: they begin anew and carry texts of another context. A subagent
is told what stands in a tool call of late; a one-off has no tools and quotes a history; a
list that carries what was answered to such a one-off goes on with the history that it summed up. Only
keyed marks of texts are kept, in memory and bounded.
"""

from collections import Counter, OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice

import msgspec

from proxy.answer_facts import ChoiceFact
from proxy.followed_call import FollowedCall, MessageHasher
from proxy.harness_identity import Groups, groups_differ
from proxy.known_lists import Relation, system_of
from proxy.list_chains import num_head
from proxy.postings import Postings
from proxy.text_marks import marks_of, texts_in_arguments, texts_of

TOLD_BY_TOOL_CALL = "told_by_a_tool_call"
CARRIES_SUMMARY = "carries_a_summary"
QUOTES_HISTORY = "quotes_a_history"

MESSAGES_MARKED = 16
MESSAGES_QUOTING = 64
"""Messages of a call of which marks are kept, and in which quotations are sought: those at the end of its
list, and its first one."""

MESSAGES_BEGUN = 4
"""Messages behind the head in which a summary of what was before stands, or what a subagent is told."""

REPLAYED_ROLES = ("assistant", "tool")
"""Whose messages repeat an answer, and what was done at its word, without being a summary."""

MARKS_A_MESSAGE = 12
MARKS_TOLD = 128
MARKS_A_CONTEXT = 512
MARKS_A_CALL = 256
CALLS_KEPT = 8
"""Tool calls of a context that may have sent somebody: some are answered before who was sent comes."""

ANSWERS_KEPT = 8
"""Answers of a context, and of one-offs beside it, that a later list may carry."""

COMMONPLACE = 8
"""What stands in more contexts than these is boilerplate, and tells of none of them."""

SHARE_TOLD = 0.5
"""Of a subagent's task, or of a tool call's texts, that must be found in the other."""

SHARE_CARRIED = 0.5
"""Of a summary that must be found in the list that goes on with it."""

SHARE_QUOTED = 0.3
"""Of a one-off that must be quoted, unless it quotes `MARKS_QUOTED` pieces."""

MARKS_QUOTED = 4


class Finding(msgspec.Struct, frozen=True):
    """What a call is to the context `context_id`: `reason` names the evidence."""

    relation: Relation
    reason: str
    context_id: str


class _Texts:
    """The marks of one context's texts. Short lists, not deques: an empty one of those takes 0.7 KB."""

    def __init__(self, tenant: str, context_id: str) -> None:
        self.tenant = tenant
        self.context_id = context_id
        self.groups: Groups = ()
        self.head = b""
        self.system = b""
        self.has_tools = False
        self.instructed: frozenset[bytes] = frozenset()
        self.said: dict[bytes, None] = {}
        self.asked: list[frozenset[bytes]] = []
        self.answers: list[tuple[bool, tuple[bytes, ...]]] = []

    @property
    def num_marks(self) -> int:
        return len(self.said) + sum(map(len, self.asked)) + sum(len(a) for _, a in self.answers)


class Inference:
    """The texts of the contexts that were used last, at most `max_marks` marks. Not thread-safe."""

    def __init__(self, hasher: MessageHasher, max_marks: int = 400_000) -> None:
        self._hasher = hasher
        self._max_marks = max_marks
        self._num_marks = 0
        self._unread: dict[tuple[str, str], tuple[FollowedCall, int, Groups]] = {}
        self._texts: OrderedDict[tuple[str, str], _Texts] = OrderedDict()
        self._num_texts: Counter[str] = Counter()
        self._said = Postings()
        self._asked = Postings()
        self._answers = Postings()

    def __len__(self) -> int:
        return len(self._texts)

    def find(self, tenant: str, call: FollowedCall, groups: Groups = ()) -> Finding | None:
        """What the call is for, if its texts tell. Changes nothing.

        Its list must be one that goes on with no other: that is for the lineage to say.
        """
        begin, end = self._begin(call), len(call.written)
        summary = self.summary(tenant, call, groups)
        if summary is not None or begin >= end:
            return summary
        first = self._marks(call, begin, begin + 1, quoting=True)
        told = list(islice(first, MARKS_TOLD if call.has_tools else MARKS_A_CALL))
        quoting = None if call.has_tools else self._one_off(tenant, call, begin, told, groups)
        sent = self._subagent(tenant, call, told, groups)
        for at in range(begin + 1, min(begin + MESSAGES_BEGUN, end)):
            if sent is None and call.messages[self._num_before(call) + at].fact.role == "user":
                told = list(islice(self._marks(call, at, at + 1, quoting=True), MARKS_TOLD))
                sent = self._subagent(tenant, call, told, groups)
        if quoting is None or (sent is not None and sent[1] >= quoting[1]):
            return sent[0] if sent is not None else None
        return quoting[0]

    def summary(self, tenant: str, call: FollowedCall, groups: Groups = ()) -> Finding | None:
        """Whether the list begins with a summary: with what was answered to a call of a context with the same
        tools, or beside it. Then it stands in place of that context's history.

        An answer of the context's own that comes back as such is none.
        """
        self._settle()
        begin, before = self._begin(call), self._num_before(call)
        end = min(begin + MESSAGES_BEGUN, len(call.written))
        found: dict[bytes, bool] = {}
        for at in range(end):
            replayed = call.messages[before + at].fact.role in REPLAYED_ROLES
            for mark in self._marks(call, at, at + 1):
                found[mark] = found.get(mark, True) and replayed
        system, in_head = system_of(call), begin > 0
        for texts, _ in self._carriers(tenant, self._answers, list(found), groups):
            if texts.head != call.head or (texts.system != system and not in_head):
                continue
            for own, answer in reversed(texts.answers):
                carried = sum(not (own and found[mark]) for mark in answer if mark in found)
                if carried >= SHARE_CARRIED * len(answer):
                    return Finding(Relation.COMPACTS, CARRIES_SUMMARY, texts.context_id)
        return None

    def observe_call(
        self, tenant: str, context_id: str, call: FollowedCall, num_old: int, groups: Groups = ()
    ) -> None:
        """The call was given to this context; all but the first `num_old` messages are new to it.

        They are looked at when somebody asks, or when the call is over: nobody waits for it.
        """
        if (tenant, context_id) in self._unread:
            self._read(tenant, context_id)
        self._unread[tenant, context_id] = call, num_old, groups

    def _settle(self) -> None:
        for tenant, context_id in list(self._unread):
            self._read(tenant, context_id)

    def _read(self, tenant: str, context_id: str) -> None:
        call, num_old, groups = self._unread.pop((tenant, context_id))
        texts = self._texts.pop((tenant, context_id), None)
        if texts is None:
            texts = _Texts(tenant, context_id)
            self._num_texts[tenant] += 1
        self._texts[tenant, context_id] = texts
        texts.groups, texts.head, texts.has_tools = groups, call.head, call.has_tools
        if texts.system != (system := system_of(call)) or not texts.said:
            texts.system = system
            texts.instructed = frozenset(self._marks(call, 0, self._begin(call)))
        begin = max(0, max(num_old, num_head(call.messages)) - self._num_before(call))
        self._say(texts, self._marks(call, begin, begin + 1))
        self._say(texts, self._marks(call, max(begin + 1, len(call.written) - MESSAGES_MARKED)))
        self._shrink()

    def observe_end(
        self, tenant: str, context_id: str, choices: Sequence[ChoiceFact], *, own: bool = True
    ) -> None:
        """A call was answered: one of the context's `own`, or of a one-off beside it."""
        if (tenant, context_id) in self._unread:
            self._read(tenant, context_id)
        texts = self._texts.get((tenant, context_id))
        if texts is None:
            return
        for choice in choices:
            marks = marks_of(choice.content or "", self._hasher)
            # What it only repeats is found in lists that carry no answer, too.
            new = (m for m in marks if m not in texts.said and m not in texts.instructed)
            answer = tuple(dict.fromkeys(islice(new, MARKS_A_MESSAGE)))
            if answer:
                self._answer(texts, own, answer)
                if own:
                    self._say(texts, answer)
            for call in choice.tool_calls if own else ():
                told = (m for t in texts_in_arguments(call.arguments) for m in marks_of(t, self._hasher))
                self._ask(texts, frozenset(islice(told, MARKS_A_MESSAGE)))
        self._shrink()

    def forget(self, tenant: str, context_id: str) -> None:
        """The context is over: nothing is beside it any more."""
        self._unread.pop((tenant, context_id), None)
        texts = self._texts.pop((tenant, context_id), None)
        if texts is not None:
            self._drop(texts)

    def forget_tenant(self, tenant: str) -> None:
        """Nothing is known of any text of the tenant any more. Where there is none it costs little."""
        self._settle()
        if self._num_texts[tenant]:
            for owner, context_id in list(self._texts):
                if owner == tenant:
                    self.forget(tenant, context_id)

    # -- evidence -----------------------------------------------------------------------------------------

    def _subagent(
        self, tenant: str, call: FollowedCall, told: Sequence[bytes], groups: Groups
    ) -> tuple[Finding, int] | None:
        """What it is told stands in one of the last tool calls, or the other way round; one that can do
        nothing is told all that it hears."""
        for texts, _ in self._carriers(tenant, self._asked, told, groups):
            for asked in texts.asked:
                hits = len(asked.intersection(told))
                least = min(len(told), len(asked)) if call.has_tools else len(told)
                if hits >= SHARE_TOLD * least:
                    return Finding(Relation.SUBAGENT, TOLD_BY_TOOL_CALL, texts.context_id), hits
        return None

    def _one_off(
        self, tenant: str, call: FollowedCall, begin: int, told: Sequence[bytes], groups: Groups
    ) -> tuple[Finding, int] | None:
        """It has no tools to act with, and quotes somebody who has, or who has other instructions."""
        end = len(call.written)
        more = self._marks(call, max(begin + 1, end - MESSAGES_QUOTING), end, quoting=True)
        marks = list(dict.fromkeys((*told, *islice(more, MARKS_A_CALL))))
        system = system_of(call)
        for texts, hits in self._carriers(tenant, self._said, marks, groups):
            unlike = texts.has_tools or texts.system != system
            if unlike and (hits >= MARKS_QUOTED or hits >= SHARE_QUOTED * len(marks)):
                return Finding(Relation.ONE_OFF, QUOTES_HISTORY, texts.context_id), hits
        return None

    def _carriers(
        self, tenant: str, postings: Postings, marks: Sequence[bytes], groups: Groups
    ) -> Iterator[tuple[_Texts, int]]:
        """Contexts with some of the marks, those with most of them first, the latest among equals."""
        hits: Counter[str] = Counter()
        for mark in marks:
            carriers = postings.get((tenant, mark), COMMONPLACE + 1)
            if len(carriers) <= COMMONPLACE:
                hits.update(carriers)
        for context_id, count in hits.most_common(COMMONPLACE):
            texts = self._texts[tenant, context_id]
            if not groups_differ(texts.groups, groups):
                yield texts, count

    # -- what is kept -------------------------------------------------------------------------------------

    @classmethod
    def _begin(cls, call: FollowedCall) -> int:
        """The first written message behind the head."""
        return max(0, num_head(call.messages) - cls._num_before(call))

    @staticmethod
    def _num_before(call: FollowedCall) -> int:
        """How many messages of the list stand before those of which the texts are at hand."""
        return max(0, len(call.messages) - len(call.written))

    def _marks(
        self, call: FollowedCall, first: int, last: int | None = None, *, quoting: bool = False
    ) -> Iterator[bytes]:
        """Marks of messages, each once a message; as many of each as are kept, all if it may be `quoting`."""
        for message in call.written[first:last]:
            seen: set[bytes] = set()
            for text in texts_of(message):
                for mark in marks_of(text, self._hasher, quoting=quoting):
                    if mark not in seen:
                        seen.add(mark)
                        yield mark
                    if len(seen) == MARKS_A_MESSAGE and not quoting:
                        break
                if len(seen) == MARKS_A_MESSAGE and not quoting:
                    break

    def _say(self, texts: _Texts, marks: Iterable[bytes]) -> None:
        for mark in marks:
            if mark not in texts.said:
                texts.said[mark] = None
                self._num_marks += 1
                self._said.add((texts.tenant, mark), texts.context_id)
        while len(texts.said) > MARKS_A_CONTEXT:
            oldest = next(iter(texts.said))
            del texts.said[oldest]
            self._num_marks -= 1
            self._said.remove((texts.tenant, oldest), texts.context_id)

    def _ask(self, texts: _Texts, asked: frozenset[bytes]) -> None:
        if not asked:
            return
        texts.asked.append(asked)
        self._num_marks += len(asked)
        for mark in asked:
            self._asked.add((texts.tenant, mark), texts.context_id)
        if len(texts.asked) > CALLS_KEPT:
            self._unask(texts)

    def _unask(self, texts: _Texts) -> None:
        asked = texts.asked.pop(0)
        self._num_marks -= len(asked)
        for mark in asked.difference(*texts.asked):
            self._asked.remove((texts.tenant, mark), texts.context_id)

    def _answer(self, texts: _Texts, own: bool, answer: tuple[bytes, ...]) -> None:
        texts.answers.append((own, answer))
        self._num_marks += len(answer)
        for mark in answer:
            self._answers.add((texts.tenant, mark), texts.context_id)
        if len(texts.answers) > ANSWERS_KEPT:
            self._unanswer(texts)

    def _unanswer(self, texts: _Texts) -> None:
        _, answer = texts.answers.pop(0)
        self._num_marks -= len(answer)
        kept = {mark for _, other in texts.answers for mark in other}
        for mark in answer:
            if mark not in kept:
                self._answers.remove((texts.tenant, mark), texts.context_id)

    def _shrink(self) -> None:
        while self._num_marks > self._max_marks and len(self._texts) > 1:
            _, oldest = self._texts.popitem(last=False)
            self._drop(oldest)

    def _drop(self, texts: _Texts) -> None:
        self._num_texts[texts.tenant] -= 1
        if not self._num_texts[texts.tenant]:
            del self._num_texts[texts.tenant]
        while texts.asked:
            self._unask(texts)
        while texts.answers:
            self._unanswer(texts)
        for mark in texts.said:
            self._said.remove((texts.tenant, mark), texts.context_id)
        self._num_marks -= len(texts.said)
        texts.said.clear()
