"""The engine's own cache in HBM: blocks in a chain of hashes, references of running requests, LRU.

As vLLM 0.32.0 (`v1/core/block_pool.py`): a block that no request uses stays where it is until its room is
needed; free blocks queue in the order they were freed, a request's last block first. Requests that compute
the same tokens at the same time fill twins, which have one hash and come and go on their own.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Iterable, Sequence

import msgspec
from blake3 import blake3

from engine_bridge.chunk_keys import ROOT


class _Block(msgspec.Struct):
    """`hash` is empty while the block is not full."""

    hash: bytes = b""
    users: int = 0


def block_hashes(
    token_ids: array[int], block_tokens: int, salt: str, known: Sequence[bytes] = ()
) -> list[bytes]:
    """Hashes of all full blocks; `known` are those of the first blocks, if computed before."""
    hashes = list(known)
    parent = hashes[-1] if hashes else blake3(ROOT + salt.encode()).digest() if salt else ROOT
    wire = token_ids[len(hashes) * block_tokens :].tobytes()
    width = block_tokens * token_ids.itemsize
    for at in range(0, len(wire) - width + 1, width):
        parent = blake3(parent + wire[at : at + width]).digest()
        hashes.append(parent)
    return hashes


class PrefixCache:
    """`num_blocks` blocks. Blocks are numbers; `promise` keeps room for what requests may still need."""

    def __init__(self, num_blocks: int) -> None:
        self._blocks = [_Block() for _ in range(num_blocks)]
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(num_blocks))
        self._by_hash: dict[bytes, dict[int, None]] = {}
        self._num_cached = 0
        self._promised = 0
        self.num_stored = self.num_evicted = 0

    @property
    def num_cached(self) -> int:
        """Blocks that can be found, twins included."""
        return self._num_cached

    @property
    def num_used(self) -> int:
        """Blocks that requests hold."""
        return len(self._blocks) - len(self._free)

    @property
    def num_blocks(self) -> int:
        return len(self._blocks)

    def match(self, hashes: Iterable[bytes]) -> list[int]:
        """Blocks of the longest cached prefix."""
        found: list[int] = []
        for each in hashes:
            twins = self._by_hash.get(each)
            if twins is None:
                break
            found.append(next(iter(twins)))
        return found

    def has_room(self, matched: Sequence[int], num_more: int) -> bool:
        """Whether a request can hold `matched` and be promised `num_more` blocks."""
        idle = sum(block in self._free for block in matched)
        return len(self._free) - self._promised >= num_more + idle

    def hold(self, matched: Sequence[int], num_more: int) -> None:
        """Hold matched blocks and promise `num_more`."""
        for number in matched:
            self._blocks[number].users += 1
            self._free.pop(number, None)
        self._promised += num_more

    def take(self, count: int) -> tuple[list[int], list[bytes]]:
        """Redeem a promise: empty blocks, and the hashes of those that had to go, though a twin may stay."""
        taken: list[int] = []
        lost: list[bytes] = []
        for _ in range(count):
            number, _ = self._free.popitem(last=False)
            block = self._blocks[number]
            if block.hash:
                self._forget(number, block)
                lost.append(block.hash)
                block.hash = b""
            block.users = 1
            taken.append(number)
        self._promised -= count
        self.num_evicted += len(lost)
        return taken, lost

    def forgo(self, count: int) -> None:
        """Give back the rest of a promise."""
        self._promised -= count

    def _forget(self, number: int, block: _Block) -> None:
        twins = self._by_hash[block.hash]
        del twins[number]
        if not twins:
            del self._by_hash[block.hash]
        self._num_cached -= 1

    def publish(self, number: int, block_hash: bytes) -> None:
        """A block is full and can be found from now on."""
        self._by_hash.setdefault(block_hash, {})[number] = None
        self._blocks[number].hash = block_hash
        self._num_cached += 1
        self.num_stored += 1

    def release(self, blocks: Sequence[int]) -> None:
        """A request is done with its blocks, given in prompt order."""
        for number in reversed(blocks):
            block = self._blocks[number]
            block.users -= 1
            if block.users == 0:
                self._free[number] = None
                if not block.hash:
                    self._free.move_to_end(number, last=False)

    def clear(self) -> bool:
        """Forget all cached blocks; False, and nothing happens, while requests hold any."""
        if self.num_used:
            return False
        self._by_hash.clear()
        self._num_cached = 0
        for block in self._blocks:
            block.hash = b""
        return True
