"""Beginnings that come back: system prompts and tool definitions that one agent after the other starts with.

Between two such agents no context refers to them, so they are dead by the letter, and freeing them makes the
next agent compute them again. Two things tell them apart: a context that was not forked from their last
holder refers to them, or they were freed and asked for again soon after. What came back once is kept for a
while after its last holder let go, and freed then.
"""

from collections import OrderedDict
from collections.abc import Iterable

import msgspec

from lifecycle.core.ids import split_keys

MAX_KEYS = 50_000
"""Chunks of a namespace that are remembered as freed, and as coming back: the longest ago are forgotten."""


class RecurrenceFacts(msgspec.Struct, frozen=True):
    """What a snapshot keeps: keys that were freed, with when, and keys that came back; oldest first."""

    freed: tuple[tuple[bytes, int], ...] = ()
    recurring: tuple[bytes, ...] = ()


class Recurrence:
    """One namespace's memory. `keep_ns` is how long what comes back is kept, 0 for not at all."""

    def __init__(self, keep_ns: int) -> None:
        self._keep_ns = keep_ns
        self._freed: OrderedDict[bytes, int] = OrderedDict()
        self._recurring: OrderedDict[bytes, None] = OrderedDict()

    def freed(self, keys: bytes, now_ns: int) -> None:
        """Dead chunks were freed, or would have been."""
        if not self._keep_ns:
            return
        for key in split_keys(keys):
            self._freed.pop(key, None)
            self._freed[key] = now_ns
        while len(self._freed) > MAX_KEYS:
            self._freed.popitem(last=False)

    def came(self, keys: bytes, now_ns: int) -> None:
        """A context refers to chunks that the books did not hold."""
        if self._freed:
            back = [key for key in split_keys(keys) if key in self._freed]
            self._remember(key for key in back if now_ns - self._freed.pop(key) <= self._keep_ns)

    def shared(self, keys: bytes) -> None:
        """A context refers to chunks of another one that it is no fork of."""
        if self._keep_ns:
            self._remember(split_keys(keys))

    def kept_until_ns(self, keys: bytes, now_ns: int) -> int:
        """Until when chunks that died now are kept; 0 for those that nobody began with before."""
        if not self._recurring or not any(key in self._recurring for key in split_keys(keys)):
            return 0
        return now_ns + self._keep_ns

    def facts(self) -> RecurrenceFacts:
        """Everything remembered."""
        return RecurrenceFacts(tuple(self._freed.items()), tuple(self._recurring))

    def put(self, facts: RecurrenceFacts) -> None:
        """Remember what a snapshot kept."""
        self._freed.update(facts.freed)
        self._recurring.update(dict.fromkeys(facts.recurring))

    def _remember(self, keys: Iterable[bytes]) -> None:
        for key in keys:
            self._recurring[key] = None
            self._recurring.move_to_end(key)
        while len(self._recurring) > MAX_KEYS:
            self._recurring.popitem(last=False)
