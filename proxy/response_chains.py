"""What was said before, by the id of a response: requests of the Responses API may name it instead of
sending it.

Kept in memory only and bounded. What is not known here, after a restart or because it was long ago, is not
guessed: the call goes through, and is followed without a mapping.
"""

from collections import OrderedDict

import msgspec

from engine_bridge.errors import Unmappable
from engine_bridge.mapping.responses import ResponsesPrompt, remembered
from engine_bridge.mapping.service import Prompt
from proxy.answer_facts import AnswerFacts
from proxy.followed_call import Conversation, FollowedCall, MessageHasher, MessageShape

MAX_BYTES = 256 * 1024 * 1024
"""Text of all conversations together, each counted whole."""

ITEM_BYTES = 256
"""Rough cost of an item besides its text."""

UNKNOWN_ROLE = "unknown"
UNKNOWN = "what previous_response_id stands for is not known"


class ResponseChains:
    """The conversations behind responses, of all tenants. A conversation that was gone on with goes first."""

    def __init__(self, hasher: MessageHasher, max_bytes: int = MAX_BYTES) -> None:
        self._hasher = hasher
        self._max_bytes = max_bytes
        self._known: OrderedDict[tuple[str, str], Conversation] = OrderedDict()
        self.size_bytes = 0

    def __len__(self) -> int:
        return len(self._known)

    def resolved(self, tenant: str, call: FollowedCall) -> FollowedCall:
        """The call with what it goes on with before its own messages; every other call as it is."""
        own = call.conversation
        if own is None or not own.follows:
            return call
        before = self._known.get((tenant, own.follows)) or self._unknown(own.follows)
        shapes = (*before.shapes, *_marked(own.shapes, own.follows))
        whole = msgspec.structs.replace(
            own,
            items=(*before.items, *own.items),
            shapes=shapes,
            size_bytes=before.size_bytes + own.size_bytes,
            known=before.known,
        )

        def prompt() -> Prompt:
            if not before.known:
                raise Unmappable(UNKNOWN)
            given = call.prompt()
            return given.following(before.items) if isinstance(given, ResponsesPrompt) else given

        return msgspec.structs.replace(call, messages=shapes, prompt=prompt, conversation=whole)

    def remember(self, tenant: str, call: FollowedCall, facts: AnswerFacts) -> None:
        """The call was answered: what its response's id stands for from now on."""
        asked = call.conversation
        if asked is None or not asked.kept or not facts.response_id:
            return
        items = remembered(asked.items, facts.answer_texts)
        texts = items[len(items) - len(facts.answer_texts) :]
        stay = [shape for shape in asked.shapes if shape.fact.role != "system"]
        answers = tuple(self._hasher.shape(item.message) for item in texts)
        key = (tenant, facts.response_id)
        self._forget(key)
        self._known[key] = conversation = Conversation(
            items=items,
            shapes=(*stay, *_marked(answers, facts.response_id)),
            size_bytes=asked.size_bytes + sum(map(len, facts.answer_texts)) + ITEM_BYTES * len(items),
            known=asked.known,
        )
        self.size_bytes += conversation.size_bytes
        if (tenant, asked.follows) in self._known:
            self._known.move_to_end((tenant, asked.follows), last=False)
        while self.size_bytes > self._max_bytes:
            self._forget(next(iter(self._known)))

    def forget_tenant(self, tenant: str) -> None:
        """Drop everything that a tenant said."""
        for key in [key for key in self._known if key[0] == tenant]:
            self._forget(key)

    def _forget(self, key: tuple[str, str]) -> None:
        old = self._known.pop(key, None)
        self.size_bytes -= old.size_bytes if old is not None else 0

    def _unknown(self, response_id: str) -> Conversation:
        """Stands for what is not known, and only for that: no other list begins with it."""
        return Conversation(shapes=(self._hasher.text(UNKNOWN_ROLE, response_id),), known=False)


def _marked(shapes: tuple[MessageShape, ...], response_id: str) -> tuple[MessageShape, ...]:
    """The first of what comes with or behind a response tells that it does."""
    if not shapes:
        return ()
    first = shapes[0]
    ids = (*first.tool_call_ids, response_id)
    return (msgspec.structs.replace(first, tool_call_ids=ids), *shapes[1:])
