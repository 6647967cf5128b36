"""What the embedded engine reports of its caches, with the fields that vLLM 0.32.0 and LMCache 0.5.6 give.

Listeners get objects; who publishes them gives them vLLM's wire form. Of medium GPU are the engine's own
blocks, reported at the end of the step that filled them; of medium CPU the chunks in L1, one event a chunk,
reported when the chunk can be read. L2 is never reported.
"""

from collections.abc import Callable, Sequence
from typing import Literal, TypeAlias

import msgspec

Medium: TypeAlias = Literal["GPU", "CPU"]


class BlockStored(msgspec.Struct, frozen=True, kw_only=True):
    """Blocks entered a tier, in chain order. Hashes have 32 bytes; a chunk's hash is its key.

    `parent_block_hash` is None for what begins a prompt. `token_ids` are those of these blocks alone.
    """

    block_hashes: tuple[bytes, ...]
    parent_block_hash: bytes | None
    token_ids: tuple[int, ...]
    block_size: int
    medium: Medium
    session_id: str | None = None
    salt: str = ""


class BlockRemoved(msgspec.Struct, frozen=True, kw_only=True):
    """Blocks left a tier."""

    block_hashes: tuple[bytes, ...]
    medium: Medium


class AllBlocksCleared(msgspec.Struct, frozen=True):
    """The engine's prefix cache was reset."""


class EngineRestarted(msgspec.Struct, frozen=True, kw_only=True):
    """A new engine process, HBM empty. On the wire only the sequence numbers tell: they restart at 0."""

    incarnation: int


KvEvent: TypeAlias = BlockStored | BlockRemoved | AllBlocksCleared | EngineRestarted

KvListener: TypeAlias = Callable[[int, Sequence[KvEvent]], None]
"""Called with the time in nanoseconds and what happened then, in order. Must not call the engine."""
