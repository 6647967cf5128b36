"""A call of a recorded agent: its message list, what had happened to its context, what it waits for next.

No text: a message is an id, a role and a length in tokens. Equal prefixes of ids stand for equal prefixes of
tokens. Times are seconds, because the sources have nothing finer.
"""

from collections.abc import Sequence
from enum import StrEnum

import msgspec


class Role(StrEnum):
    """Who speaks. `TOOL` before anybody spoke is the definitions of tools, later the result of one."""

    SYSTEM = "s"
    USER = "u"
    ASSISTANT = "a"
    TOOL = "t"


class ChangeKind(StrEnum):
    """What happened to a context since its last call."""

    CREATE = "create"
    FORK = "fork"
    APPEND = "append"
    REPLACE = "replace"
    REMOVE = "remove"
    ONE_OFF = "one_off"


class Message(msgspec.Struct, frozen=True):
    """A message. `answer_of` is the index of the session's call that generated it; -1 if none did."""

    id: str
    role: Role
    num_tokens: int
    answer_of: int = -1


class Change(msgspec.Struct, frozen=True):
    """One lifecycle event. `start` and `num_messages` count messages of the list before it, for a fork those
    that the child begins with, for an append the new ones."""

    kind: ChangeKind
    start: int = 0
    num_messages: int = 0
    num_tokens: int = 0


class Call(msgspec.Struct, frozen=True, kw_only=True):
    """One inference.

    `parent` is the context that this one was forked from, -1 without one. `gap_seconds` lies between the end
    of the context's previous call and the arrival; it is negative where the two overlapped. `answer` is the
    generated message as it was sent again later, `num_generated` what was generated, dropped reasoning
    included. `closes`: the context's last call; `close_known`: its harness would have known.
    """

    session: int
    index: int
    context: int
    parent: int
    at_seconds: float
    service_seconds: float
    service_estimated: bool
    gap_seconds: float | None
    gap_kind: str
    waits_for: str
    tools: tuple[str, ...]
    messages: tuple[Message, ...]
    answer: Message | None
    num_generated: int
    before: tuple[Change, ...]
    closes: bool
    close_known: bool
    model: str

    @property
    def num_tokens(self) -> int:
        """Length of the prompt, without what a chat template adds."""
        return sum(message.num_tokens for message in self.messages)

    @property
    def is_one_off(self) -> bool:
        return any(change.kind is ChangeKind.ONE_OFF for change in self.before)

    @property
    def list_after(self) -> tuple[Message, ...]:
        """The context's list once the answer is part of it."""
        return self.messages if self.answer is None else (*self.messages, self.answer)


def shared_prefix(one: Sequence[Message], other: Sequence[Message]) -> int:
    """How many messages two lists have in common from the start on."""
    for index, (a, b) in enumerate(zip(one, other, strict=False)):
        if a.id != b.id or a.answer_of != b.answer_of:
            return index
    return min(len(one), len(other))


def changes_between(before: Sequence[Message], after: Sequence[Message]) -> tuple[Change, ...]:
    """What makes the second list out of the first: nothing, or an edit, an append, or both in this order."""
    kept = shared_prefix(before, after)
    lost, new = before[kept:], len(after) - kept
    changes = []
    if lost:
        kind = ChangeKind.REPLACE if new else ChangeKind.REMOVE
        changes.append(Change(kind, kept, len(lost), sum(message.num_tokens for message in lost)))
    if new:
        changes.append(Change(ChangeKind.APPEND, kept, new))
    return tuple(changes)
