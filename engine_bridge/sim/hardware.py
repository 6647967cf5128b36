"""What the simulated machine can do. Every figure made with these is SIMULATED.

The presets are estimates from data sheets and model configurations, not measurements:

- compute: a dense transformer takes 2 FLOP per parameter and token; attention takes `4 * layers * heads *
  head_dim` FLOP per pair of a token and one it looks back on. Prefill reaches about half of the card's dense
  bf16 peak, attention less.
- memory: a decode step reads all weights once, and the KV of every sequence in the batch; about 80 % of the
  card's bandwidth is reached.
- KV: `2 * layers * kv_heads * head_dim * 2` bytes per token in bf16.
- links: PCIe 5.0 x16 moves about 50 GB/s each way after overheads, one NVMe drive reads about 6 GB/s and
  writes 4.
"""

import msgspec


class Hardware(msgspec.Struct, frozen=True, kw_only=True):
    """One accelerator with one model. Bandwidths in bytes per second, times as named."""

    name: str
    bytes_per_token: int
    """KV of one token over all layers."""
    hbm_bytes: int
    """Accelerator memory left for KV."""
    step_ns: int
    """Shortest step: all weights read once, kernels launched."""
    token_ps: int
    """Computing one token, without attention, in picoseconds."""
    pair_ps: int
    """Attention of one token to one token before it, computed in prefill, in picoseconds."""
    context_ps: int
    """Reading one token's KV for one decoded token, in picoseconds."""
    load_bandwidth: int
    """L1 to HBM, shared by everything that is loaded."""
    store_bandwidth: int
    """HBM to L1, shared by everything that is stored."""
    l2_read_bandwidth: int
    l2_write_bandwidth: int
    load_latency_ns: int = 500_000
    """Fixed part of a transfer between HBM and L1: messages, launches."""
    l2_latency_ns: int = 2_000_000
    """Fixed part of a transfer between L1 and L2."""


H100_8B = Hardware(
    name="h100-8b",
    # 32 layers, 8 KV heads of 128; 80 GB less 10 %, 16 GB of weights and 6 GB of activations.
    bytes_per_token=131_072,
    hbm_bytes=50_000_000_000,
    # 16 GB at 2.7 TB/s.
    step_ns=6_000_000,
    # 16 GFLOP at 495 TFLOP/s.
    token_ps=32_000_000,
    # 524 kFLOP at 400 TFLOP/s.
    pair_ps=1_310,
    # 128 KiB at 2.7 TB/s.
    context_ps=48_500,
    load_bandwidth=50_000_000_000,
    store_bandwidth=50_000_000_000,
    l2_read_bandwidth=6_000_000_000,
    l2_write_bandwidth=4_000_000_000,
)
"""An 8B model with grouped attention (Llama 3.1 8B, Qwen3 8B are near) on one 80 GB H100."""

H100_32B = Hardware(
    name="h100-32b",
    # 64 layers, 8 KV heads of 128; two cards of 80 GB less 10 %, 65 GB of weights and 15 GB of activations.
    bytes_per_token=262_144,
    hbm_bytes=64_000_000_000,
    # 65 GB at 5.4 TB/s over two cards, and their all-reduces.
    step_ns=13_500_000,
    # 65 GFLOP at 900 TFLOP/s.
    token_ps=72_000_000,
    # 64 layers, 64 heads of 128: 2.1 MFLOP at 800 TFLOP/s.
    pair_ps=2_620,
    context_ps=48_500,
    load_bandwidth=100_000_000_000,
    store_bandwidth=100_000_000_000,
    l2_read_bandwidth=6_000_000_000,
    l2_write_bandwidth=4_000_000_000,
)
"""A 32B model (Qwen3 32B is near) on two H100s that work as one."""

INSTANT = Hardware(
    name="instant",
    bytes_per_token=131_072,
    hbm_bytes=8_000_000_000,
    step_ns=50_000,
    token_ps=10_000,
    pair_ps=0,
    context_ps=0,
    load_bandwidth=1_000_000_000_000,
    store_bandwidth=1_000_000_000_000,
    l2_read_bandwidth=1_000_000_000_000,
    l2_write_bandwidth=1_000_000_000_000,
    load_latency_ns=10_000,
    l2_latency_ns=10_000,
)
"""No machine at all: for tests of what goes on above the engine, which must not wait for it."""

PRESETS = {preset.name: preset for preset in (H100_8B, H100_32B, INSTANT)}


class EngineConfig(msgspec.Struct, frozen=True, kw_only=True):
    """How engine and cache are set up; defaults are those of vLLM 0.32 and LMCache 0.5.6 where they have one.

    Capacities in bytes; 0 means that the tier is not there.
    """

    hardware: Hardware = H100_8B
    block_tokens: int = 16
    chunk_tokens: int = 256
    """A multiple of `block_tokens`."""
    max_num_seqs: int = 64
    """Slots: sequences that are computed at a time."""
    max_batched_tokens: int = 8192
    """Tokens that one step computes at most, so the size of a prefill's chunks."""
    max_model_len: int = 262_144
    l1_bytes: int = 64_000_000_000
    l2_bytes: int = 0
    l1_watermark_percent: int = 80
    """Filled so far, the evictor of L1 starts."""
    l1_evict_percent: int = 20
    """Share of all chunks that one run of the evictor takes."""
    l2_watermark_percent: int = 80
    l2_evict_percent: int = 20
    evict_interval_ns: int = 1_000_000_000
    write_back_delay_ns: int = 100_000_000
    """From a chunk's commit in L1 to the start of its copy to L2."""

    @property
    def chunk_bytes(self) -> int:
        return self.chunk_tokens * self.hardware.bytes_per_token

    @property
    def num_blocks(self) -> int:
        """Blocks of HBM."""
        return self.hardware.hbm_bytes // (self.block_tokens * self.hardware.bytes_per_token)
