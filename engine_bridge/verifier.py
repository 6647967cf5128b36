"""Verification by key: a chunk counts only when the cache itself showed the key that was computed for it.

A chunk key is a chained hash, so a key that the cache shows proves every token before it: verification costs
nothing on the wire. Two sources: the engine's KV events while a call is under way say that *this call's time*
stored a chunk, and which tokens it generated; the directory says where the chunk lies, under which salt.
"""

import asyncio
import time
from collections import defaultdict, deque
from collections.abc import Sequence

import msgspec
import structlog

from engine_bridge.cache_events import BlocksStored, EventBatch, GeneratedChunk, generated_chunks, short_hash
from engine_bridge.chunk_keys import ROOT
from engine_bridge.errors import CacheUnavailable
from lifecycle.core.events import ChunksConfirmed
from lifecycle.core.ids import KEY_BYTES, Namespace
from lifecycle.core.observations import GenerationKeys, VerificationResult
from lifecycle.errors import InvalidObservation, LogUnavailable, UnknownContext
from lifecycle.ports import CacheControl, Presence
from lifecycle.tracker import Tracker
from lifecycle.vocabulary import Tier

log = structlog.get_logger(__name__)

PAUSES_SECONDS = (0.02, 0.1, 0.2, 0.4, 0.8, 1.5, 3.0)
"""Pauses before each look after a call's end: the directory lags, and copies to lower tiers come later."""

STORE_LAG_SECONDS = 0.1
"""How long after a call's end the engine may still report what it stored; it does so before it answers."""

NUM_UNTOLD_LOOKS = 3
"""Looks after which stores that the engine did not report are not waited for any more."""

MAX_UNTOLD_CHUNKS = 1024
"""Chunks looked for behind the prompt of a call whose output the engine did not count."""

MAX_JOURNAL_TOKENS = 2_000_000
"""Tokens of stored chunks remembered; the oldest go first."""


class ComputedCall(msgspec.Struct, frozen=True, kw_only=True):
    """What was computed for one attempt, and what the engine said of it when it ended.

    `keys` is the prompt's run of chunk keys, `tail_ids` its tokens behind the last of them. `stored_limit` is
    the token behind which admission control stored nothing, None without it; `began` and `ended` are
    `StoreJournal.now()` of its arrival and end; token counts are -1 when the engine did not say.
    """

    uid: str
    call_id: str
    attempt: int
    namespace: Namespace
    keys: bytes
    tail_ids: tuple[int, ...]
    num_tokens: int
    chunk_size: int
    began: float
    ended: float
    completed: bool
    output_tokens: int = -1
    num_choices: int = 1
    stored_limit: int | None = None


class StoreJournal:
    """The latest stores into L1 that the engine reported, by key and by parent."""

    def __init__(self) -> None:
        self._order: deque[tuple[int, BlocksStored]] = deque()
        self._since: dict[int, float] = {}
        self._children: defaultdict[int, list[BlocksStored]] = defaultdict(list)
        self._num_tokens = 0
        self.live = False
        """Whether a stream is being read: without one no store can be called ours."""

    def now(self) -> float:
        """The journal's clock, in seconds."""
        return time.monotonic()

    def take(self, batch: EventBatch) -> None:
        """Take in one batch of a stream."""
        for event in batch.events:
            if isinstance(event, BlocksStored) and event.tier is Tier.L1 and len(event.hashes) == 1:
                self._add(event)

    def stored_since(self, key: bytes, began: float) -> bool:
        """Whether the key was reported stored at or after `began`."""
        return self._since.get(short_hash(key), -1.0) >= began

    def behind(
        self, keys: bytes, tail_ids: Sequence[int], window: tuple[float, float], depth: int
    ) -> list[GeneratedChunk]:
        """Chunks stored behind a prompt within a window of time, parents first, at most `depth` in a row."""
        events: list[BlocksStored] = []
        frontier = [short_hash(keys[-KEY_BYTES:] or ROOT)]
        began, until = window
        for _ in range(depth):
            children = [
                event
                for parent in frontier
                for event in self._children.get(parent, ())
                if began <= self._since.get(event.hashes[0], -1.0) <= until
            ]
            if not children:
                break
            events += children
            frontier = [event.hashes[0] for event in children]
        return generated_chunks(keys, tail_ids, events)

    def others_behind(self, parent: bytes, key: bytes, began: float) -> bool:
        """Whether something else than `key` was stored behind `parent` since `began`."""
        return any(
            e.hashes[0] != short_hash(key) and self._since.get(e.hashes[0], -1.0) >= began
            for e in self._children.get(short_hash(parent), ())
        )

    def _add(self, event: BlocksStored) -> None:
        parent = short_hash(ROOT) if event.parent is None else event.parent
        known = event.hashes[0] in self._since
        self._since[event.hashes[0]] = self.now()
        if not known:
            self._order.append((parent, event))
            self._children[parent].append(event)
            self._num_tokens += len(event.token_ids)
        while self._num_tokens > MAX_JOURNAL_TOKENS:
            old_parent, old = self._order.popleft()
            self._num_tokens -= len(old.token_ids)
            self._since.pop(old.hashes[0], None)
            siblings = self._children[old_parent]
            siblings.remove(old)
            if not siblings:
                del self._children[old_parent]


class Verifier:
    """Confirms, after each tracked call, what the cache holds of it, and learns what it generated."""

    def __init__(
        self,
        tracker: Tracker,
        cache: CacheControl,
        journal: StoreJournal,
        pauses_seconds: Sequence[float] = PAUSES_SECONDS,
    ) -> None:
        self._tracker = tracker
        self._cache = cache
        self._pauses_seconds = pauses_seconds
        self.journal = journal

    async def verify(self, call: ComputedCall) -> None:
        """Look until everything expected was seen or the settle time is over; record what was seen.

        If nothing that should have been stored shows up, the context counts as unmapped until a later call
        of it is confirmed.
        """
        limit = call.num_tokens if call.stored_limit is None else call.stored_limit
        own = call.keys[: limit // call.chunk_size * KEY_BYTES]
        missing = self._unverified(call.namespace, own)
        num_expected = len(missing)
        num_shown = 0
        unowned: set[bytes] = set()
        generated: dict[bytes, GeneratedChunk] = {}
        # Later calls go on from the same prompt: what they store must not pass for what this one generated.
        window = (call.began, call.ended + STORE_LAG_SECONDS)
        depth = self._num_generated(call)
        reached_cache = False
        for num_looks, pause in enumerate(self._pauses_seconds, start=1):
            await asyncio.sleep(pause)
            if depth:
                found = self.journal.behind(call.keys, call.tail_ids, window, depth)
                fresh = [g for g in found if g.key not in generated]
                if fresh:
                    generated.update((g.key, g) for g in fresh)
                    await self._report_generation(call, list(generated.values()))
            # The directory may show a chunk before the engine reports its store: it is ours all the same.
            reported = [key for key in unowned if self.journal.stored_since(key, call.began)]
            wanted = missing + self._unverified(call.namespace, b"".join(generated)) + reported
            if wanted:
                try:
                    shown, ours = await self._confirm(call, wanted)
                    reached_cache = True
                except (CacheUnavailable, LogUnavailable) as error:
                    log.warning("verification waits", error=str(error))
                    continue
                unowned = (unowned | shown) - ours
                num_shown += len([k for k in missing if k in shown])
                missing = [k for k in missing if k not in shown]
            told = len(generated) >= depth and not unowned
            if not missing and (told or num_looks > NUM_UNTOLD_LOOKS):
                break
        await self._conclude(call, num_expected, num_shown, missing, reached_cache)

    def _num_generated(self, call: ComputedCall) -> int:
        """Chunks that one choice's generated tokens fill: the last token has no KV.

        Where the engine did not count the output (an aborted call, a stream without usage) it may be any.
        """
        if call.stored_limit is not None or not self.journal.live:
            return 0
        size = call.chunk_size
        if call.output_tokens < 0:
            return MAX_UNTOLD_CHUNKS
        per_choice = call.output_tokens // max(call.num_choices, 1)
        return max((call.num_tokens + per_choice - 1) // size - call.num_tokens // size, 0)

    def _unverified(self, namespace: Namespace, keys: bytes) -> list[bytes]:
        return list(self._tracker.contexts.index.unverified(namespace, keys)) if keys else []

    async def _confirm(self, call: ComputedCall, keys: Sequence[bytes]) -> tuple[set[bytes], set[bytes]]:
        """Ask where the keys lie, record it, and answer which lie somewhere and which of those are ours."""
        present = [p for p in await self._cache.locate(call.namespace, keys) if p.tiers]
        ours = [p for p in present if self.journal.stored_since(p.key, call.began)]
        others = [p for p in present if not self.journal.stored_since(p.key, call.began)]
        events = [
            ChunksConfirmed(
                at_ns=self._tracker.clock.now_ns(),
                namespace=call.namespace,
                keys=b"".join(p.key for p in group),
                tiers=_tiers(group),
                stored=stored,
            )
            for group, stored in ((ours, True), (others, False))
            if group
        ]
        if events:
            await self._tracker.record(call.namespace, events)
        return {p.key for p in present}, {p.key for p in ours}

    async def _report_generation(self, call: ComputedCall, chunks: Sequence[GeneratedChunk]) -> None:
        """One observation for each way the prompt went on: a choice, or another attempt at it."""
        by_key = {c.key: c for c in chunks}
        parents = {c.parent for c in chunks}
        size = call.chunk_size
        first = len(call.keys) // KEY_BYTES
        for choice, leaf in enumerate(c for c in chunks if c.key not in parents):
            run: list[bytes] = []
            at: GeneratedChunk | None = leaf
            while at is not None:
                run.append(at.key)
                at = by_key.get(at.parent)
            observation = GenerationKeys(
                at_ns=self._tracker.clock.now_ns(),
                call_id=call.call_id,
                attempt=call.attempt,
                choice=choice,
                num_tokens=(first + len(run)) * size,
                chain=call.keys + b"".join(reversed(run)),
                chunk_size=size,
            )
            try:
                await self._tracker.observe(call.uid, observation)
            except (InvalidObservation, UnknownContext) as error:
                log.warning("generated chunks not placed", call=call.call_id, error=str(error))

    async def _conclude(
        self,
        call: ComputedCall,
        num_expected: int,
        num_shown: int,
        missing: Sequence[bytes],
        reached_cache: bool,
    ) -> None:
        reason = ""
        if num_expected and not reached_cache:
            reason = "verify: the cache could not be asked"
        elif missing and call.completed:
            at = call.keys.index(missing[0])
            parent = call.keys[at - KEY_BYTES : at] if at else ROOT
            position = at // KEY_BYTES * call.chunk_size
            if self.journal.others_behind(parent, missing[0], call.began):
                reason = f"verify: the cache stored another chunk behind token {position} than was computed"
            elif not num_shown and call.stored_limit is None:
                reason = f"verify: no key computed for the call showed up behind token {position}"
        elif not call.completed:
            return
        try:
            await self._tracker.observe(
                call.uid, VerificationResult(at_ns=self._tracker.clock.now_ns(), reason=reason)
            )
        except UnknownContext:
            log.info("verified a context that is gone", uid=call.uid)


def _tiers(present: Sequence[Presence]) -> tuple[Tier, ...]:
    return tuple(sorted({tier for p in present for tier in p.tiers}))
