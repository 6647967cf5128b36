"""What engine and cache say of prompts, asked past the proxy."""

import asyncio
from array import array
from collections.abc import Sequence
from typing import Any

import httpx

from engine_bridge.chunk_keys import chunk_keys
from engine_bridge.stack.engine_stack import EngineStack
from lifecycle.core.ids import split_keys
from lifecycle.vocabulary import CACHE_SALT, Tier
from tests.e2e.polling import NUM_POLLS, POLL_SECONDS

BOTH = frozenset({Tier.L1, Tier.L2})
NOWHERE: frozenset[Tier] = frozenset()
KV_RANK = 1 << 24 | 0 << 16 | 1 << 8 | 0
"""LMCache's packed rank of a single worker: world size, rank, local world size, local rank."""

PLAIN = {"chat_template_kwargs": {"enable_thinking": False}}
"""The reply is text and tool calls, not thoughts that nobody sends back."""

Message = dict[str, Any]


class Cache:
    """Engine and cache, asked directly. Keys come from the engine's own tokens and the cache's own hash."""

    def __init__(self, stack: EngineStack) -> None:
        self.stack = stack
        self.chunk = stack.options.chunk_size
        self._http = httpx.AsyncClient(timeout=120.0, trust_env=False)

    async def close(self) -> None:
        await self._http.aclose()

    async def _post(self, url: str, body: object = None) -> Any:
        response = await self._http.post(url, json=body)
        response.raise_for_status()
        return response.json() if response.content else None

    async def tokens(
        self, messages: Sequence[Message], tools: Sequence[Message] = (), *, prompt: bool = True
    ) -> list[int]:
        """The prompt as the engine itself renders and encodes it; without `prompt` what stands before it."""
        body: dict[str, Any] = {"model": self.stack.options.model_name, "messages": list(messages), **PLAIN}
        body |= {"add_generation_prompt": prompt}
        if tools:
            body["tools"] = list(tools)
        return list((await self._post(f"{self.stack.upstream_url}/tokenize", body))["tokens"])

    async def keys_of(self, token_ids: Sequence[int]) -> list[bytes]:
        """Chunk keys by the coordinator; our own must be the same."""
        body = {"token_ids": list(token_ids), "model_name": self.stack.model_path, "world_size": 1}
        reply = await self._post(f"{self.stack.coordinator_url}/directory/lookup", {**body, CACHE_SALT: ""})
        theirs = [bytes.fromhex(each["key"]["chunk_hash_hex"]) for each in reply["results"]]
        assert theirs == split_keys(chunk_keys(array("I", token_ids), self.chunk))
        return theirs

    async def keys(self, messages: Sequence[Message], tools: Sequence[Message] = ()) -> list[bytes]:
        """Chunk keys of the whole prompt."""
        return await self.keys_of(await self.tokens(messages, tools))

    async def head_keys(self, messages: Sequence[Message], tools: Sequence[Message] = ()) -> list[bytes]:
        """Keys of the chunks that lie wholly inside the messages, which begin the list."""
        longer = [*messages, {"role": "user", "content": "x"}], [*messages, {"role": "user", "content": "y"}]
        one, other = [await self.tokens(each, tools) for each in longer]
        shared = next(i for i, (a, b) in enumerate(zip(one, other, strict=True)) if a != b)
        return (await self.keys_of(one))[: (shared - 3) // self.chunk]

    async def where(self, keys: Sequence[bytes], salt: str = "") -> list[frozenset[Tier]]:
        """Tiers of each key, by the directory."""
        named = [
            {
                "chunk_hash_hex": key.hex(),
                "model_name": self.stack.model_path,
                "kv_rank": KV_RANK,
                "object_group_id": 0,
                CACHE_SALT: salt,
            }
            for key in keys
        ]
        if not named:
            return []
        reply = await self._post(f"{self.stack.coordinator_url}/directory/lookup", {"keys": named})
        return [frozenset(Tier(p["tier"]) for p in each["placements"]) for each in reply["results"]]

    async def present(self, keys: Sequence[bytes], salt: str = "") -> dict[str, int]:
        """How many of the keys lie in each tier, and how many anywhere."""
        found = await self.where(keys, salt)
        return {
            "l1": sum(Tier.L1 in tiers for tiers in found),
            "l2": sum(Tier.L2 in tiers for tiers in found),
            "any": sum(bool(tiers) for tiers in found),
        }

    async def await_tiers(self, keys: Sequence[bytes], tiers: frozenset[Tier], salt: str = "") -> None:
        """Until every key lies in exactly these tiers: the directory lags, and has no news to wait for."""
        for _ in range(NUM_POLLS):
            found = await self.where(keys, salt)
            if all(each == tiers for each in found):
                return
            await asyncio.sleep(POLL_SECONDS)
        raise AssertionError(f"not in exactly {sorted(tiers)}: {found}")

    async def forget_engine_cache(self) -> None:
        """Empty the engine's own prefix cache: what hits now lies in LMCache."""
        response = await self._http.post(f"{self.stack.upstream_url}/reset_prefix_cache")
        response.raise_for_status()

    async def direct(self, messages: Sequence[Message], tools: Sequence[Message] = (), **body: Any) -> Any:
        """One chat completion past the proxy."""
        asked = {"model": self.stack.options.model_name, "messages": list(messages), **PLAIN, **body}
        if tools:
            asked["tools"] = list(tools)
        return await self._post(f"{self.stack.upstream_url}/v1/chat/completions", asked)

    async def pin_counts(self) -> dict[bytes, int]:
        """The coordinator's pins, whoever set them."""
        reply = await self._http.get(f"{self.stack.coordinator_url}/cache/pins?limit=10000")
        return {bytes.fromhex(p["key"]["chunk_hash_hex"]): p["pin_count"] for p in reply.json()["pins"]}

    def control_writes(self) -> dict[str, int]:
        """Requests so far that change what the cache holds, by the servers' own logs."""
        lines = [
            line
            for name in ("lmcache", "coordinator")
            for line in self.stack.log(name).read_text(errors="replace").splitlines()
        ]
        kinds = ('"DELETE /cache/', '"POST /cache/', '"PUT /quota')
        return {kind: sum(kind in line for line in lines) for kind in kinds}
