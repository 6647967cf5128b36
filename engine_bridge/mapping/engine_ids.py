"""Mapping without a template: the engine's own token ids give the chain, messages only by differences.

For models whose prompts nobody outside the engine can render. Between two calls of a context the tokens that
stayed belong to the messages that both had, the rest to the newest message. That is enough for edits, forks
and closes, because what is alive is decided by chunk keys, and those come from the tokens themselves.

A prompt ends with scaffold for the answer, which the next prompt may write otherwise. So the newest message
ends at a chunk's end, before the scaffold as long as it was seen to be.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Sequence

import numpy as np

from engine_bridge.chunk_keys import extend_keys
from engine_bridge.mapping.ranges import MappedPrompt

MAX_SCAFFOLD_TOKENS = 64
"""More than this changed at a prompt's end is no scaffold: the newest message was edited."""

MAX_CONTEXTS = 10_000
"""Contexts remembered; the least recently used are forgotten and start anew."""


class _Known:
    """The last prompt of a context: its ids, keys, and where each of its messages ended."""

    def __init__(self) -> None:
        self.ids: array[int] = array("I")
        self.keys = bytearray()
        self.ends: tuple[int, ...] = ()


class EngineIdsMapper:
    """Prompts by the engine's ids, one state a context."""

    def __init__(self, chunk_tokens: int) -> None:
        self._chunk_tokens = chunk_tokens
        self._scaffold_tokens = 0
        self._contexts: OrderedDict[str, _Known] = OrderedDict()

    def map(self, state_key: str, num_messages: int, prompt_ids: Sequence[int]) -> MappedPrompt:
        """The next prompt of a context: `prompt_ids` are the engine's, `num_messages` the client's.

        Messages end where they ended before as far as the tokens are the same; of the others all but the
        newest are empty.
        """
        known = self._contexts.setdefault(state_key, _Known())
        self._contexts.move_to_end(state_key)
        ids = array("I", prompt_ids)
        common = _common(known.ids, ids)
        changed = len(known.ids) - common
        if num_messages > len(known.ends) and changed <= MAX_SCAFFOLD_TOKENS:
            self._scaffold_tokens = max(self._scaffold_tokens, changed)
        kept = [end for end in known.ends[: max(num_messages - 1, 0)] if end <= common]
        untold = max(num_messages - 1 - len(kept), 0)
        newest = max(len(ids) - self._scaffold_tokens, 0) // self._chunk_tokens * self._chunk_tokens
        least = kept[-1] if kept else 0
        newest = max(newest, least)
        between = max(min(common, newest), least)
        ends = (*kept, *[between] * untold, newest) if num_messages else ()
        extend_keys(known.keys, ids, common, self._chunk_tokens)
        known.ids, known.ends = ids, ends
        while len(self._contexts) > MAX_CONTEXTS:
            self._contexts.popitem(last=False)
        return MappedPrompt(
            token_ids=ids,
            num_tokens=len(ids),
            num_kept_tokens=common,
            head_end=0,
            message_ends=ends,
            tools_end=0,
            chunk_keys=bytes(known.keys),
            chunk_tokens=self._chunk_tokens,
        )

    def token_ids(self, state_key: str) -> array[int] | None:
        """Ids of the context's last prompt."""
        known = self._contexts.get(state_key)
        return known.ids[:] if known is not None else None


def _common(one: array[int], other: array[int]) -> int:
    length = min(len(one), len(other))
    if not length:
        return 0
    differ = np.flatnonzero(
        np.frombuffer(one, np.uint32)[:length] != np.frombuffer(other, np.uint32)[:length]
    )
    return int(differ[0]) if len(differ) else length
