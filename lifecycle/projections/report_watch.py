"""Dead chunks from the plan that found them to their end, and a while longer: was one needed again?

The log says everything that is needed: a proposal names the dead, its outcome what became of them, and a
later call's chain which keys are wanted again. So this needs no books of what is alive, and can begin in the
middle of a log.
"""

from collections import Counter, OrderedDict, deque
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice

import msgspec

from lifecycle.core.directives import Demote, DirectiveResult, Reclaim
from lifecycle.core.ids import KEY_BYTES, Namespace, split_keys
from lifecycle.projections.report_counts import Cell
from lifecycle.vocabulary import DirectiveOutcome

REGRET_NS = 600 * 10**9
"""How long after its removal a chunk that is needed again counts as regretted: ten minutes."""

MAX_WATCHED = 200_000
"""Most chunks in memory, about 200 bytes each. Beyond, the oldest are forgotten: first the dead that still
lie in the cache, for they only add to a figure, then the removed."""

MAX_OPEN = 10_000

_UNDER_WAY = (DirectiveOutcome.PROPOSED, DirectiveOutcome.ACCEPTED)

Tally = Counter[Cell]
"""Chunks by whom they are counted for."""


class _Mark(msgspec.Struct, frozen=True, eq=False, gc=False):
    """What is known of chunks: whose they were, since when, by which directive."""

    owner: Cell
    since_ns: int
    directive_id: str
    suppressed: bool = False


class _Open(msgspec.Struct):
    """A directive under way: its chunks by owner, and those that a call needed meanwhile."""

    groups: list[tuple[Cell, list[bytes]]]
    revived: set[bytes]


class _Chunks:
    """Of one cache: `dead` still lie there as far as is known, `watched` were or would have been removed."""

    def __init__(self) -> None:
        self.dead: dict[bytes, _Mark] = {}
        self.watched: dict[bytes, _Mark] = {}
        self.num_suppressed = 0

    def hold(self, keys: Iterable[bytes], mark: _Mark) -> None:
        """These are dead, so marked."""
        for key in keys:
            self.drop(key)
            self.dead[key] = mark
            self.num_suppressed += mark.suppressed

    def drop(self, key: bytes) -> _Mark | None:
        """This one is dead no longer, or not there; answers how it was marked."""
        mark = self.dead.pop(key, None)
        if mark is not None:
            self.num_suppressed -= mark.suppressed
        return mark


class Settlement(msgspec.Struct):
    """What an outcome did: chunks freed, that would have been freed, and freed although needed already."""

    freed: Tally
    would_free: Tally
    regretted: Tally


class Need(msgspec.Struct):
    """What a call needed again: removed chunks, would-be removed ones, and dead ones that were still held."""

    regretted: Tally
    would_regret: Tally
    revived: Tally


class RemovalWatch:
    """Follows dead chunks by key. All times are of events, in nanoseconds since the epoch."""

    def __init__(self) -> None:
        self._caches: dict[Namespace, _Chunks] = {}
        self._open: OrderedDict[str, _Open] = OrderedDict()
        self._held: deque[tuple[_Chunks, list[bytes], _Mark]] = deque()
        self._removed: deque[tuple[_Chunks, list[bytes], _Mark]] = deque()
        self._num_queued = 0

    def proposed(self, directive: Reclaim | Demote, owners: Sequence[tuple[Cell, int]], at_ns: int) -> Tally:
        """A plan found these dead; answers those that were not known to be. `owners` are in order of the keys
        and cover them."""
        chunks = self._of(directive.namespace)
        keys = split_keys(directive.keys)
        groups: list[tuple[Cell, list[bytes]]] = []
        seen: Tally = Counter()
        start = 0
        for owner, num_chunks in owners:
            part = keys[start : start + num_chunks]
            start += num_chunks
            fresh = [key for key in part if key not in chunks.dead]
            mark = _Mark(owner, at_ns, directive.directive_id)
            chunks.hold(part, mark)
            seen[owner] += len(fresh)
            self._queue(self._held, chunks, part, mark)
            groups.append((owner, part))
        self._open[directive.directive_id] = _Open(groups, set())
        while len(self._open) > MAX_OPEN:
            self._open.popitem(last=False)
        self._bound()
        return seen

    def settled(
        self, namespace: Namespace, directive_id: str, result: DirectiveResult, at_ns: int
    ) -> Settlement:
        """What became of a directive. One whose proposal was not seen changes nothing."""
        done = Settlement(Counter(), Counter(), Counter())
        if result.outcome in _UNDER_WAY or (opened := self._open.pop(directive_id, None)) is None:
            return done
        self._expire(at_ns)
        chunks = self._of(namespace)
        gone = set(split_keys(result.gone))
        suppressed = result.outcome is DirectiveOutcome.SUPPRESSED
        for owner, keys in opened.groups:
            mark = _Mark(owner, at_ns, directive_id, suppressed)
            freed = [key for key in keys if key in gone and chunks.drop(key) is not None]
            done.freed[owner] += len(freed)
            late = opened.revived & gone - set(freed)
            done.regretted[owner] += sum(key in late for key in keys)
            watched = freed
            if suppressed:
                watched = [key for key in keys if key in chunks.dead]
                done.would_free[owner] += len(watched)
                chunks.hold(watched, mark)
                self._queue(self._held, chunks, watched, mark)
            chunks.watched.update(dict.fromkeys(watched, mark))
            self._queue(self._removed, chunks, watched, mark)
        self._bound()
        return done

    def needed(self, namespace: Namespace, keys: bytes, at_ns: int) -> Need:
        """A call's prompt needs these keys: they are dead no longer, and each is regretted once at most."""
        self._expire(at_ns)
        need = Need(Counter(), Counter(), Counter())
        chunks = self._caches.get(namespace.cache)
        if chunks is None or not (chunks.dead or chunks.watched):
            return need
        for key in split_keys(keys):
            dead, watched = chunks.drop(key), chunks.watched.pop(key, None)
            if dead is not None:
                need.revived[dead.owner] += 1
                if (opened := self._open.get(dead.directive_id)) is not None:
                    opened.revived.add(key)
            if watched is not None:
                (need.would_regret if watched.suppressed else need.regretted)[watched.owner] += 1
        return need

    def gone(self, namespace: Namespace, keys: bytes) -> Tally:
        """The cache no longer shows these; answers those that were dead, gone by nobody's order of ours."""
        chunks = self._of(namespace)
        lost: Tally = Counter()
        for key in split_keys(keys):
            if (mark := chunks.drop(key)) is not None:
                lost[mark.owner] += 1
        return lost

    def num_dead(self, namespace: Namespace) -> int:
        """Dead chunks that lie in the cache as far as is known."""
        chunks = self._caches.get(namespace.cache)
        return len(chunks.dead) if chunks else 0

    def num_suppressed(self, namespace: Namespace) -> int:
        """Those of the dead that we only observe: the chunk index has forgotten them."""
        chunks = self._caches.get(namespace.cache)
        return chunks.num_suppressed if chunks else 0

    def observed_keys(self, namespace: Namespace, limit: int) -> list[bytes]:
        """Some of the dead that we only observe, others each time: to ask the cache whether they still lie
        there."""
        chunks = self._of(namespace)
        found = list(islice((k for k, mark in chunks.dead.items() if mark.suppressed), limit))
        for key in found:
            chunks.dead[key] = chunks.dead.pop(key)
        return found

    def num_chunks(self) -> int:
        """Chunks in memory, however often."""
        return self._num_queued

    def state(self) -> Iterator[object]:
        """Everything that is known, for comparison."""
        for namespace in sorted(self._caches):
            chunks = self._caches[namespace]
            for marks in (chunks.dead, chunks.watched):
                yield (
                    namespace,
                    [
                        (key, mark.owner, mark.since_ns, mark.suppressed)
                        for key, mark in sorted(marks.items())
                    ],
                )

    def _of(self, namespace: Namespace) -> _Chunks:
        return self._caches.setdefault(namespace.cache, _Chunks())

    def _queue(
        self,
        queue: deque[tuple[_Chunks, list[bytes], _Mark]],
        chunks: _Chunks,
        keys: list[bytes],
        mark: _Mark,
    ) -> None:
        if keys:
            queue.append((chunks, keys, mark))
            self._num_queued += len(keys)

    def _expire(self, now_ns: int) -> None:
        while self._removed and now_ns - self._removed[0][2].since_ns > REGRET_NS:
            self._forget_removed()

    def _bound(self) -> None:
        while self._num_queued > MAX_WATCHED and self._held:
            chunks, keys, mark = self._held.popleft()
            self._num_queued -= len(keys)
            for key in keys:
                if chunks.dead.get(key) is mark:
                    chunks.drop(key)
        while self._num_queued > MAX_WATCHED and self._removed:
            self._forget_removed()

    def _forget_removed(self) -> None:
        chunks, keys, mark = self._removed.popleft()
        self._num_queued -= len(keys)
        for key in keys:
            # What has been marked anew since stays.
            if chunks.watched.get(key) is mark:
                del chunks.watched[key]


def covering(owners: Sequence[tuple[Cell, int]], keys: bytes, rest: Cell) -> list[tuple[Cell, int]]:
    """Owners of exactly the keys: `rest` stands in where they name too few, and what is too many is cut."""
    left = len(keys) // KEY_BYTES
    out = []
    for owner, num_chunks in owners:
        out.append((owner, min(num_chunks, left)))
        left -= out[-1][1]
    return [*out, (rest, left)] if left else out
