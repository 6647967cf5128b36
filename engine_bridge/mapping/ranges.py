"""Which tokens belong to which message.

The owner of a character is the latest client message that it belongs to; text of the template itself
belongs to the loop iteration that writes it. Ranges are taken of the running maximum of owners, so that
they follow one another: head, message 0, message 1, …, generation prompt. The tokens before the end of
message i therefore hold nothing of a later message.
"""

from __future__ import annotations

import bisect
from array import array

import msgspec
import numpy as np

from engine_bridge.chunk_keys import CHUNK_TOKENS
from lifecycle.core.observations import PromptMapping
from lifecycle.vocabulary import MappingKind


class MappedPrompt(msgspec.Struct, frozen=True, kw_only=True):
    """The tokens of a prompt, by client message.

    `message_ends[i]`: token position at which message i ends, monotone; `head_end`: where the text before
    message 0 ends; the generation prompt is `[message_ends[-1], num_tokens)`. A token that straddles a
    boundary belongs to the later side. `tools_end`: where the text of the tool definitions ends, 0 without
    tools. `num_kept_tokens`: leading tokens that are the previous prompt's. `chunk_keys`: concatenated keys
    of all full chunks.
    """

    token_ids: array[int]
    num_tokens: int
    num_kept_tokens: int
    head_end: int
    message_ends: tuple[int, ...]
    tools_end: int
    chunk_keys: bytes
    chunk_tokens: int = CHUNK_TOKENS

    def observed(self) -> PromptMapping:
        """What the lifecycle is told of this prompt: no token ids."""
        return PromptMapping(
            kind=MappingKind.EXACT,
            num_tokens=self.num_tokens,
            head_end=self.head_end,
            tools_end=self.tools_end,
            message_ends=self.message_ends,
            chunk_size=self.chunk_tokens,
            chunk_keys=self.chunk_keys,
        )


class Segments:
    """Owners of a text: from `starts[k]` on, characters belong to client message `owners[k]` (-1: to
    nobody).
    """

    def __init__(self) -> None:
        self.starts: array[int] = array("I")
        self.owners: array[int] = array("i")

    def copy(self) -> Segments:
        twin = Segments()
        twin.starts, twin.owners = self.starts[:], self.owners[:]
        return twin

    def latest_owner(self, kept: int) -> int:
        """Greatest owner among the first `kept` characters."""
        count = bisect.bisect_left(self.starts, kept)
        return max(self.owners[:count], default=-1)

    def replace_tail(self, kept: int, segments: list[tuple[int, int]]) -> None:
        """Forget what starts at or after character `kept` and append."""
        count = bisect.bisect_left(self.starts, kept)
        del self.starts[count:], self.owners[count:]
        self.starts.extend(start for start, _ in segments)
        self.owners.extend(owner for _, owner in segments)

    def char_ends(self, num_messages: int, body_end: int) -> np.ndarray:
        """Character ends of the head and of each message: `num_messages + 1` monotone positions."""
        if not self.starts:
            return np.full(num_messages + 1, body_end, np.int64)
        highest = np.maximum.accumulate(np.frombuffer(self.owners, np.int32))
        first_later = np.searchsorted(highest, np.arange(-1, num_messages), side="right")
        starts = np.append(np.frombuffer(self.starts, np.uint32).astype(np.int64), body_end)
        ends: np.ndarray = np.minimum(starts[first_later], body_end)
        return ends
