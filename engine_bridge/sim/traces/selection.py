"""Cuts a trace to what a machine can bear, so that what is left is a trace again.

**Lists.** Walking a list from its start, a message is kept if the kept ones do not pass the limit with it;
otherwise it is dropped, whole. What is kept of a list depends only on what stands before it, so lists with a
common beginning still have one: an append stays an append or becomes a repetition, an edit an edit. A call
of whose list nothing is kept is left out.

**Answers** count with at most the tokens that a replay will generate.

**Calls.** Of each session the first ones, until all together are enough. Contexts whose end lies behind the
cut stay open.
"""

from collections.abc import Iterable, Iterator

import msgspec

from engine_bridge.sim.traces.calls import Call, Change, ChangeKind, Message, changes_between, shared_prefix


class Caps(msgspec.Struct, frozen=True, kw_only=True):
    """Upper limits, each of them inclusive.

    `num_new_tokens` counts what no earlier list of the same session began with, and the answers:
    the tokens that an unbounded cache would still have to compute.
    """

    num_sessions: int = 1_000_000
    num_session_calls: int = 1_000_000
    num_calls: int = 300
    num_list_tokens: int = 24_000
    num_new_tokens: int = 2_000_000
    num_answer_tokens: int = 16


def capped(calls: Iterable[Call], caps: Caps) -> Iterator[Call]:
    """The calls that the limits leave, each with its list, its answer and its changes as they now are."""
    cut: _Session | None = None
    num_sessions = num_calls = num_new_tokens = 0
    for call in calls:
        if cut is None or cut.session != call.session:
            num_sessions += 1
            if num_sessions > caps.num_sessions:
                return
            cut = _Session(call.session, caps)
        if cut.num_calls == caps.num_session_calls:
            continue
        kept = cut.call(call)
        if kept is None:
            continue
        num_calls += 1
        num_new_tokens += cut.new_tokens(kept)
        if num_calls > caps.num_calls or num_new_tokens > caps.num_new_tokens:
            return
        yield kept


class _Session:
    def __init__(self, session: int, caps: Caps) -> None:
        self.session = session
        self.num_calls = 0
        self._caps = caps
        self._last_of: dict[int, tuple[Message, ...]] = {}
        self._seen: set[int] = set()

    def call(self, call: Call) -> Call | None:
        messages = self._fitting(call.messages)
        if not messages:
            return None
        answer = None if call.answer is None else self._shortened(call.answer)
        kept = msgspec.structs.replace(
            call,
            messages=messages,
            answer=answer,
            num_generated=min(call.num_generated, self._caps.num_answer_tokens),
            before=self._changes(call, messages),
        )
        self._last_of[call.context] = kept.list_after
        self.num_calls += 1
        return kept

    def _shortened(self, message: Message) -> Message:
        if message.answer_of < 0 or message.num_tokens <= self._caps.num_answer_tokens:
            return message
        return msgspec.structs.replace(message, num_tokens=self._caps.num_answer_tokens)

    def _fitting(self, messages: Iterable[Message]) -> tuple[Message, ...]:
        room = self._caps.num_list_tokens
        kept = []
        for message in map(self._shortened, messages):
            if message.num_tokens <= room:
                room -= message.num_tokens
                kept.append(message)
        return tuple(kept)

    def _changes(self, call: Call, messages: tuple[Message, ...]) -> tuple[Change, ...]:
        last = self._last_of.get(call.context)
        if last is not None:
            return changes_between(last, messages)
        one_off = (Change(ChangeKind.ONE_OFF),) if call.is_one_off else ()
        for change in call.before:
            if change.kind is ChangeKind.FORK and call.parent in self._last_of:
                theirs = self._last_of[call.parent]
                inherited = self._fitting(call.messages[: change.num_messages])
                kept = min(shared_prefix(theirs, messages), len(inherited))
                return (Change(ChangeKind.FORK, 0, kept), *one_off)
        return (Change(ChangeKind.CREATE), *one_off)

    def new_tokens(self, call: Call) -> int:
        """Tokens of the list that no earlier list began with, and of the answer. Counted once."""
        new = call.num_generated
        prefix = 0
        for message in call.messages:
            prefix = hash((prefix, message.id, message.answer_of))
            if prefix not in self._seen:
                self._seen.add(prefix)
                new += message.num_tokens if message.answer_of < 0 else 0
        return new
