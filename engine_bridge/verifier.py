"""Verification by key: a chunk counts only when the cache itself showed the key that was computed for it.

A chunk key is a chained hash, so a key that the cache shows proves every token before it: verification costs
nothing on the wire. The cache's directory is asked twice. Before a call's answer: what is absent then, and
there afterwards, was stored while the call was under way. After it: where its chunks lie, under which salt.
What the call generated is read from the engine's own block events. They also tell chunks of the prompt that
it computed, whether or not it counts its tokens in the answer: many streams do not, and no aborted call does.

An event that a chunk entered L1 proves no store of ours: a load from L2 reports the same.
"""

import asyncio
from collections.abc import Callable, Sequence

import msgspec
import structlog

from engine_bridge.call_blocks import CallBlocks, GeneratedChunk
from engine_bridge.errors import CacheUnavailable
from lifecycle.core.events import ChunksConfirmed
from lifecycle.core.ids import KEY_BYTES, Namespace, split_keys
from lifecycle.core.observations import GenerationKeys, VerificationResult
from lifecycle.errors import InvalidObservation, LogUnavailable, UnknownContext
from lifecycle.orphans import unproven_behind_ours
from lifecycle.ports import CacheControl, Presence
from lifecycle.tracker import Tracker
from lifecycle.vocabulary import Tier

log = structlog.get_logger(__name__)

PAUSES_SECONDS = (0.02, 0.1, 0.2, 0.4, 0.8, 1.5, 3.0)
"""Pauses before each look after a call's end: the directory lags, and copies to lower tiers come later."""

LOG_WAIT_SECONDS = 300.0
"""How long the proof of a call waits for the log to come back: each holds the tokens of a prompt."""

LOG_PAUSE_SECONDS = 0.5

MIN_LOOKS = 3
"""Looks at a call whose output was not counted: what it generated may be reported in any of them."""


class Before(msgspec.Struct, frozen=True):
    """What the cache showed of a call's keys before its answer: those it had not got, and those `elsewhere`.

    The latter are not proven ours, and with several engines may lie where the call did not go.
    """

    absent: frozenset[bytes] = frozenset()
    elsewhere: frozenset[bytes] = frozenset()


class ComputedCall(msgspec.Struct, frozen=True, kw_only=True):
    """What was computed for one attempt, and what the engine said of it when it ended.

    `keys` is the prompt's run of chunk keys, `token_ids` its tokens. `before` is what the cache showed of
    them before the answer. `session_id` labels the attempt's block events, empty if it had no label of its
    own. `stored_limit` is the token behind which admission control stored nothing, None without it. Token
    counts are -1 when the engine did not say.
    """

    uid: str
    call_id: str
    attempt: int
    namespace: Namespace
    keys: bytes
    token_ids: Sequence[int]
    num_tokens: int
    chunk_size: int
    completed: bool
    before: Before = Before()
    session_id: str = ""
    cached_tokens: int = -1
    output_tokens: int = -1
    num_choices: int = 1
    stored_limit: int | None = None

    @property
    def stored_keys(self) -> bytes:
        """Keys of the prompt's chunks that the call may have stored."""
        limit = self.num_tokens if self.stored_limit is None else self.stored_limit
        return self.keys[: limit // self.chunk_size * KEY_BYTES]

    def caused(self) -> set[bytes]:
        """Keys whose store was the call's if they lie in the cache now: absent before, or computed by it.

        The engine's `cached_tokens` were found, in its own cache or in ours; everything behind was computed.
        A chunk found in part only (the engine's own blocks are smaller) was not there whole. But the engine
        computes the last token of a prompt in any case, so of a chunk that ends there it proves nothing.
        """
        keys = split_keys(self.stored_keys)
        size = self.chunk_size
        computed_from = self.cached_tokens // size if self.cached_tokens >= 0 else len(keys)
        if (computed_from + 1) * size == self.num_tokens and self.cached_tokens % size:
            computed_from += 1
        return {key for at, key in enumerate(keys) if at >= computed_from or key in self.before.absent}


class Verifier:
    """Confirms, after each tracked call, what the cache holds of it, and learns what it generated.

    `pauses_seconds` are the pauses before each look at one call. `blind` says that what the cache's directory
    does not show may be there all the same. With `several` engines one that computes what lies with another
    adds a copy, and proves nothing about whose the first one is.
    """

    def __init__(
        self,
        tracker: Tracker,
        cache: CacheControl,
        blocks: CallBlocks,
        pauses_seconds: Sequence[float] = PAUSES_SECONDS,
        blind: Callable[[], bool] = lambda: False,
        several: bool = False,
    ) -> None:
        self._tracker = tracker
        self._cache = cache
        self._blocks = blocks
        self._pauses_seconds = pauses_seconds
        self._blind = blind
        self._several = several

    async def before(self, namespace: Namespace, keys: bytes) -> Before:
        """What the cache shows of those of a call's keys that are not proven to be ours.

        To be asked before the call's answer. A cache that does not tell proves nothing.
        """
        unproven = self._tracker.contexts.index.unproven(namespace, keys)
        if not unproven or self._blind():
            return Before()
        try:
            shown = await self._cache.locate(namespace, unproven)
        except CacheUnavailable as error:
            log.warning("the cache was not asked before a call", error=str(error))
            return Before()
        return Before(
            absent=frozenset(p.key for p in shown if not p.tiers),
            elsewhere=frozenset(p.key for p in shown if p.tiers and self._several),
        )

    async def verify(self, call: ComputedCall) -> None:
        """Look until everything expected was seen or the settle time is over; record what was seen.

        If nothing that should have been stored shows up, the context counts as unmapped until a later call
        of it is confirmed.
        """
        index = self._tracker.contexts.index
        missing = index.unverified(call.namespace, call.stored_keys)
        num_expected = len(missing)
        num_generated = self._num_generated(call)
        generated: dict[bytes, GeneratedChunk] = {}
        reached_cache = False
        for num_looks, pause in enumerate(self._pauses_seconds, start=1):
            await asyncio.sleep(pause)
            await self._books_are_kept()
            await self._find_generated(call, generated)
            caused = (call.caused() | self._computed(call)) - call.before.elsewhere
            wanted = dict.fromkeys(missing)
            own = b"".join([*(k for k in split_keys(call.stored_keys) if k in caused), *generated])
            wanted.update(dict.fromkeys(index.unproven(call.namespace, own)))
            if wanted:
                try:
                    shown = await self._confirm(call, list(wanted), caused | set(generated))
                    reached_cache = True
                except (CacheUnavailable, LogUnavailable) as error:
                    log.warning("verification waits", error=str(error))
                    continue
                missing = [k for k in missing if k not in shown]
                if len(shown) < len(wanted):
                    continue
            enough = num_generated if num_generated is not None else 0
            if len(generated) >= enough and (num_generated is not None or num_looks >= MIN_LOOKS):
                break
        await self._conclude(call, num_expected, missing, reached_cache)
        self._blocks.forget(call.session_id)

    def _computed(self, call: ComputedCall) -> set[bytes]:
        keys = split_keys(call.stored_keys)
        places = self._blocks.computed_chunks(call.session_id, call.num_tokens, call.chunk_size)
        return {keys[place] for place in places if place < len(keys)}

    async def _books_are_kept(self) -> None:
        """Until nothing waits for the log: what the cache shows must be recorded behind what the call did."""
        waited = 0.0
        while self._tracker.degraded and waited < LOG_WAIT_SECONDS:
            await asyncio.sleep(LOG_PAUSE_SECONDS)
            waited += LOG_PAUSE_SECONDS

    def _num_generated(self, call: ComputedCall) -> int | None:
        """Chunks that one choice's generated tokens fill, None if it may be any: the last token has no KV."""
        if call.stored_limit is not None or not call.session_id or not self._blocks.live:
            return 0
        if call.output_tokens < 0:
            return None
        size = call.chunk_size
        per_choice = call.output_tokens // max(call.num_choices, 1)
        return max((call.num_tokens + per_choice - 1) // size - call.num_tokens // size, 0)

    async def _find_generated(self, call: ComputedCall, known: dict[bytes, GeneratedChunk]) -> None:
        if call.stored_limit is not None or not call.session_id:
            return
        tail_ids = tuple(call.token_ids[len(call.keys) // KEY_BYTES * call.chunk_size :])
        found = self._blocks.generated(call.session_id, call.keys, tail_ids, call.chunk_size)
        fresh = {chunk.key: chunk for chunk in found if chunk.key not in known}
        if fresh:
            known.update(fresh)
            await self._report_generation(call, list(known.values()))

    async def _confirm(self, call: ComputedCall, keys: Sequence[bytes], caused: set[bytes]) -> set[bytes]:
        """Ask where the keys lie, record it, and answer which lie somewhere."""
        present = [p for p in await self._cache.locate(call.namespace, keys) if p.tiers]
        ours = [p for p in present if p.key in caused]
        others = [p for p in present if p.key not in caused]
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
        return {p.key for p in present}

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
        self, call: ComputedCall, num_expected: int, missing: Sequence[bytes], reached_cache: bool
    ) -> None:
        reason = ""
        num_chunks = len(call.stored_keys) // KEY_BYTES
        num_asked = num_chunks if reached_cache or not num_expected else 0
        other = self._blocks.disagreement(call.session_id, call.token_ids)
        if other is not None:
            reason = f"verify: the engine computed other tokens than we did from token {other} on"
        elif num_expected and not reached_cache:
            reason = "verify: the cache could not be asked"
        elif len(missing) == num_expected and missing and call.completed and call.stored_limit is None:
            position = call.keys.index(missing[0]) // KEY_BYTES * call.chunk_size
            reason = f"verify: no key computed for the call showed up behind token {position}"
        elif not call.completed:
            self._leave_unproven(call)
            return
        try:
            await self._tracker.observe(
                call.uid,
                VerificationResult(
                    at_ns=self._tracker.clock.now_ns(),
                    reason=reason,
                    call_id=call.call_id,
                    attempt=call.attempt,
                    num_chunks=num_asked,
                    num_shown=max(num_asked - len(missing), 0),
                ),
            )
        except UnknownContext:
            log.info("verified a context that is gone", uid=call.uid)

    def _leave_unproven(self, call: ComputedCall) -> None:
        """Whoever looks for drift proves what a call that broke off may have stored behind what is ours."""
        run = unproven_behind_ours(self._tracker.contexts, call.namespace, call.stored_keys)
        if run:
            self._tracker.cut_off.setdefault((call.namespace, run), self._tracker.clock.now_ns())


def _tiers(present: Sequence[Presence]) -> tuple[Tier, ...]:
    return tuple(sorted({tier for p in present for tier in p.tiers}))
