"""Calls to the running engine with prompts nobody sent before, and what they left in the cache."""

import asyncio
import random
from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx

from engine_bridge.cache_events import BlocksStored, CacheEvent, short_hash
from engine_bridge.call_blocks import GeneratedChunk, chunk_key
from engine_bridge.chunk_keys import ROOT, chunk_keys
from engine_bridge.drivers.lmcache_mp import LmcacheMp
from engine_bridge.stack.engine_stack import EngineStack
from lifecycle.core.ids import KEY_BYTES, Namespace, split_keys
from lifecycle.vocabulary import Tier

POLLS = 100
_RANDOM = random.SystemRandom()


def fresh_tokens(count: int) -> list[int]:
    """Random ordinary token ids."""
    return [_RANDOM.randrange(1000, 100_000) for _ in range(count)]


@dataclass(frozen=True)
class StoredChain:
    token_ids: Sequence[int]
    keys: list[bytes]
    generated: Sequence[int] = ()
    reply: dict[str, Any] = field(default_factory=dict)


class EngineCalls:
    """Completions on token ids; replies carry `token_ids`, and `usage` with cached tokens."""

    def __init__(self, stack: EngineStack) -> None:
        self.stack = stack
        self._http = httpx.AsyncClient(base_url=stack.upstream_url, timeout=120.0, trust_env=False)

    async def close(self) -> None:
        await self._http.aclose()

    def keys(self, token_ids: Sequence[int]) -> list[bytes]:
        return split_keys(chunk_keys(array("I", token_ids), self.stack.options.chunk_size))

    async def complete(self, token_ids: Sequence[int], max_tokens: int = 1, **body: Any) -> StoredChain:
        """One completion of exactly `max_tokens` tokens."""
        asked = {"model": self.stack.options.model_name, "prompt": list(token_ids), "max_tokens": max_tokens}
        asked |= {"ignore_eos": True, "return_token_ids": True, "temperature": 1.0, **body}
        response = await self._http.post("/v1/completions", json=asked)
        response.raise_for_status()
        reply = response.json()
        generated = reply["choices"][0]["token_ids"]
        return StoredChain(token_ids, self.keys(token_ids), generated, reply)

    async def cached_tokens(self, token_ids: Sequence[int]) -> int:
        """Tokens that the cache servers spare the engine, its own prefix cache emptied first."""
        (await self._http.post("/reset_prefix_cache")).raise_for_status()
        chain = await self.complete(token_ids)
        return int(chain.reply["usage"]["prompt_tokens_details"]["cached_tokens"])


class LmcacheSubject:
    """LMCache behind the engine, for the conformance suite."""

    has_lower_tier = True

    def __init__(self, calls: EngineCalls, control: LmcacheMp, namespace: Namespace) -> None:
        self.control = control
        self.namespace = namespace
        self._calls = calls

    async def store(self, num_chunks: int, after: StoredChain | None = None) -> StoredChain:
        """Compute a prompt of `num_chunks` chunks, beginning with `after`; wait until both tiers show it."""
        start = [] if after is None else list(after.token_ids)
        size = self._calls.stack.options.chunk_size
        tokens = start + fresh_tokens(num_chunks * size - len(start))
        salt = {"cache_salt": self.namespace.salt} if self.namespace.salt else {}
        chain = await self._calls.complete(tokens, **salt)
        await self.await_tiers(chain.keys, frozenset({Tier.L1, Tier.L2}))
        return chain

    async def await_tiers(self, keys: Sequence[bytes], tiers: frozenset[Tier]) -> None:
        for _ in range(POLLS):
            if all(each.tiers >= tiers for each in await self.control.locate(self.namespace, keys)):
                return
            await asyncio.sleep(0.1)
        raise AssertionError(f"{len(keys)} chunks did not reach {sorted(tiers)}")


def announced_chunks(
    prompt_keys: bytes, tail_ids: Sequence[int], stored: Iterable[CacheEvent]
) -> list[GeneratedChunk]:
    """Chunks with generated tokens that were stored behind a prompt, parents first.

    `prompt_keys` is the run of the prompt's chunk keys, `tail_ids` its tokens behind the last of them, fewer
    than a chunk. Only a chunk that begins with the tail and whose announced hash is the one computed from its
    tokens counts, so the keys are proven. Calls with the same prompt that went on differently (several
    choices, attempts) share the parent: then the answer is a tree. Events of any order will do.
    """
    children: dict[int, list[BlocksStored]] = {}
    for event in stored:
        if isinstance(event, BlocksStored) and event.tier is Tier.L1 and len(event.hashes) == 1:
            root = short_hash(ROOT) if event.parent is None else event.parent
            children.setdefault(root, []).append(event)
    tail = tuple(tail_ids)
    found: dict[bytes, GeneratedChunk] = {}
    frontier = [(prompt_keys[-KEY_BYTES:] or ROOT, tail)]
    while frontier:
        parent, prefix = frontier.pop(0)
        for event in children.get(short_hash(parent), ()):
            key = chunk_key(parent, event.token_ids)
            is_ours = event.token_ids[: len(prefix)] == prefix and short_hash(key) == event.hashes[0]
            if is_ours and key not in found:
                found[key] = GeneratedChunk(key=key, parent=parent, token_ids=event.token_ids)
                frontier.append((key, ()))
    return list(found.values())
