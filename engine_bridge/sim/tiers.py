"""One tier of the cache below the engine: chunks of equal size, a capacity, locks, and an order of victims.

Stock order as in LMCache 0.5.6 (`eviction_policy/lru.py`): by last touch of a chunk; of chunks touched
together the later go first, for without its prefix a chunk is worth nothing. The evictor runs in intervals
when the tier is filled above a watermark and takes a share of all chunks.
"""

from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Protocol, TypeAlias

import msgspec

ChunkId: TypeAlias = tuple[str, bytes]
"""Salt and key: the same tokens under two salts are two chunks."""


class VictimOrder(Protocol):
    """Who goes first. Told of everything that happens to the chunks of one tier; never acts."""

    def stored(self, chunks: Sequence[ChunkId]) -> None: ...

    def touched(self, chunks: Sequence[ChunkId]) -> None: ...

    def removed(self, chunk: ChunkId) -> None: ...

    def victims(self, count: int, is_evictable: Callable[[ChunkId], bool]) -> list[ChunkId]:
        """At most `count` chunks that may go, first to go first."""
        ...


class LruOrder:
    """Least recently touched first, of one request the last chunk first."""

    def __init__(self) -> None:
        self._order: OrderedDict[ChunkId, None] = OrderedDict()

    def stored(self, chunks: Sequence[ChunkId]) -> None:
        for chunk in reversed(chunks):
            self._order[chunk] = None
            self._order.move_to_end(chunk)

    def touched(self, chunks: Sequence[ChunkId]) -> None:
        for chunk in reversed(chunks):
            if chunk in self._order:
                self._order.move_to_end(chunk)

    def removed(self, chunk: ChunkId) -> None:
        self._order.pop(chunk, None)

    def victims(self, count: int, is_evictable: Callable[[ChunkId], bool]) -> list[ChunkId]:
        found: list[ChunkId] = []
        for chunk in self._order:
            if len(found) >= count:
                break
            if is_evictable(chunk):
                found.append(chunk)
        return found


class TierUsage(msgspec.Struct, frozen=True, kw_only=True):
    """State of one tier. `reserved_bytes` are part of `used_bytes`: being written, or lent to loads."""

    used_bytes: int
    reserved_bytes: int
    capacity_bytes: int
    num_chunks: int
    num_stored: int
    num_evicted: int
    num_deleted: int


class Tier:
    """Chunks that lie in one tier. A chunk is reserved, then committed; only then it can be found.

    Locked chunks are neither evicted nor deleted.
    """

    def __init__(self, capacity_bytes: int, chunk_bytes: int, order: VictimOrder) -> None:
        self.capacity_bytes = capacity_bytes
        self.chunk_bytes = chunk_bytes
        self._order = order
        self._chunks: dict[ChunkId, int] = {}
        self._reserved: set[ChunkId] = set()
        self._lent_bytes = 0
        self._num_stored = self._num_evicted = self._num_deleted = 0

    def __contains__(self, chunk: ChunkId) -> bool:
        return chunk in self._chunks

    def __iter__(self) -> Iterator[ChunkId]:
        return iter(self._chunks)

    def __len__(self) -> int:
        return len(self._chunks)

    @property
    def used_bytes(self) -> int:
        return (len(self._chunks) + len(self._reserved)) * self.chunk_bytes + self._lent_bytes

    @property
    def free_bytes(self) -> int:
        return self.capacity_bytes - self.used_bytes

    def usage(self) -> TierUsage:
        return TierUsage(
            used_bytes=self.used_bytes,
            reserved_bytes=len(self._reserved) * self.chunk_bytes + self._lent_bytes,
            capacity_bytes=self.capacity_bytes,
            num_chunks=len(self._chunks),
            num_stored=self._num_stored,
            num_evicted=self._num_evicted,
            num_deleted=self._num_deleted,
        )

    def missing(self, chunks: Iterable[ChunkId]) -> list[ChunkId]:
        """Those that neither lie here nor are being written, in order."""
        return [chunk for chunk in chunks if chunk not in self._chunks and chunk not in self._reserved]

    def reserve(self, chunks: Sequence[ChunkId]) -> bool:
        """Take room for missing chunks: for all of them, or False and for none."""
        if len(chunks) * self.chunk_bytes > self.free_bytes:
            return False
        self._reserved.update(chunks)
        return True

    def commit(self, chunks: Sequence[ChunkId]) -> None:
        """The reserved chunks are written and can be read from now on."""
        self._reserved.difference_update(chunks)
        self._chunks.update(dict.fromkeys(chunks, 0))
        self._num_stored += len(chunks)
        self._order.stored(chunks)

    def abandon(self, chunks: Iterable[ChunkId]) -> None:
        """Give back the room of reserved chunks."""
        self._reserved.difference_update(chunks)

    def lend(self, size_bytes: int) -> bool:
        """Take room for something that is not a chunk of this tier; False if there is none."""
        if size_bytes > self.free_bytes:
            return False
        self._lent_bytes += size_bytes
        return True

    def take_back(self, size_bytes: int) -> None:
        self._lent_bytes -= size_bytes

    def touch(self, chunks: Sequence[ChunkId]) -> None:
        """They were of use just now; `chunks` in the order of their prompt."""
        self._order.touched(chunks)

    def lock(self, chunks: Iterable[ChunkId]) -> None:
        for chunk in chunks:
            self._chunks[chunk] += 1

    def unlock(self, chunks: Iterable[ChunkId]) -> None:
        for chunk in chunks:
            self._chunks[chunk] -= 1

    def is_being_written(self, chunk: ChunkId) -> bool:
        return chunk in self._reserved

    def is_locked(self, chunk: ChunkId) -> bool:
        return self._chunks.get(chunk, 0) > 0

    def delete(self, chunk: ChunkId) -> bool:
        """Remove one chunk; False if it is locked or not here."""
        if self._chunks.get(chunk) != 0:
            return False
        self._remove(chunk)
        self._num_deleted += 1
        return True

    def is_above(self, percent: int) -> bool:
        return self.capacity_bytes > 0 and self.used_bytes * 100 >= self.capacity_bytes * percent

    def evict(self, percent: int, may_go: Callable[[ChunkId], bool]) -> list[ChunkId]:
        """Remove a share of all chunks, at least one; answers those that went, in order."""
        count = max(1, len(self._chunks) * percent // 100)
        victims = self._order.victims(count, lambda chunk: self._chunks[chunk] == 0 and may_go(chunk))
        for chunk in victims:
            self._remove(chunk)
        self._num_evicted += len(victims)
        return victims

    def clear(self) -> list[ChunkId]:
        """Lose everything, locks and reservations included; answers the chunks that lay here."""
        lost = list(self._chunks)
        for chunk in lost:
            self._remove(chunk)
        self._reserved.clear()
        self._lent_bytes = 0
        return lost

    def _remove(self, chunk: ChunkId) -> None:
        del self._chunks[chunk]
        self._order.removed(chunk)
