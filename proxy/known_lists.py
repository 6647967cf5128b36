"""What is kept of each context's last list, and how a call may stand to it."""

from enum import StrEnum
from typing import TypeAlias

import msgspec

from lifecycle.core.ids import DIGEST_BYTES
from proxy.followed_call import FollowedCall
from proxy.harness_identity import Groups
from proxy.list_chains import digests_of, link, num_head, split_digests

Scope: TypeAlias = tuple[str, str]
"""Tenant and model: lists are compared only within one."""


class Relation(StrEnum):
    """How a call stands to a known context: what it does with its list, or what it does beside it."""

    CONTINUES = "continues"
    RETRIES = "retries"
    EDITS = "edits"
    FORKS = "forks"
    COMPACTS = "compacts"
    ONE_OFF = "one_off"
    SUBAGENT = "subagent"
    UNRELATED = "unrelated"


class LineageMatch(msgspec.Struct, frozen=True):
    """What the messages tell. `shared` counts the messages both lists begin with; `reason` names the
    evidence; `lost_tools` says that the context's calls had tools and this one has none."""

    relation: Relation
    reason: str
    context_id: str = ""
    shared: int = 0
    lost_tools: bool = False


class Standing(msgspec.Struct, frozen=True, kw_only=True):
    """How a call stands to one context that was named for it.

    `shared` messages are common to both, `num_head` of which are system prompts; `whole` says that the
    context's whole list is among them, `longer` that the call's goes on behind it. `same_head` says that what
    stands before the messages is the same, `other_system` that the instructions are not, wherever they stand.
    """

    shared: int
    num_head: int
    whole: bool
    longer: bool
    same_head: bool
    other_system: bool
    lost_tools: bool
    has_tools: bool
    other_window: bool

    @property
    def goes_on(self) -> bool:
        """Whether the call's list has messages of the context's own, beyond what all its kind begin with."""
        return self.shared > self.num_head


class KnownList:
    """The last list of one context, and the answer to it once it is there."""

    def __init__(self, scope: Scope, context_id: str, call_id: str, call: FollowedCall, chain: bytes) -> None:
        self.scope = scope
        self.context_id = context_id
        self.call_id = call_id
        self.head = call.head
        self.has_tools = call.has_tools
        self.chain = chain
        self.num_head = num_head(call.messages)
        self.digests = digests_of(call.messages)
        self.system = call.system + self.digests[: self.num_head * DIGEST_BYTES]
        self.groups: Groups = ()
        self.window = ""
        self.one_off = False
        self.beside = ""
        self.in_flight: set[str] = {call_id}
        self.answered = False
        self.echoes: frozenset[bytes] = frozenset()
        self.answer_calls: frozenset[str] = frozenset()
        self.known_calls: dict[str, None] = {}

    @property
    def num_messages(self) -> int:
        return len(self.chain) // DIGEST_BYTES

    def returns_in(self, rest: bytes, shared: int) -> bool:
        """Whether the list's end, and half of what it has behind its first `shared` messages, stand in the
        `rest` of another: digests, one after the other."""
        ours = split_digests(self.digests)[shared:]
        theirs = frozenset(split_digests(rest))
        return bool(ours) and ours[-1] in theirs and 2 * sum(each in theirs for each in ours) >= len(ours)

    @property
    def anchor(self) -> bytes:
        """Digest of the list up to its first message behind the head."""
        return link(self.chain, min(self.num_head + 1, self.num_messages))


def system_of(call: FollowedCall) -> bytes:
    """What tells a call's instructions, beside the list or at its beginning."""
    return call.system + digests_of(call.messages[: num_head(call.messages)])
