"""One request inside the engine: its blocks, what is computed, what is stored, where its time went."""

from __future__ import annotations

from array import array

from engine_bridge.chunk_keys import extend_keys
from engine_bridge.sim.chunk_store import Lease
from engine_bridge.sim.hardware import EngineConfig
from engine_bridge.sim.prefix_cache import block_hashes
from engine_bridge.sim.requests import SimRequest, Timings, Usage
from lifecycle.core.ids import KEY_BYTES


class SimSequence:
    """Mutable state of one request; the scheduler is its only writer.

    The first `num_computed` tokens have KV, in `blocks`; the token generated last has none yet. `is_over`
    says that nobody waits for it any more, though transfers may still hold its blocks.
    """

    def __init__(self, request: SimRequest, config: EngineConfig, arrived_ns: int) -> None:
        self.request = request
        self.token_ids = array("I", request.token_ids)
        self.arrived_ns = arrived_ns
        self.considered_ns: int | None = None
        self.ready_ns: int | None = None
        self.started_ns: int | None = None
        self.first_token_ns: int | None = None
        self.blocks: list[int] = []
        self.num_promised = 0
        self.num_computed = 0
        self.num_published = 0
        self.num_generated = 0
        self.num_stored_chunks = 0
        self.num_stores = 0
        self.lease: Lease | None = None
        self.may_load = True
        self.is_over = False
        self.hbm_tokens = self.l1_tokens = self.l2_tokens = 0
        self._config = config
        self._hashes: list[bytes] = []
        self._keys = bytearray()

    @property
    def num_prompt(self) -> int:
        return len(self.request.token_ids)

    @property
    def is_prefilled(self) -> bool:
        return self.num_generated > 0

    @property
    def most_blocks(self) -> int:
        """Blocks it needs at its end: the last generated token gets no KV."""
        tokens = self.num_prompt + len(self.request.output_ids) - 1
        return -(-tokens // self._config.block_tokens)

    def hashes(self) -> list[bytes]:
        """Hashes of all full blocks of its tokens so far."""
        width = self._config.block_tokens
        if len(self._hashes) < len(self.token_ids) // width:
            self._hashes = block_hashes(self.token_ids, width, self.request.salt, self._hashes)
        return self._hashes

    def chunk_keys(self) -> list[bytes]:
        """Keys of all full chunks of its tokens so far."""
        width = self._config.chunk_tokens
        if len(self._keys) // KEY_BYTES < len(self.token_ids) // width:
            extend_keys(self._keys, self.token_ids, len(self._keys) // KEY_BYTES * width, width)
        return [bytes(self._keys[at : at + KEY_BYTES]) for at in range(0, len(self._keys), KEY_BYTES)]

    def num_storable_chunks(self) -> int:
        """Chunks that may be in the store by now: computed, allowed, and full."""
        limit = self.num_computed if self.request.save_generated else min(self.num_computed, self.num_prompt)
        if self.request.store_until is not None:
            limit = min(limit, self.request.store_until)
        return limit // self._config.chunk_tokens

    def usage(self) -> Usage:
        return Usage(
            prompt_tokens=self.num_prompt,
            completion_tokens=self.num_generated,
            hbm_tokens=self.hbm_tokens,
            l1_tokens=self.l1_tokens,
            l2_tokens=self.l2_tokens,
        )

    def timings(self, now_ns: int) -> Timings:
        """Where the time until now went."""
        considered = now_ns if self.considered_ns is None else self.considered_ns
        ready = now_ns if self.ready_ns is None else self.ready_ns
        started = now_ns if self.started_ns is None else self.started_ns
        first = now_ns if self.first_token_ns is None else self.first_token_ns
        return Timings(
            queue_ns=(considered - self.arrived_ns) + (started - ready),
            load_ns=ready - considered,
            prefill_ns=first - started,
            decode_ns=now_ns - first,
        )
