"""Heads of contexts that began lately: does a new one begin as another did, but for little?

A head is what agents of a kind have in common: tools and system prompt. Two that differ only in a date or a
nonce share no KV behind it, and the agents cannot know.
"""

from collections import OrderedDict, deque
from collections.abc import Iterator, Sequence
from hashlib import blake2b

import msgspec

from engine_bridge.mapping.ranges import MappedPrompt
from lifecycle.core.ids import KEY_BYTES
from lifecycle.core.observations import Beside
from lifecycle.core.prefix_loss import shared_chunks
from lifecycle.vocabulary import PrefixBreak
from proxy.followed_call import FollowedCall
from proxy.text_change import flat_text, head_text, text_change, tools_change
from proxy.tracked_call import CallRequest

MAX_BYTES = 16 << 20
"""Text of heads that is held at most."""

MAX_TEXT = 1 << 20
"""Characters of a head that is looked at; a longer one is no prompt that agents share."""

HEADS_PER_SHAPE = 4
"""Different heads of one shape that a new one is compared with, the latest."""

LITTLE_LINES = 3
LITTLE_SHARE = 0.05
"""How many of a prompt's lines may differ, or which share of them: beyond that it is another prompt."""

_SYSTEM_ROLES = ("system", "developer")


class _Head(msgspec.Struct, frozen=True):
    """What stands beside the messages and each system message, and the keys of the whole chunks of it all."""

    uid: str
    tools: object
    texts: tuple[str, ...]
    keys: bytes | None

    @property
    def size(self) -> int:
        return sum(map(len, self.texts)) + len(self.keys or b"")


class KnownHeads:
    """Compares within one tenant, model and shape: names of the tools, number of system messages.

    Not thread-safe. Costs a pass over the head's text where a context begins.
    """

    def __init__(self, max_bytes: int = MAX_BYTES) -> None:
        self._max_bytes = max_bytes
        self._size = 0
        self._heads: OrderedDict[tuple[str, bytes], deque[_Head]] = OrderedDict()

    def compared(self, request: CallRequest, uid: str, mapped: MappedPrompt | None) -> Beside | None:
        """The nearest to the head of this first call, if both could have shared more; remembers this one."""
        asked = request.asked
        texts = tuple(_texts(asked))
        tools = asked.document.get("tools")
        if not (any(texts) or tools) or sum(map(len, texts)) > MAX_TEXT:
            return None
        head = _Head(uid, tools, texts, _keys(asked, mapped))
        key = (request.tenant, _shape(request, head))
        known = self._heads.setdefault(key, deque())
        self._heads.move_to_end(key)
        same = next((each for each in known if each.texts == texts and each.tools == head.tools), None)
        if same is not None:
            return None
        near = min(
            ((lines, number) for number, each in enumerate(known) if (lines := _differing(each, head)) >= 0),
            default=None,
        )
        found = _beside(known[near[1]], head, mapped) if near is not None else None
        self._add(key, known, head)
        return found

    def forget_tenant(self, tenant: str) -> None:
        """Drop everything of a tenant."""
        for key in [key for key in self._heads if key[0] == tenant]:
            self._size -= sum(head.size for head in self._heads.pop(key))

    def _add(self, key: tuple[str, bytes], known: deque[_Head], head: _Head) -> None:
        known.append(head)
        self._size += head.size
        if len(known) > HEADS_PER_SHAPE:
            self._size -= known.popleft().size
        while self._size > self._max_bytes and len(self._heads) > 1:
            _, gone = self._heads.popitem(last=False)
            self._size -= sum(each.size for each in gone)


def _texts(asked: FollowedCall) -> Iterator[str]:
    """What stands beside the messages, then each system message that the list begins with."""
    yield head_text(asked.document)
    yield from (flat_text(message) for message in _system_messages(asked))


def _system_messages(asked: FollowedCall) -> Sequence[object]:
    own = next((f for name in ("messages", "input") if isinstance(f := asked.document.get(name), list)), [])
    if len(own) != len(asked.messages):
        return ()
    number = next((n for n, m in enumerate(asked.messages) if m.fact.role not in _SYSTEM_ROLES), len(own))
    return own[:number]


def _keys(asked: FollowedCall, mapped: MappedPrompt | None) -> bytes | None:
    if mapped is None:
        return None
    number = len(_system_messages(asked))
    end = mapped.message_ends[number - 1] if number else mapped.head_end
    return mapped.chunk_keys[: end // mapped.chunk_tokens * KEY_BYTES]


def _shape(request: CallRequest, head: _Head) -> bytes:
    names = []
    for tool in head.tools if isinstance(head.tools, list) else ():
        inner = tool.get("function") if isinstance(tool, dict) else None
        name = (inner if isinstance(inner, dict) else tool if isinstance(tool, dict) else {}).get("name")
        names.append(str(name))
    parts = [request.namespace.stream(), str(len(head.texts)), *sorted(names)]
    return blake2b("\0".join(parts).encode("utf-8", "surrogatepass"), digest_size=16).digest()


def _differing(one: _Head, other: _Head) -> int:
    """Lines that differ, -1 for too many to be the same prompt."""
    differing = total = 0
    for a, b in zip(one.texts, other.texts, strict=True):
        if a == b:
            continue
        before, after = a.split("\n"), b.split("\n")
        if len(before) != len(after):
            return -1
        total += len(after)
        differing += sum(x != y for x, y in zip(before, after, strict=True))
    return differing if differing <= max(LITTLE_LINES, LITTLE_SHARE * total) else -1


def _beside(known: _Head, head: _Head, mapped: MappedPrompt | None) -> Beside | None:
    shared = lost = -1
    if mapped is not None and known.keys is not None and head.keys is not None:
        size = mapped.chunk_tokens
        kept = shared_chunks(known.keys, head.keys)
        shared = kept * size
        lost = (min(len(known.keys), len(head.keys)) // KEY_BYTES - kept) * size
        if lost <= 0:
            return None
    kind = tools_change(known.tools, head.tools)
    if kind is not None:
        return Beside(uid=known.uid, kind=kind, index=-1, shared_tokens=shared, lost_tokens=lost)
    at = next(n for n, (a, b) in enumerate(zip(known.texts, head.texts, strict=True)) if a != b)
    kind = text_change(known.texts[at], head.texts[at]) or PrefixBreak.SYSTEM
    role = "system" if at else ""
    return Beside(uid=known.uid, kind=kind, index=at - 1, role=role, shared_tokens=shared, lost_tokens=lost)
