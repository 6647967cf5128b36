"""Token ids to the cache's chunk keys.

LMCache (0.5.6, `lmcache/v1/multiprocess/token_hasher.py`, algorithm blake3) names a chunk by a chain of
hashes: `h_i = blake3(h_{i-1} || tokens of chunk i as big-endian u32)`, starting from `blake3(i64 0 || u32
0)`. A trailing part of a chunk has no key.
"""

from __future__ import annotations

from array import array

import numpy as np
from blake3 import blake3

from lifecycle.core.ids import KEY_BYTES

CHUNK_TOKENS = 256
"""LMCache's default chunk size in tokens; the server may be started with another."""

ROOT = blake3(bytes(8) + bytes(4)).digest()
"""Parent of every first chunk."""


def extend_keys(
    keys: bytearray, token_ids: array[int], num_kept: int, chunk_tokens: int = CHUNK_TOKENS
) -> None:
    """Make `keys` the concatenated keys of all full chunks of `token_ids`, in place.

    `keys` must be right for a prompt that shares its first `num_kept` tokens with `token_ids`.
    """
    first = min(num_kept // chunk_tokens, len(keys) // KEY_BYTES)
    del keys[first * KEY_BYTES :]
    last = len(token_ids) // chunk_tokens
    if first >= last:
        return
    wire = (
        np.frombuffer(token_ids, np.uint32)[first * chunk_tokens : last * chunk_tokens]
        .astype(">u4")
        .tobytes()
    )
    parent = bytes(keys[-KEY_BYTES:]) if keys else ROOT
    width = chunk_tokens * 4
    for at in range(0, len(wire), width):
        parent = blake3(parent + wire[at : at + width]).digest()
        keys += parent


def chunk_keys(token_ids: array[int], chunk_tokens: int = CHUNK_TOKENS) -> bytes:
    """Concatenated keys of all full chunks of a prompt."""
    keys = bytearray()
    extend_keys(keys, token_ids, 0, chunk_tokens)
    return bytes(keys)
