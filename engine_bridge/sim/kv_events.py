"""What the embedded engine reports of its memory, with vLLM's words (`distributed/kv_events.py`, 0.32.0).

Medium GPU is HBM and its blocks are the engine's own, medium CPU is L1 and its blocks are chunks of the cache
under their keys. L2 reports nothing.
"""

from collections.abc import Callable, Sequence
from typing import Literal, TypeAlias

import msgspec

Medium: TypeAlias = Literal["GPU", "CPU"]


class BlockStored(msgspec.Struct, frozen=True, kw_only=True):
    """Blocks in chain order. `token_ids` are theirs alone, `len(block_hashes) * block_size` of them.

    `session_id` and `salt` of the request that computed them are known for the GPU only.
    """

    block_hashes: tuple[bytes, ...]
    parent_block_hash: bytes | None
    token_ids: tuple[int, ...]
    block_size: int
    medium: Medium
    session_id: str | None = None
    salt: str = ""


class BlockRemoved(msgspec.Struct, frozen=True, kw_only=True):
    """Blocks left a medium; another copy may live."""

    block_hashes: tuple[bytes, ...]
    medium: Medium


class AllBlocksCleared(msgspec.Struct, frozen=True):
    """Everything left HBM."""


class EngineRestarted(msgspec.Struct, frozen=True, kw_only=True):
    """A new engine process: its stream begins anew."""

    incarnation: int


KvEvent: TypeAlias = BlockStored | BlockRemoved | AllBlocksCleared | EngineRestarted

KvListener: TypeAlias = Callable[[int, Sequence[KvEvent]], None]
"""Told of events in order, with the engine's time in nanoseconds."""
