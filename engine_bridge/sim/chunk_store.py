"""The cache below the engine, as LMCache's multi-process server with one L2 has it.

A store is all or nothing for what one step of a request adds; chunks that lie in L1 are not stored again.
Chunks in L1 are copied to L2 a while after their store, if they are still there then; a copy under way locks
its source. What a request hits in L2 is moved through L1 and does not stay there. Pins count for L2 and are
kept by key, whether the chunk lies there or not; unlike LMCache's own L2 eviction, which does not ask the
coordinator, ours honours them.
"""

from collections.abc import Callable, Iterable, Sequence

import msgspec

from engine_bridge.sim.hardware import EngineConfig
from engine_bridge.sim.tiers import ChunkId, LruOrder, Tier, TierUsage, VictimOrder
from engine_bridge.sim.transfers import Agenda, Link
from lifecycle import vocabulary


class Lease(msgspec.Struct, frozen=True):
    """Chunks that a request is about to load: locked until it is released."""

    incarnation: int
    num_hits: int
    l1: tuple[ChunkId, ...]
    l2: tuple[ChunkId, ...]


class Deleted(msgspec.Struct, frozen=True, kw_only=True):
    """What became of a delete, key by key: each in one of these. `absent` were in none of the tiers."""

    deleted: tuple[bytes, ...] = ()
    in_use: tuple[bytes, ...] = ()
    pinned: tuple[bytes, ...] = ()
    absent: tuple[bytes, ...] = ()


class ChunkStore:
    """L1 and L2 with their links. `on_removed` is told which chunks left L1."""

    def __init__(
        self,
        config: EngineConfig,
        agenda: Agenda,
        on_removed: Callable[[Sequence[ChunkId]], None],
        new_order: Callable[[], VictimOrder] = LruOrder,
    ) -> None:
        hardware = config.hardware
        self._config = config
        self._agenda = agenda
        self._on_removed = on_removed
        self.l1 = Tier(config.l1_bytes, config.chunk_bytes, new_order())
        self.l2 = Tier(config.l2_bytes, config.chunk_bytes, new_order())
        self.load_link = Link(agenda, hardware.load_bandwidth, hardware.load_latency_ns)
        self.store_link = Link(agenda, hardware.store_bandwidth, hardware.load_latency_ns)
        self.read_link = Link(agenda, hardware.l2_read_bandwidth, hardware.l2_latency_ns)
        self.write_link = Link(agenda, hardware.l2_write_bandwidth, hardware.l2_latency_ns)
        self.incarnation = 1
        self.num_refused_stores = 0
        self.num_refused_copies = 0
        self._pins: dict[ChunkId, int] = {}
        self._evictor_armed = False

    @property
    def links(self) -> tuple[Link, ...]:
        return (self.load_link, self.store_link, self.read_link, self.write_link)

    def usage(self) -> dict[vocabulary.Tier, TierUsage]:
        return {vocabulary.Tier.L1: self.l1.usage(), vocabulary.Tier.L2: self.l2.usage()}

    # Requests -------------------------------------------------------------------------------------

    def acquire(self, salt: str, keys: Sequence[bytes], num_covered: int) -> Lease:
        """Find the longest prefix, and lock what lies behind the first `num_covered` chunks.

        It ends where L1 has no room to move an L2 hit through.
        """
        l1: list[ChunkId] = []
        l2: list[ChunkId] = []
        touched: list[ChunkId] = []
        hits = 0
        for index, key in enumerate(keys):
            chunk = (salt, key)
            if chunk in self.l1:
                touched.append(chunk)
                if index >= num_covered:
                    l1.append(chunk)
            elif chunk in self.l2:
                if index >= num_covered:
                    if not self.l1.lend(self.l1.chunk_bytes):
                        break
                    l2.append(chunk)
            else:
                break
            hits += 1
        self.l1.lock(l1)
        self.l2.lock(l2)
        self.l1.touch(touched)
        self.l2.touch([chunk for key in keys[:hits] if (chunk := (salt, key)) in self.l2])
        return Lease(self.incarnation, hits, tuple(l1), tuple(l2))

    def release(self, lease: Lease, now_ns: int) -> None:
        """The request has read its chunks, or will not."""
        self.l2.unlock(lease.l2)
        if lease.incarnation == self.incarnation:
            self.l1.unlock(lease.l1)
            self.l1.take_back(len(lease.l2) * self.l1.chunk_bytes)
        self._arm_evictor(now_ns)

    def store(
        self, chunks: Sequence[ChunkId], now_ns: int, done: Callable[[int, Sequence[ChunkId]], None]
    ) -> bool:
        """Write chunks from HBM to L1. False: nothing to write, or no room, and then `done` is not called.

        `done` gets the chunks that can be found from then on: none if the server restarted meanwhile.
        """
        new = self.l1.missing(chunks)
        if not new:
            return False
        if not self.l1.reserve(new):
            self.num_refused_stores += 1
            self._arm_evictor(now_ns)
            return False
        incarnation = self.incarnation

        def written(at_ns: int) -> None:
            if incarnation != self.incarnation:
                done(at_ns, ())
                return
            self.l1.commit(new)
            self._arm_evictor(at_ns)
            if self.l2.capacity_bytes:
                self._agenda.at(
                    at_ns + self._config.write_back_delay_ns, lambda ns: self._write_back(new, ns)
                )
            done(at_ns, new)

        self.store_link.start(len(new) * self.l1.chunk_bytes, now_ns, written)
        return True

    def _write_back(self, chunks: Sequence[ChunkId], now_ns: int) -> None:
        """Copy to L2 what is still in L1 and not yet in L2."""
        copied = self.l2.missing(chunk for chunk in chunks if chunk in self.l1)
        if not copied:
            return
        if not self.l2.reserve(copied):
            self.num_refused_copies += 1
            self._arm_evictor(now_ns)
            return
        self.l1.lock(copied)
        incarnation = self.incarnation

        def written(at_ns: int) -> None:
            if incarnation != self.incarnation:
                self.l2.abandon(copied)
                return
            self.l1.unlock(copied)
            self.l2.commit(copied)
            self._arm_evictor(at_ns)

        self.write_link.start(len(copied) * self.l2.chunk_bytes, now_ns, written)

    # Control --------------------------------------------------------------------------------------

    def locate(self, salt: str, keys: Iterable[bytes]) -> list[frozenset[vocabulary.Tier]]:
        """Tiers in which each key can be found, in the order asked."""
        places = ((vocabulary.Tier.L1, self.l1), (vocabulary.Tier.L2, self.l2))
        return [frozenset(name for name, tier in places if (salt, key) in tier) for key in keys]

    def delete(
        self, salt: str, keys: Iterable[bytes], tiers: frozenset[vocabulary.Tier], now_ns: int
    ) -> Deleted:
        """Delete what nobody uses. A pinned chunk keeps its L2 copy, and its L1 copy if that is the only one.

        What a transfer reads or writes is `in_use` and keeps all its copies, except that a copy to L2 that is
        under way is not there yet: deleted from L2 alone, a chunk comes back.
        """
        answer: dict[str, list[bytes]] = {"deleted": [], "in_use": [], "pinned": [], "absent": []}
        removed: list[ChunkId] = []
        for key in dict.fromkeys(keys):
            chunk = (salt, key)
            places = [
                tier
                for name, tier in ((vocabulary.Tier.L1, self.l1), (vocabulary.Tier.L2, self.l2))
                if name in tiers and chunk in tier
            ]
            if vocabulary.Tier.L1 in tiers and self.l1.is_being_written(chunk):
                answer["in_use"].append(key)
            elif not places:
                answer["absent"].append(key)
            elif chunk in self._pins and (self.l2 in places or chunk not in self.l2):
                answer["pinned"].append(key)
            elif any(tier.is_locked(chunk) for tier in places):
                answer["in_use"].append(key)
            else:
                if self.l1 in places:
                    removed.append(chunk)
                for tier in places:
                    tier.delete(chunk)
                answer["deleted"].append(key)
        if removed:
            self._on_removed(removed)
        return Deleted(**{name: tuple(found) for name, found in answer.items()})

    def pin(self, salt: str, keys: Iterable[bytes]) -> None:
        """Hold each key in L2 once more. Holds do not end by themselves and survive every restart."""
        for key in keys:
            self._pins[(salt, key)] = self._pins.get((salt, key), 0) + 1

    def unpin(self, salt: str, keys: Iterable[bytes], now_ns: int) -> None:
        """Take one hold off each key; a key without any is left alone."""
        for key in keys:
            count = self._pins.get((salt, key), 0)
            if count > 1:
                self._pins[(salt, key)] = count - 1
            else:
                self._pins.pop((salt, key), None)
        self._arm_evictor(now_ns)

    def pins(self, salt: str) -> dict[bytes, int]:
        """How often each key is held."""
        return {key: count for (owner, key), count in self._pins.items() if owner == salt}

    def prefetch(self, salt: str, keys: Iterable[bytes], now_ns: int) -> int:
        """Copy from L2 to L1 as far as there is free room below the watermark; answers how many chunks.

        Nothing is evicted for it. They can be found in L1 when the copy is done.
        """
        limit = self.l1.capacity_bytes * self._config.l1_watermark_percent // 100
        room = max(0, limit - 1 - self.l1.used_bytes) // self.l1.chunk_bytes
        wanted = self.l1.missing((salt, key) for key in dict.fromkeys(keys))
        moved = [chunk for chunk in wanted if chunk in self.l2][:room]
        if not moved or not self.l1.reserve(moved):
            return 0
        self.l2.lock(moved)
        incarnation = self.incarnation

        def read(at_ns: int) -> None:
            self.l2.unlock(moved)
            if incarnation == self.incarnation:
                self.l1.commit(moved)
            self._arm_evictor(at_ns)

        self.read_link.start(len(moved) * self.l1.chunk_bytes, now_ns, read)
        return len(moved)

    def restart(self) -> None:
        """A new server process: L1 is void, what was under way comes to nothing; L2 and pins stay."""
        self.incarnation += 1
        lost = self.l1.clear()
        if lost:
            self._on_removed(lost)

    # Eviction -------------------------------------------------------------------------------------

    def _arm_evictor(self, now_ns: int) -> None:
        config = self._config
        if self._evictor_armed or not (
            self.l1.is_above(config.l1_watermark_percent) or self.l2.is_above(config.l2_watermark_percent)
        ):
            return
        self._evictor_armed = True
        interval = config.evict_interval_ns
        self._agenda.at((now_ns // interval + 1) * interval, self._evict)

    def _evict(self, now_ns: int) -> None:
        """One run of the evictors. If all is in use they sleep until something is let go."""
        self._evictor_armed = False
        config = self._config
        gone: list[ChunkId] = []
        if self.l1.is_above(config.l1_watermark_percent):
            lost = self.l1.evict(config.l1_evict_percent, lambda _: True)
            if lost:
                self._on_removed(lost)
            gone += lost
        if self.l2.is_above(config.l2_watermark_percent):
            gone += self.l2.evict(config.l2_evict_percent, lambda chunk: chunk not in self._pins)
        if gone:
            self._arm_evictor(now_ns)
