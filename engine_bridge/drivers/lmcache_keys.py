"""Chunk keys as LMCache's multi-process server addresses them: one chunk is several objects.

A chunk is stored once per KV rank (tensor and pipeline parallel workers) and once per object group (hybrid
models split their layers by attention window). All of them carry the same chunk hash. The salt stands beside
the hash, not in it: the same tokens under two salts have equal hashes and different objects.
Source: LMCache 0.5.6, `lmcache/v1/distributed/api.py` (`ObjectKey`, `ComputeKVRank`).
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import msgspec

MAX_KEYS_PER_REQUEST = 10_000
"""LMCache refuses larger deletes; we keep lookups to the same size."""

Item = TypeVar("Item")


class CannotExpand(Exception):
    """The objects of a chunk cannot be named, so nothing may be deleted; the message says what is missing."""


class ObjectKey(msgspec.Struct, frozen=True, order=True):
    """One stored object, in LMCache's JSON form. `chunk_hash_hex` is the chunk key in hex."""

    chunk_hash_hex: str
    model_name: str
    kv_rank: int
    object_group_id: int = 0
    cache_salt: str = ""

    @property
    def chunk_key(self) -> bytes:
        return bytes.fromhex(self.chunk_hash_hex)


class Layout(msgspec.Struct, frozen=True, kw_only=True):
    """How many objects a chunk of one model is, and which.

    `world_sizes` holds more than one where differently split engines serve the same model; the objects are
    then the union. `bytes_per_token` is what one token takes over all ranks and groups, 0 if unknown.
    """

    world_sizes: frozenset[int]
    object_groups: frozenset[int]
    bytes_per_token: int = 0

    def kv_ranks(self) -> list[int]:
        """The packed rank numbers, ascending."""
        return sorted(pack_kv_rank(world, rank) for world in self.world_sizes for rank in range(world))

    def united(self, other: "Layout") -> "Layout":
        """Every object that either names."""
        return Layout(
            world_sizes=self.world_sizes | other.world_sizes,
            object_groups=self.object_groups | other.object_groups,
            bytes_per_token=max(self.bytes_per_token, other.bytes_per_token),
        )

    def objects_per_chunk(self) -> int:
        return sum(self.world_sizes) * len(self.object_groups)


def pack_kv_rank(world_size: int, rank: int) -> int:
    """LMCache's rank number: world size, rank, local world size and local rank, a byte each.

    LMCache itself fans a lookup out with the local values equal to the global ones.
    """
    return world_size << 24 | rank << 16 | world_size << 8 | rank


def expand(keys: Iterable[bytes], model_name: str, salt: str, layout: Layout) -> list[ObjectKey]:
    """All objects of the chunks, chunk by chunk in the order given."""
    ranks = layout.kv_ranks()
    groups = sorted(layout.object_groups)
    return [
        ObjectKey(key.hex(), model_name, rank, group, salt)
        for key in keys
        for group in groups
        for rank in ranks
    ]


def layout_from_status(statuses: Iterable[Mapping[str, Any]], model_name: str) -> Layout:
    """Layout by the word of the cache servers: `GET /status` names every registered engine worker.

    Raises `CannotExpand` when no server has the model registered.
    """
    worlds: set[int] = set()
    groups: set[int] = set()
    bytes_per_token = 0
    for status in statuses:
        for table in ("cache_context_meta", "non_cuda_context_meta"):
            for meta in (status.get(table) or {}).values():
                if meta.get("model_name") != model_name:
                    continue
                world = int(meta["world_size"])
                worlds.add(world)
                layout = meta.get("kv_cache_layout") or {}
                kernel_groups = layout.get("kernel_groups") or []
                groups |= {int(group.get("object_group_idx", 0)) for group in kernel_groups} or {0}
                bytes_per_token = max(bytes_per_token, world * int(layout.get("cache_size_per_token") or 0))
    if not worlds:
        raise CannotExpand(f"no cache server has an engine registered for model {model_name!r}")
    return Layout(
        world_sizes=frozenset(worlds), object_groups=frozenset(groups), bytes_per_token=bytes_per_token
    )


def unknown_objects(seen: Iterable[ObjectKey], layout: Layout) -> list[ObjectKey]:
    """Objects the layout would not name, in order. Any at all means that an expansion misses copies."""
    ranks = set(layout.kv_ranks())
    return sorted(
        key for key in seen if key.kv_rank not in ranks or key.object_group_id not in layout.object_groups
    )


def batched(items: Sequence[Item], size: int) -> Iterator[Sequence[Item]]:
    """Consecutive slices of at most `size` items."""
    for start in range(0, len(items), size):
        yield items[start : start + size]
