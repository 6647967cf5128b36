"""Who is computed when: slots, chunked prefill and decode in one batch, loads from the cache below.

As vLLM 0.32.0 with LMCache's connector. First come, first served; what runs goes before what waits; a step
computes one token for each decoding sequence and fills the rest of its token budget with prompts. A request
whose KV is being loaded holds blocks but no slot, and is next when it is loaded. Unlike vLLM a request is
admitted only when HBM has room for all it may come to need, so nothing is ever preempted.
"""

from collections import deque
from collections.abc import Callable, Sequence

from engine_bridge.sim.block_events import BlockRemoved, BlockStored, KvEvent
from engine_bridge.sim.chunk_store import ChunkStore
from engine_bridge.sim.costs import step_ns
from engine_bridge.sim.hardware import EngineConfig
from engine_bridge.sim.prefix_cache import PrefixCache
from engine_bridge.sim.requests import (
    AbortedOutput,
    FinishedOutput,
    Output,
    SimRequest,
    TokenOutput,
    TokenTotals,
)
from engine_bridge.sim.sequences import SimSequence
from engine_bridge.sim.tiers import ChunkId


class Scheduler:
    """One engine process. `emit` takes its KV events, `outputs` collects what it has to say."""

    def __init__(self, config: EngineConfig, store: ChunkStore, emit: Callable[[KvEvent], None]) -> None:
        self._config = config
        self._store = store
        self._emit = emit
        self.cache = PrefixCache(config.num_blocks)
        self.outputs: list[Output] = []
        self._tokens = [0, 0, 0, 0, 0]
        self._sequences: dict[str, SimSequence] = {}
        self._waiting: deque[SimSequence] = deque()
        self._loaded: deque[SimSequence] = deque()
        self._running: list[SimSequence] = []
        self._plan: list[tuple[SimSequence, int]] = []
        self.step_end_ns: int | None = None
        self.may_start = False
        """Something changed since a step could not be started."""

    @property
    def totals(self) -> TokenTotals:
        prompt, completion, hbm, l1, l2 = self._tokens
        return TokenTotals(
            prompt_tokens=prompt, completion_tokens=completion, hbm_tokens=hbm, l1_tokens=l1, l2_tokens=l2
        )

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        """Requests that do not run: queued, loading, or loaded and waiting for a slot."""
        return len(self._sequences) - len(self._running)

    def submit(self, request: SimRequest, now_ns: int) -> None:
        sequence = SimSequence(request, self._config, now_ns)
        self._sequences[request.request_id] = sequence
        self._waiting.append(sequence)
        self.may_start = True

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._sequences

    def abort(self, request_id: str, reason: str, now_ns: int) -> bool:
        """End a request; False if it is not here any more. What it computed stays cached."""
        sequence = self._sequences.pop(request_id, None)
        if sequence is None:
            return False
        if sequence in self._waiting:
            self._waiting.remove(sequence)
        if sequence in self._loaded:
            self._loaded.remove(sequence)
        if sequence in self._running:
            self._running.remove(sequence)
        self.outputs.append(
            AbortedOutput(
                request_id=request_id,
                at_ns=now_ns,
                reason=reason,
                usage=sequence.usage(),
                timings=sequence.timings(now_ns),
            )
        )
        self._end(sequence)
        return True

    def abort_all(self, reason: str, now_ns: int) -> None:
        for request_id in list(self._sequences):
            self.abort(request_id, reason, now_ns)

    def kill(self) -> None:
        """The process is gone: what its transfers still bring about is told to nobody."""
        self._emit = _tell_nobody

    # Admission ------------------------------------------------------------------------------------

    def start_step(self, now_ns: int) -> None:
        """Start a step if none is under way and something can be computed."""
        self.may_start = False
        budget = self._config.max_batched_tokens
        plan: list[tuple[SimSequence, int]] = []
        for sequence in self._running:
            count = min(budget, len(sequence.token_ids) - sequence.num_computed)
            if count > 0:
                plan.append((sequence, count))
                budget -= count
        while budget > 0 and len(self._running) < self._config.max_num_seqs:
            admitted = self._next_ready(now_ns)
            if admitted is None:
                break
            admitted.started_ns = now_ns
            self._running.append(admitted)
            count = min(budget, len(admitted.token_ids) - admitted.num_computed)
            plan.append((admitted, count))
            budget -= count
        if not plan:
            return
        self._plan = plan
        duration = step_ns(
            self._config.hardware,
            [(each.num_computed, count) for each, count in plan if not each.is_prefilled],
            [each.num_computed + 1 for each, _ in plan if each.is_prefilled],
        )
        self.step_end_ns = now_ns + duration

    def _next_ready(self, now_ns: int) -> SimSequence | None:
        """The next sequence that can be computed; those that must load first are sent loading."""
        if self._loaded:
            return self._loaded.popleft()
        while self._waiting:
            sequence = self._waiting[0]
            if not self._admit(sequence, now_ns):
                return None
            self._waiting.popleft()
            if sequence.lease is None:
                sequence.ready_ns = now_ns
                return sequence
        return None

    def _admit(self, sequence: SimSequence, now_ns: int) -> bool:
        """Give a waiting sequence its cached blocks and its room, and begin to load what lies below.

        False if HBM has no room for it now.
        """
        config = self._config
        last = sequence.num_prompt - 1
        matched = self.cache.match(sequence.hashes()[: last // config.block_tokens])
        num_more = sequence.most_blocks - len(matched)
        if not self.cache.has_room(matched, num_more):
            return False
        if sequence.considered_ns is None:
            sequence.considered_ns = now_ns
        self.cache.hold(matched, num_more)
        sequence.blocks = matched
        sequence.num_promised = num_more
        sequence.num_published = len(matched)
        hit = len(matched) * config.block_tokens
        sequence.num_computed = sequence.hbm_tokens = hit
        if sequence.may_load:
            self._look_below(sequence, now_ns)
        return True

    def _look_below(self, sequence: SimSequence, now_ns: int) -> None:
        config = self._config
        hit = sequence.num_computed
        keys = sequence.chunk_keys()
        lease = self._store.acquire(sequence.request.salt, keys, hit // config.chunk_tokens)
        sequence.num_stored_chunks = lease.num_hits
        reach = min(lease.num_hits * config.chunk_tokens, sequence.num_prompt - 1)
        if reach <= hit:
            self._store.release(lease, now_ns)
            return
        sequence.lease = lease
        self._take_blocks(sequence, -(-reach // config.block_tokens))
        size = (reach - hit) * config.hardware.bytes_per_token

        def load(at_ns: int) -> None:
            self._store.load_link.start(size, at_ns, lambda ns: self._finish_load(sequence, reach, ns))

        if lease.l2:
            self._store.read_link.start(len(lease.l2) * config.chunk_bytes, now_ns, load)
        else:
            load(now_ns)

    def _finish_load(self, sequence: SimSequence, reach: int, now_ns: int) -> None:
        lease = sequence.lease
        if lease is None:
            return
        sequence.lease = None
        self._store.release(lease, now_ns)
        if sequence.is_over:
            self._free(sequence)
            return
        self.may_start = True
        if lease.incarnation != self._store.incarnation:
            # The server that was to send the chunks is gone: what is missing is computed.
            sequence.may_load = False
            sequence.num_stored_chunks = 0
        else:
            self._count_loaded(sequence, lease.num_hits, len(lease.l2), reach)
            sequence.num_computed = reach
            self._publish(sequence)
        sequence.ready_ns = now_ns
        self._loaded.append(sequence)

    def _count_loaded(self, sequence: SimSequence, num_hits: int, num_l2: int, reach: int) -> None:
        """Share out loaded tokens: whole chunks from L2, the rest from L1."""
        loaded = reach - sequence.num_computed
        sequence.l2_tokens = min(loaded, num_l2 * self._config.chunk_tokens)
        sequence.l1_tokens = loaded - sequence.l2_tokens

    # Steps ----------------------------------------------------------------------------------------

    def finish_step(self, now_ns: int) -> None:
        """The step under way is done: tokens come out, full blocks can be found, full chunks are stored."""
        plan, self._plan = self._plan, []
        self.step_end_ns = None
        self.may_start = True
        for sequence, count in plan:
            if sequence.is_over:
                continue
            self._take_blocks(sequence, -(-(sequence.num_computed + count) // self._config.block_tokens))
            sequence.num_computed += count
            self._publish(sequence)
            self._store_chunks(sequence, now_ns)
            if sequence.num_computed == len(sequence.token_ids):
                self._generate(sequence, now_ns)

    def _generate(self, sequence: SimSequence, now_ns: int) -> None:
        request = sequence.request
        index = sequence.num_generated
        token = request.output_ids[index]
        sequence.token_ids.append(token)
        sequence.num_generated += 1
        if index == 0:
            sequence.first_token_ns = now_ns
            counts = (
                sequence.num_prompt,
                0,
                sequence.hbm_tokens,
                sequence.l1_tokens,
                sequence.l2_tokens,
            )
            self._tokens = [total + count for total, count in zip(self._tokens, counts, strict=True)]
        self._tokens[1] += 1
        self.outputs.append(
            TokenOutput(request_id=request.request_id, at_ns=now_ns, index=index, token_id=token)
        )
        if sequence.num_generated == len(request.output_ids):
            del self._sequences[request.request_id]
            self._running.remove(sequence)
            self.outputs.append(
                FinishedOutput(
                    request_id=request.request_id,
                    at_ns=now_ns,
                    usage=sequence.usage(),
                    timings=sequence.timings(now_ns),
                )
            )
            self._end(sequence)

    def _take_blocks(self, sequence: SimSequence, num_blocks: int) -> None:
        count = num_blocks - len(sequence.blocks)
        if count <= 0:
            return
        taken, lost = self.cache.take(count)
        sequence.blocks = sequence.blocks + taken
        sequence.num_promised -= count
        if lost:
            self._emit(BlockRemoved(block_hashes=tuple(lost), medium="GPU"))

    def _publish(self, sequence: SimSequence) -> None:
        """Make blocks that are full findable and report them."""
        width = self._config.block_tokens
        first, last = sequence.num_published, sequence.num_computed // width
        if first == last:
            return
        hashes = sequence.hashes()
        for index in range(first, last):
            self.cache.publish(sequence.blocks[index], hashes[index])
        sequence.num_published = last
        self._emit(
            BlockStored(
                block_hashes=tuple(hashes[first:last]),
                parent_block_hash=hashes[first - 1] if first else None,
                token_ids=tuple(sequence.token_ids[first * width : last * width]),
                block_size=width,
                medium="GPU",
                session_id=sequence.request.session_id,
                salt=sequence.request.salt,
            )
        )

    # Stores and ends ------------------------------------------------------------------------------

    def _store_chunks(self, sequence: SimSequence, now_ns: int) -> None:
        first, last = sequence.num_stored_chunks, sequence.num_storable_chunks()
        if first >= last:
            return
        sequence.num_stored_chunks = last
        salt = sequence.request.salt
        keys = sequence.chunk_keys()
        positions = {(salt, keys[index]): index for index in range(first, last)}

        def stored(_: int, chunks: Sequence[ChunkId]) -> None:
            for chunk in chunks:
                self._report_chunk(sequence, keys, positions[chunk])
            sequence.num_stores -= 1
            if sequence.is_over:
                self._free(sequence)

        if self._store.store(list(positions), now_ns, stored):
            sequence.num_stores += 1

    def _report_chunk(self, sequence: SimSequence, keys: Sequence[bytes], index: int) -> None:
        width = self._config.chunk_tokens
        self._emit(
            BlockStored(
                block_hashes=(keys[index],),
                parent_block_hash=keys[index - 1] if index else None,
                token_ids=tuple(sequence.token_ids[index * width : (index + 1) * width]),
                block_size=width,
                medium="CPU",
            )
        )

    def _end(self, sequence: SimSequence) -> None:
        sequence.is_over = True
        self._free(sequence)

    def _free(self, sequence: SimSequence) -> None:
        """Let blocks go once no transfer reads or writes them."""
        self.may_start = True
        if sequence.num_promised:
            self.cache.forgo(sequence.num_promised)
            sequence.num_promised = 0
        if sequence.num_stores == 0 and sequence.lease is None and sequence.blocks:
            self.cache.release(sequence.blocks)
            sequence.blocks = []


def _tell_nobody(_: KvEvent) -> None:
    return None
