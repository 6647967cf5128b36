"""Runs of chunk keys with one reference count each: a path-compressed trie without parent pointers.

A chunk key is a chained hash and names its whole prefix, so a reference needs no pointer to what lies
before it. A run is as long as whoever brought it: its `keys` are the very bytes object of the version that
brought them, so an unshared run costs no copy of its keys. It is cut where counts must differ and never
joined again, for joining would copy what is shared now.
"""

from collections.abc import Callable, Iterator
from functools import cache
from sys import byteorder

import msgspec

from lifecycle.core.ids import KEY_BYTES, split_keys
from lifecycle.core.plan import DEMOTED, FRESH, ChunkFlag

_WORDS_PER_KEY = KEY_BYTES // 8
_VERIFIED, _OURS, _PENDING, _DEMOTED = map(int, ChunkFlag)
_WITHOUT = {flag: bytes(value for value in range(256) if not value & flag) for flag in map(int, ChunkFlag)}


class Run(msgspec.Struct, eq=False, gc=False):
    """Consecutive chunks of a chain, all with the same references. `flags` is one `ChunkFlag` byte a chunk.

    Dead since `dead_ns` when `refs` is 0, `owner` being the context that let go last; not to be asked for
    again before `retry_ns`.
    """

    keys: bytes
    flags: bytes
    refs: int = 0
    dead_ns: int = 0
    retry_ns: int = 0
    owner: str = ""

    @property
    def num_chunks(self) -> int:
        """Length in chunks."""
        return len(self.flags)

    @property
    def proven(self) -> bool:
        """Whether every chunk's store was reported while a call of ours computed it."""
        return _count(self.flags, _OURS) == len(self.flags)


class Stretch(msgspec.Struct, gc=False):
    """Part of given keys: chunks `[at, at + num_chunks)` of `run`, or `keys` that no run holds."""

    run: Run | None
    at: int
    num_chunks: int
    keys: bytes


@cache
def _table(flag: int, clear: int) -> bytes:
    """Translation of flag bytes that clears some flags and then sets some."""
    return bytes(value & ~clear & 0xFF | flag for value in range(256))


def _prefixes(keys: bytes) -> list[int]:
    """Sixty bits of each key: a Python int of two digits, 32 bytes small."""
    return [word >> 4 for word in memoryview(keys).cast("Q")[::_WORDS_PER_KEY].tolist()]


class RunBook:
    """All runs of one namespace, findable by any of their keys.

    Runs are found by sixty bits of a key and confirmed by the whole key; of keys that share those bits, all
    but the first are filed by the whole key.

    `fresh` and `demoted` are the dead runs that a plan may look at, in order of filing.
    """

    def __init__(self) -> None:
        self._by_prefix: dict[int, Run] = {}
        self._by_key: dict[bytes, Run] = {}
        self._uniform: dict[bytes, bytes] = {}
        self.fresh: dict[Run, None] = {}
        self.demoted: dict[Run, None] = {}
        self.num_runs = 0
        self.num_dead = 0
        self.num_verified = 0
        self.num_pending = 0

    @property
    def num_chunks(self) -> int:
        """Chunks in the book, live and dead."""
        return len(self._by_prefix) + len(self._by_key)

    def find(self, key: bytes) -> tuple[Run, int] | None:
        """The run that holds the key, and the key's place in it."""
        run = self._by_prefix.get(int.from_bytes(key[:8], byteorder) >> 4)
        if run is not None and (at := _place(run.keys, key)) >= 0:
            return run, at
        if self._by_key and (run := self._by_key.get(key)) is not None:
            return run, _place(run.keys, key)
        return None

    def stretches(self, keys: bytes) -> Iterator[Stretch]:
        """Tile `keys` into the longest parts of one run, or of none. Cutting while iterating is safe."""
        start, end = 0, len(keys)
        while start < end:
            key = keys[start : start + KEY_BYTES]
            whole = self._by_prefix.get(int.from_bytes(key[:8], byteorder) >> 4)
            if whole is not None and keys.startswith(whole.keys, start):
                yield Stretch(whole, 0, whole.num_chunks, b"")
                start += len(whole.keys)
                continue
            found = self.find(key)
            if found is None:
                stop = start + KEY_BYTES
                while stop < end and self.find(keys[stop : stop + KEY_BYTES]) is None:
                    stop += KEY_BYTES
                part = keys if stop - start == end else keys[start:stop]
                yield Stretch(None, 0, (stop - start) // KEY_BYTES, part)
            else:
                run, at = found
                length = _common_chunks(run.keys[at * KEY_BYTES :], keys[start:])
                stop = start + length * KEY_BYTES
                yield Stretch(run, at, length, b"")
            start = stop

    def runs(self) -> Iterator[Run]:
        """Every run once."""
        seen: set[int] = set()
        last = None
        for source in (self._by_prefix, self._by_key):
            for run in source.values():
                if run is last:  # keys of a run mostly lie side by side
                    continue
                last = run
                if id(run) not in seen:
                    seen.add(id(run))
                    yield run

    def dead_keys(self, owned: Callable[[str], bool]) -> list[bytes]:
        """Keys of all dead runs whose last owner is accepted."""
        dead = (run for run in self.runs() if not run.refs and owned(run.owner))
        return [key for run in dead for key in split_keys(run.keys)]

    def keys_with(self, flag: int) -> list[bytes]:
        """Keys of every chunk that has the flag."""
        return [
            run.keys[at * KEY_BYTES : (at + 1) * KEY_BYTES]
            for run in self.runs()
            for at, flags in enumerate(run.flags)
            if flags & flag
        ]

    def isolate(self, stretch: Stretch) -> Run:
        """A run that is exactly the stretch, cut out of its run where needed. Only for stretches of a run."""
        run = stretch.run
        if run is None:
            raise ValueError("unknown keys lie in no run")
        if stretch.at:
            run = self._cut(run, stretch.at)
        if stretch.num_chunks < run.num_chunks:
            self._cut(run, stretch.num_chunks)
        return run

    def insert(self, keys: bytes, refs: int, now_ns: int, owner: str) -> Run:
        """A new run of keys that are in no run yet, brought by the context `owner`."""
        flags = bytes(len(keys) // KEY_BYTES)
        run = Run(keys, self._uniform.setdefault(flags, flags), refs, 0 if refs else now_ns, owner=owner)
        self._enter(run)
        return run

    def restore(self, run: Run) -> None:
        """Take in a run as another book knew it, of keys that are in no run yet."""
        run.flags = self._shared(run.flags)
        self._enter(run)
        self._tally(run, 1)
        if not run.refs:
            self._file(run)

    def _enter(self, run: Run) -> None:
        self.num_runs += 1
        if not run.refs:
            self.num_dead += run.num_chunks
        for position, prefix in enumerate(_prefixes(run.keys)):
            if prefix in self._by_prefix:
                self._by_key[run.keys[position * KEY_BYTES : (position + 1) * KEY_BYTES]] = run
            else:
                self._by_prefix[prefix] = run

    def drop(self, run: Run) -> None:
        """Forget a run."""
        self._tally(run, -1)
        self.num_runs -= 1
        if not run.refs:
            self.num_dead -= run.num_chunks
        self.fresh.pop(run, None)
        self.demoted.pop(run, None)
        for position, prefix in enumerate(_prefixes(run.keys)):
            if self._by_key.pop(run.keys[position * KEY_BYTES : (position + 1) * KEY_BYTES], None) is None:
                del self._by_prefix[prefix]

    def refer(self, run: Run) -> None:
        """One reference more; a dead run lives again."""
        run.refs += 1
        if run.refs == 1:
            run.dead_ns = 0
            self.num_dead -= run.num_chunks
            self._set_flags(run, run.flags.translate(_table(0, _DEMOTED)))
            self._file(run)

    def unrefer(self, run: Run, now_ns: int, owner: str) -> None:
        """One reference less, that of context `owner`; with the last one the run is dead since `now_ns`."""
        run.refs -= 1
        if not run.refs:
            run.owner = owner
            run.dead_ns = now_ns
            self.num_dead += run.num_chunks
            self._file(run)

    def mark(self, stretch: Stretch, flag: int, *, clear: int = 0) -> None:
        """Set and clear flags of the stretch's chunks; its run stays whole."""
        run, at, stop = stretch.run, stretch.at, stretch.at + stretch.num_chunks
        if run is None:
            return
        part = run.flags[at:stop].translate(_table(flag, clear))
        if part != run.flags[at:stop]:
            self._set_flags(run, run.flags[:at] + part + run.flags[stop:])
            if not run.refs:
                self._file(run)

    def _set_flags(self, run: Run, flags: bytes) -> None:
        self._tally(run, -1)
        run.flags = self._shared(flags)
        self._tally(run, 1)

    def _shared(self, flags: bytes) -> bytes:
        """Equal uniform flags are one object in memory."""
        if flags.count(flags[0]) == len(flags):
            return self._uniform.setdefault(flags, flags)
        return flags

    def _tally(self, run: Run, sign: int) -> None:
        self.num_verified += sign * _count(run.flags, _VERIFIED)
        self.num_pending += sign * _count(run.flags, _PENDING)

    def _file(self, run: Run) -> None:
        """Put the run where a plan looks for it, or nowhere."""
        for shelf, flags in ((self.fresh, FRESH), (self.demoted, DEMOTED)):
            if not run.refs and flags in run.flags:
                shelf[run] = None
            else:
                shelf.pop(run, None)

    def _cut(self, run: Run, at: int) -> Run:
        """Cut a run in two before chunk `at`; it keeps the head, the tail is returned."""
        head, keys = run.keys[: at * KEY_BYTES], run.keys[at * KEY_BYTES :]
        tail = Run(keys, self._shared(run.flags[at:]), run.refs, run.dead_ns, run.retry_ns, run.owner)
        run.keys, run.flags = head, self._shared(run.flags[:at])
        self.num_runs += 1
        for position, prefix in enumerate(_prefixes(keys)):
            key = keys[position * KEY_BYTES : (position + 1) * KEY_BYTES]
            if key in self._by_key:
                self._by_key[key] = tail
            else:
                self._by_prefix[prefix] = tail
        if not run.refs:
            self._file(run)
            self._file(tail)
        return tail


def _place(keys: bytes, key: bytes) -> int:
    """Which chunk of the run the key is, -1 if none. A match across a key boundary is no match."""
    at = keys.find(key)
    while at % KEY_BYTES and at >= 0:
        at = keys.find(key, at + 1)
    return at // KEY_BYTES if at >= 0 else -1


def _common_chunks(one: bytes, other: bytes) -> int:
    """Number of equal chunks at the beginning of two runs."""
    low, high = 0, min(len(one), len(other)) // KEY_BYTES
    if one[: high * KEY_BYTES] == other[: high * KEY_BYTES]:
        return high
    while low < high:
        middle = (low + high + 1) // 2
        if one[: middle * KEY_BYTES] == other[: middle * KEY_BYTES]:
            low = middle
        else:
            high = middle - 1
    return low


def _count(flags: bytes, flag: int) -> int:
    return len(flags.translate(None, _WITHOUT[flag]))
