"""The embedded engine's core: an inference engine and its cache without a model, driven step by step.

No clock and no tasks: every call brings the time with it, `next_ns` says when something happens next. Equal
calls give equal answers.
"""

from collections.abc import Iterable, Sequence

import msgspec

from engine_bridge.sim.block_events import (
    AllBlocksCleared,
    BlockRemoved,
    EngineRestarted,
    KvEvent,
    KvListener,
)
from engine_bridge.sim.chunk_store import ChunkStore, Deleted
from engine_bridge.sim.hardware import EngineConfig
from engine_bridge.sim.requests import Output, SimRequest, TokenTotals
from engine_bridge.sim.scheduler import Scheduler
from engine_bridge.sim.tiers import ChunkId, TierUsage
from engine_bridge.sim.transfers import Agenda
from lifecycle.vocabulary import Tier


class EngineStats(msgspec.Struct, frozen=True, kw_only=True):
    """State of engine and cache at one moment. HBM's chunks are the engine's blocks."""

    num_running: int
    num_waiting: int
    tokens: TokenTotals
    """Of all requests since the engine process started."""
    tiers: dict[Tier, TierUsage]
    refused_stores: int
    """Stores that found no room in L1: none of their chunks was kept."""
    refused_copies: int
    """Copies to L2 that found no room there."""


class SimEngine:
    """Engine and cache. Times are nanoseconds and must not go back; an earlier one counts as the last.

    Every call first lets happen what was due before it, so how often it is called changes nothing.
    """

    def __init__(self, config: EngineConfig, listeners: Sequence[KvListener] = ()) -> None:
        if config.chunk_tokens % config.block_tokens:
            raise ValueError("a chunk is a whole number of blocks")
        self.config = config
        self.engine_incarnation = 1
        self._listeners = list(listeners)
        self._events: list[KvEvent] = []
        self._agenda = Agenda()
        self._now_ns = 0
        self._store = ChunkStore(config, self._agenda, self._report_removed)
        self._scheduler = Scheduler(config, self._store, self._events.append)

    @property
    def now_ns(self) -> int:
        """How far it has come."""
        return self._now_ns

    def add_listener(self, listener: KvListener) -> None:
        """Have KV events reported from now on."""
        self._listeners.append(listener)

    @property
    def num_unfinished(self) -> int:
        """Requests that were submitted and have not ended."""
        return self._scheduler.num_running + self._scheduler.num_waiting

    # Inference ------------------------------------------------------------------------------------

    def submit(self, request: SimRequest, now_ns: int) -> None:
        """Queue a request. Raises `ValueError` for one that can never run, or whose id is in use."""
        total = len(request.token_ids) + len(request.output_ids)
        if not request.token_ids or not request.output_ids:
            raise ValueError("a request needs a prompt and at least one token to generate")
        if total > self.config.max_model_len:
            raise ValueError(f"{total} tokens are more than the {self.config.max_model_len} of this model")
        if -(-total // self.config.block_tokens) > self.config.num_blocks:
            raise ValueError(f"{total} tokens do not fit into HBM")
        if request.request_id in self._scheduler:
            raise ValueError(f"request {request.request_id!r} is running")
        self._run_until(now_ns)
        self._scheduler.submit(request, self._now_ns)

    def abort(self, request_id: str, now_ns: int) -> bool:
        """End a request; False if it is over or unknown. Its end is in the next outputs."""
        self._run_until(now_ns)
        is_ended = self._scheduler.abort(request_id, "aborted", self._now_ns)
        self._tell()
        return is_ended

    def step(self, now_ns: int) -> list[Output]:
        """Let everything happen that is due until `now_ns`; what came out since the last time, in order."""
        self._run_until(now_ns)
        if self._can_start:
            self._start()
        outputs, self._scheduler.outputs = self._scheduler.outputs, []
        return outputs

    def next_ns(self) -> int | None:
        """When `step` has something to do next; None if nothing happens until the next call."""
        if self._scheduler.outputs or self._can_start:
            return self._now_ns
        return self._next_due()

    # Control of the cache -------------------------------------------------------------------------

    def locate(self, salt: str, keys: Sequence[bytes], now_ns: int) -> list[frozenset[Tier]]:
        """Tiers (L1, L2) in which each chunk can be found, in the order asked."""
        self._run_until(now_ns)
        return self._store.locate(salt, keys)

    def delete(self, salt: str, keys: Iterable[bytes], tiers: frozenset[Tier], now_ns: int) -> Deleted:
        """Delete chunks from tiers; what is in use or pinned stays and is named. Twice changes nothing."""
        self._run_until(now_ns)
        deleted = self._store.delete(salt, keys, tiers, self._now_ns)
        self._tell()
        return deleted

    def pin(self, salt: str, keys: Iterable[bytes], now_ns: int) -> None:
        """Hold chunks in L2, counted by key: held twice, they must be let go twice."""
        self._run_until(now_ns)
        self._store.pin(salt, keys)

    def unpin(self, salt: str, keys: Iterable[bytes], now_ns: int) -> None:
        self._run_until(now_ns)
        self._store.unpin(salt, keys, self._now_ns)

    def pins(self, salt: str) -> dict[bytes, int]:
        """How often each chunk is held."""
        return self._store.pins(salt)

    def prefetch(self, salt: str, keys: Iterable[bytes], now_ns: int) -> int:
        """Start to copy chunks from L2 to free room in L1; answers how many will come."""
        self._run_until(now_ns)
        return self._store.prefetch(salt, keys, self._now_ns)

    @property
    def cache_incarnation(self) -> int:
        """Counts starts of the cache server, from 1."""
        return self._store.incarnation

    # Life of the processes ------------------------------------------------------------------------

    def restart_engine(self, now_ns: int) -> None:
        """A new engine process: requests end, HBM is void, the cache below stays."""
        self._run_until(now_ns)
        self._scheduler.abort_all("the engine restarted", self._now_ns)
        self._tell()
        outputs = self._scheduler.outputs
        self._scheduler.kill()
        self._scheduler = Scheduler(self.config, self._store, self._events.append)
        self._scheduler.outputs = outputs
        self.engine_incarnation += 1
        self._events.append(EngineRestarted(incarnation=self.engine_incarnation))
        self._tell()

    def restart_cache(self, now_ns: int) -> None:
        """A new cache server: L1 is void, L2 and pins stay, loads under way fail and are computed."""
        self._run_until(now_ns)
        self._store.restart()
        self._tell()

    def reset_prefix_cache(self, now_ns: int) -> bool:
        """Empty HBM; False while requests use it."""
        self._run_until(now_ns)
        is_clear = self._scheduler.cache.clear()
        if is_clear:
            self._events.append(AllBlocksCleared())
            self._tell()
        return is_clear

    def stats(self, now_ns: int) -> EngineStats:
        self._run_until(now_ns)
        cache = self._scheduler.cache
        block_bytes = self.config.block_tokens * self.config.hardware.bytes_per_token
        hbm = TierUsage(
            used_bytes=cache.num_cached * block_bytes,
            reserved_bytes=cache.num_used * block_bytes,
            capacity_bytes=cache.num_blocks * block_bytes,
            num_chunks=cache.num_cached,
            num_stored=cache.num_stored,
            num_evicted=cache.num_evicted,
            num_deleted=0,
        )
        return EngineStats(
            num_running=self._scheduler.num_running,
            num_waiting=self._scheduler.num_waiting,
            tokens=self._scheduler.totals,
            tiers={Tier.GPU: hbm, **self._store.usage()},
            refused_stores=self._store.num_refused_stores,
            refused_copies=self._store.num_refused_copies,
        )

    # Time -----------------------------------------------------------------------------------------

    def _next_due(self) -> int | None:
        due = [self._agenda.next_ns(), self._scheduler.step_end_ns]
        due += [link.next_ns() for link in self._store.links]
        return min((at_ns for at_ns in due if at_ns is not None), default=None)

    def _run_until(self, now_ns: int) -> None:
        """Let everything due until `now_ns` happen, in order; what can start starts before time goes on."""
        while True:
            due_ns = self._next_due()
            if self._can_start and self._now_ns < now_ns and (due_ns is None or due_ns > self._now_ns):
                self._start()
                continue
            if due_ns is None or due_ns > now_ns:
                break
            self._now_ns = max(self._now_ns, due_ns)
            self._agenda.run(self._now_ns)
            for link in self._store.links:
                link.run(self._now_ns)
            if self._scheduler.step_end_ns == self._now_ns:
                self._scheduler.finish_step(self._now_ns)
            self._tell()
        self._now_ns = max(self._now_ns, now_ns)

    @property
    def _can_start(self) -> bool:
        return self._scheduler.may_start and self._scheduler.step_end_ns is None

    def _start(self) -> None:
        self._scheduler.start_step(self._now_ns)
        self._tell()

    def _report_removed(self, chunks: Sequence[ChunkId]) -> None:
        self._events.append(BlockRemoved(block_hashes=tuple(key for _, key in chunks), medium="CPU"))

    def _tell(self) -> None:
        if not self._events:
            return
        events = tuple(self._events)
        self._events.clear()
        for listener in self._listeners:
            listener(self._now_ns, events)
