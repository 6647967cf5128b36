"""What goes into the embedded engine and what comes out."""

from __future__ import annotations

from array import array
from typing import TypeAlias

import msgspec


class SimRequest(msgspec.Struct, frozen=True, kw_only=True):
    """One completion. What it generates is decided by the caller: the engine has no model.

    `token_ids` are the prompt's, typecode "I". `output_ids` are generated one by one, at least one.
    `session_id` is a label that KV events carry. `salt` separates KV. Nothing at or behind token
    `store_until` enters the cache below the engine (0: nothing, None: everything), and generated tokens only
    with `save_generated`.
    """

    request_id: str
    token_ids: array[int]
    output_ids: array[int]
    session_id: str | None = None
    salt: str = ""
    store_until: int | None = None
    save_generated: bool = False


class Usage(msgspec.Struct, frozen=True, kw_only=True):
    """Tokens of a request. `cached_tokens` of the prompt were not computed: found in HBM, or loaded.

    `cached_tokens == hbm_tokens + l1_tokens + l2_tokens`. One prompt token is always computed.
    """

    prompt_tokens: int
    completion_tokens: int
    hbm_tokens: int
    l1_tokens: int
    l2_tokens: int

    @property
    def cached_tokens(self) -> int:
        return self.hbm_tokens + self.l1_tokens + self.l2_tokens


class TokenTotals(msgspec.Struct, frozen=True, kw_only=True):
    """Tokens of all requests together. A prompt counts once it was computed or found, at its first token."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    hbm_tokens: int = 0
    l1_tokens: int = 0
    l2_tokens: int = 0

    @property
    def cached_tokens(self) -> int:
        return self.hbm_tokens + self.l1_tokens + self.l2_tokens


class Timings(msgspec.Struct, frozen=True, kw_only=True):
    """Where a request's time went, in nanoseconds; the parts add up to arrival until end.

    `queue_ns` until it was first considered with a free slot, or waited for one after loading; `load_ns`
    until its KV was there; `prefill_ns` until the first token; `decode_ns` the rest.
    """

    queue_ns: int = 0
    load_ns: int = 0
    prefill_ns: int = 0
    decode_ns: int = 0


class TokenOutput(msgspec.Struct, frozen=True, kw_only=True):
    """A token was generated. `index` 0 is the first: prefill is done."""

    request_id: str
    at_ns: int
    index: int
    token_id: int


class FinishedOutput(msgspec.Struct, frozen=True, kw_only=True):
    """All tokens were generated; nothing follows."""

    request_id: str
    at_ns: int
    usage: Usage
    timings: Timings


class AbortedOutput(msgspec.Struct, frozen=True, kw_only=True):
    """The request ended early: somebody aborted it, or the engine restarted. Nothing follows."""

    request_id: str
    at_ns: int
    reason: str
    usage: Usage
    timings: Timings


Output: TypeAlias = TokenOutput | FinishedOutput | AbortedOutput
