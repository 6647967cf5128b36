"""Finds, slowly and for ever, what happened to the cache behind our back.

Two kinds of drift are found by looking only. Chunks that the books call stored are gone although no event
said so: a delete by hand, a lost file. And chunks that we freed are back although nobody computed them again:
a copy to a lower tier that was on its way. The first are recorded as gone, the second are freed once more.

And what was computed when our own process died, or when a client hung up before the engine counted what it
had cached: nobody proved it ours. A chunk that stands behind one that is ours was stored after that one, or
both would have been there before; so, if nobody unseen used the cache, one of our calls stored it.
"""

import asyncio
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from typing import Protocol, runtime_checkable

import structlog

from engine_bridge.errors import CacheUnavailable
from engine_bridge.placement_watch import PlacementWatch
from lifecycle.core.directives import Reclaim
from lifecycle.core.events import ChunksConfirmed
from lifecycle.core.ids import Namespace, split_keys
from lifecycle.core.plan import others_may_use
from lifecycle.errors import LogUnavailable
from lifecycle.ports import CacheControl, IdSource
from lifecycle.projections.chunk_index import UNPROVEN_NS
from lifecycle.projections.contexts import DirectiveRecord
from lifecycle.reclaimer import Reclaimer
from lifecycle.tracker import Tracker
from lifecycle.vocabulary import Tier

log = structlog.get_logger(__name__)

LOOK_SECONDS = 5.0
KEYS_PER_LOOK = 1_000
"""With the pause 200 chunks a second, some milliseconds of the directory: a million take 80 minutes."""

RETURN_WINDOW_NS = 120 * 10**9
"""How long after a directive a chunk that is back counts as a copy that was on its way."""

LOOKS_APART_NS = 20 * 10**9
"""Pause before each look at what one directive freed."""

LATE_COPY = frozenset({Tier.L2})
"""Where late copies lie: whoever computes a chunk again puts it into the upper tier first."""


@runtime_checkable
class OwingCache(Protocol):
    """What a `CacheControl` has in addition if parts of it may be away while something is freed."""

    async def collect_owed(self) -> None:
        """Free there, too, what was freed meanwhile. Raises `CacheUnavailable`."""
        ...


class DriftWatch:
    """One loop. `found(what, number)` is told of chunks `gone`, `returned`, or `proven` late.

    Contexts are looked at in turn, whoever was not for longest first.
    """

    def __init__(
        self,
        tracker: Tracker,
        cache: CacheControl,
        placement: PlacementWatch,
        reclaimer: Reclaimer,
        ids: IdSource,
        found: Callable[[str, int], None],
        look_seconds: float = LOOK_SECONDS,
        keys_per_look: int = KEYS_PER_LOOK,
    ) -> None:
        self._tracker = tracker
        self._cache = cache
        self._placement = placement
        self._reclaimer = reclaimer
        self._ids = ids
        self._found = found
        self._look_seconds = look_seconds
        self._keys_per_look = keys_per_look
        self._turns: deque[str] = deque()
        self._looked_ns: dict[str, int] = {}

    async def run(self) -> None:
        """Until cancelled. A cache or a log that is away is met again at the next look."""
        while self._cache.capabilities.level:
            try:
                await self.look()
            except (CacheUnavailable, LogUnavailable) as error:
                log.info("the cache is compared with the books later", error=str(error))
            await asyncio.sleep(self._look_seconds)

    async def look(self) -> None:
        """Compare a little, once. Raises `CacheUnavailable`, `LogUnavailable`."""
        if isinstance(self._cache, OwingCache):
            await self._cache.collect_owed()
        await self._prove_what_was_cut_off()
        await self._look_for_gone()
        await self._look_for_returned()

    async def _prove_what_was_cut_off(self) -> None:
        now_ns = self._tracker.clock.now_ns()
        index = self._tracker.contexts.index
        for (namespace, run), since_ns in list(self._tracker.cut_off.items()):
            unproven = index.unproven(namespace, run)
            wanted = [key for key in unproven if index.describe(namespace, key) is not None]
            if not wanted or now_ns - since_ns > UNPROVEN_NS:
                del self._tracker.cut_off[namespace, run]
                continue
            # Copies and the directory lag: what does not show up now may do so at the next look.
            if others_may_use(index, namespace, now_ns):
                continue
            present = [p for p in await self._cache.locate(namespace, wanted) if p.tiers]
            if not present:
                continue
            confirmed = ChunksConfirmed(
                at_ns=now_ns,
                namespace=namespace,
                keys=b"".join(p.key for p in present),
                tiers=tuple(sorted({tier for p in present for tier in p.tiers})),
                stored=True,
            )
            await self._tracker.record(namespace, [confirmed])
            self._found("proven", len(present))

    async def _look_for_gone(self) -> None:
        for namespace, keys in self._next_keys().items():
            number = await self._placement.look(namespace, list(keys), "a look found it in no tier")
            if number:
                self._found("gone", number)

    def _next_keys(self) -> Mapping[Namespace, Mapping[bytes, None]]:
        """Proven chunks of the contexts whose turn it is."""
        contexts = self._tracker.contexts
        chosen: dict[Namespace, dict[bytes, None]] = {}
        left = self._keys_per_look
        if not self._turns:
            self._turns.extend(contexts.states)
        while self._turns and left > 0:
            state = contexts.states.get(self._turns.popleft())
            if state is None:
                continue
            namespace = state.namespace.cache
            known = chosen.setdefault(namespace, {})
            for version in state.versions.values():
                unproven = set(contexts.index.unverified(namespace, version.keys))
                fresh = [k for k in split_keys(version.keys) if k not in unproven and k not in known]
                known |= dict.fromkeys(fresh)
                left -= len(fresh)
        return chosen

    async def _look_for_returned(self) -> None:
        for record in list(self._due()):
            directive, result = record.directive, record.result
            assert isinstance(directive, Reclaim)
            assert result is not None
            index = self._tracker.contexts.index
            freed = split_keys(result.gone)
            unknown = [key for key in freed if index.describe(directive.namespace, key) is None]
            present = await self._cache.locate(directive.namespace, unknown) if unknown else ()
            back = {p.key for p in present if p.tiers == LATE_COPY}
            self._looked_ns[directive.directive_id] = self._tracker.clock.now_ns()
            if back:
                await self._free_again(directive, back)

    def _due(self) -> Iterator[DirectiveRecord]:
        """Directives that freed something lately, and whose chunks were not looked at for a while."""
        now_ns = self._tracker.clock.now_ns()
        recent: dict[str, int] = {}
        for directive_id, record in reversed(self._tracker.contexts.directives.items()):
            if now_ns - record.proposed_ns > 2 * RETURN_WINDOW_NS:
                break
            result = record.result
            if not isinstance(record.directive, Reclaim) or result is None or not result.gone:
                continue
            looked_ns = self._looked_ns.get(directive_id, record.settled_ns)
            recent[directive_id] = looked_ns
            if now_ns - record.settled_ns <= RETURN_WINDOW_NS and now_ns - looked_ns >= LOOKS_APART_NS:
                yield record
        self._looked_ns = {i: n for i, n in self._looked_ns.items() if i in recent}

    async def _free_again(self, freed: Reclaim, back: set[bytes]) -> None:
        keys: list[bytes] = []
        owners: list[tuple[str, int]] = []
        all_keys = iter(split_keys(freed.keys))
        for owner, number in freed.owners:
            theirs = [key for key in (next(all_keys) for _ in range(number)) if key in back]
            objection = self._reclaimer.objection_to(freed.namespace, owner)
            if objection:
                log.warning("chunks that came back stay", chunks=len(theirs), reason=objection)
            elif theirs:
                keys += theirs
                owners.append((owner, len(theirs)))
        if not keys:
            return
        self._found("returned", len(keys))
        directive = Reclaim(
            directive_id=self._ids.new("d"),
            namespace=freed.namespace,
            reason=f"{len(keys)} chunks came back after {freed.directive_id} had freed them",
            keys=b"".join(keys),
            owners=tuple(owners),
        )
        await self._reclaimer.propose(directive)
        await self._reclaimer.execute(directive)
