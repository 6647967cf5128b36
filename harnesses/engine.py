"""The cache behind the scripted model: tokens, keys, tiers and events of the embedded engine.

So whatever API a request uses, what it stores has the keys that vLLM and LMCache would give it, and the proxy
hears of them, frees them and is believed or not as before a real engine.
"""

from __future__ import annotations

import asyncio
import json
import secrets
from array import array
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from types import TracebackType
from typing import Any

import msgspec

from engine_bridge.chunk_keys import chunk_keys
from engine_bridge.errors import BridgeError
from engine_bridge.mapping.anthropic import MessagesPrompt
from engine_bridge.mapping.mapper import ChatMapper
from engine_bridge.mapping.prompts import ChatPrompt
from engine_bridge.mapping.responses import Item, ResponsesPrompt, remembered
from engine_bridge.sim.block_events import BlockRemoved, KvEvent
from engine_bridge.sim.clock import RealClock
from engine_bridge.sim.engine import SimEngine
from engine_bridge.sim.event_stream import EventStream
from engine_bridge.sim.hardware import INSTANT, EngineConfig
from engine_bridge.sim.model_files import MODEL_DIRECTORY
from engine_bridge.sim.requests import Output, SimRequest
from engine_bridge.sim.runner import EngineRunner
from engine_bridge.sim.tokenizer import ChatTokenizer
from harnesses.conversation import CHAT, RESPONSES
from lifecycle.core.ids import split_keys
from lifecycle.vocabulary import CACHE_SALT, KV_TRANSFER_PARAMS, MAX_OFFLOAD_TOKENS

MODEL_NAME = "tiny"

CONFIG = EngineConfig(
    hardware=msgspec.structs.replace(INSTANT, hbm_bytes=64_000_000_000),
    chunk_tokens=64,
    l1_bytes=256_000_000_000,
    l2_bytes=512_000_000_000,
    write_back_delay_ns=10_000_000,
)
"""Room for whatever a run stores: a chunk that is gone was freed by the proxy, not for want of room."""


class Computed(msgspec.Struct, frozen=True):
    """A request in tokens. `keys` are the chunk keys of prompt and answer, the first
    `num_prompt_keys` those of the prompt.

    `missing` are prompt keys that the cache had and lost, with the time of that in nanoseconds since the
    epoch: they left L1 and lie in L2 neither. `reason` says why the tokens are not those that an engine would
    make of the request; empty if they are. `chat` is what they were made of, then.
    """

    prompt: array[int]
    keys: tuple[bytes, ...]
    num_prompt_keys: int
    missing: Mapping[bytes, int]
    salt: str
    chunk_tokens: int
    chat: ChatPrompt | None = None
    reason: str = ""

    @property
    def prompt_keys(self) -> tuple[bytes, ...]:
        return self.keys[: self.num_prompt_keys]


class ScriptedEngine:
    """Runs while its `async with` block lasts."""

    def __init__(self, model_path: Path = MODEL_DIRECTORY, config: EngineConfig = CONFIG) -> None:
        self.config = config
        self.model_path = model_path
        self.tokenizer = ChatTokenizer(model_path)
        self._mapper = ChatMapper(self.tokenizer.profile)
        self.events = EventStream()
        self.runner = EngineRunner(SimEngine(config, [self.events.take, self._heard]), RealClock())
        self.stored: dict[bytes, str] = {}
        """Every key that a request made so far, with its salt."""
        self.removed: dict[bytes, int] = {}
        """Every key that left L1 so far, and when: freed, for there is room for all."""
        self._responses: dict[str, tuple[Item, ...]] = {}
        self._exit = AsyncExitStack()

    async def __aenter__(self) -> ScriptedEngine:
        async with AsyncExitStack() as stack:
            await stack.enter_async_context(self.events)
            tasks = await stack.enter_async_context(asyncio.TaskGroup())
            running = tasks.create_task(self.runner.run())
            stack.callback(running.cancel)
            self._exit = stack.pop_all()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._exit.aclose()

    def prompt_of(self, path: str, body: Mapping[str, Any]) -> ChatPrompt:
        """The chat request that the engine makes of a body. Raises `BridgeError`."""
        if path == CHAT:
            return ChatPrompt.from_body(dict(body))
        if path == RESPONSES:
            prompt = ResponsesPrompt.from_body(body)
            earlier = self._responses.get(str(body.get("previous_response_id")), ())
            return self._mapper.converted(prompt.following(earlier)).prompt
        return self._mapper.converted(MessagesPrompt.from_body(body)).prompt

    def remember(self, body: Mapping[str, Any], response_id: str, text: str) -> None:
        """Keep what a later request may name by `previous_response_id`."""
        if body.get("store") is False:
            return
        try:
            prompt = ResponsesPrompt.from_body(body)
        except BridgeError:
            return
        earlier = self._responses.get(str(body.get("previous_response_id")), ())
        self._responses[response_id] = remembered((*earlier, *prompt.items), [text] if text else [])

    async def compute(
        self, path: str, body: Mapping[str, Any], answer: dict[str, Any]
    ) -> tuple[Computed, SimRequest]:
        """Tokens and keys of a request, and of the assistant's chat message that answers it.

        A body that no engine would take is its JSON, so that a run goes on; the reason says so.
        """
        # Encoding is slow and may leave the loop; the engine belongs to it.
        prompt, output, chat, reason = await asyncio.to_thread(self._encoded, path, body, answer)
        size = self.config.chunk_tokens
        keys = tuple(split_keys(chunk_keys(prompt + output, size)))
        num_prompt = len(prompt) // size
        salt = str(body.get(CACHE_SALT) or "")
        transfer = body.get(KV_TRANSFER_PARAMS)
        limit = transfer.get(MAX_OFFLOAD_TOKENS) if isinstance(transfer, dict) else None
        known = [key for key in keys[:num_prompt] if key in self.removed]
        found = self.runner.locate(salt, known)
        missing = {key: self.removed[key] for key, tiers in zip(known, found, strict=True) if not tiers}
        request = SimRequest(
            request_id=secrets.token_hex(8),
            token_ids=prompt,
            output_ids=output,
            session_id=_label(body),
            salt=salt,
            store_until=limit if isinstance(limit, int) else None,
            save_generated=True,
        )
        kept = keys if request.store_until is None else keys[: request.store_until // size]
        self.stored.update(dict.fromkeys(kept, salt))
        return Computed(prompt, keys, num_prompt, missing, salt, size, chat, reason), request

    def _encoded(
        self, path: str, body: Mapping[str, Any], answer: dict[str, Any]
    ) -> tuple[array[int], array[int], ChatPrompt | None, str]:
        """Tokens of prompt and answer and what they were made of, or why they are not those of an engine."""
        chat, reason = None, ""
        try:
            chat = self.prompt_of(path, body)
            prompt = self.tokenizer.prompt_ids(chat)
            output = self.tokenizer.reply_ids(chat, answer)
        except (BridgeError, TypeError) as error:
            chat, reason = None, str(error) or type(error).__name__
            prompt = self.tokenizer.encode(json.dumps(body, ensure_ascii=True, default=str))
            output = self.tokenizer.encode(json.dumps(answer))
        return prompt, output + array("I", sorted(self.tokenizer.eos_ids)[:1]), chat, reason

    def ends_of(self, chat: ChatPrompt) -> Sequence[int]:
        """Where in its tokens the head of a prompt ends, and each of its messages."""
        mapped = self._mapper.map(chat)
        return (mapped.head_end, *mapped.message_ends)

    def generate(self, request: SimRequest) -> AsyncGenerator[Output, None]:
        """Let the engine run it; closing the generator early aborts it."""
        return self.runner.generate(request)

    def _heard(self, at_ns: int, events: Sequence[KvEvent]) -> None:
        for each in events:
            if isinstance(each, BlockRemoved) and each.medium != "GPU":
                self.removed |= dict.fromkeys(each.block_hashes, at_ns)

    def left(self) -> set[bytes]:
        """Of all that was ever stored, what lies in L1 or L2 now."""
        by_salt: dict[str, list[bytes]] = {}
        for key, salt in self.stored.items():
            by_salt.setdefault(salt, []).append(key)
        return {
            key
            for salt, keys in by_salt.items()
            for key, tiers in zip(keys, self.runner.locate(salt, keys), strict=True)
            if tiers
        }


def _label(body: Mapping[str, Any]) -> str | None:
    """What KV events carry: the session id, which Anthropic's requests have among vLLM's extra arguments."""
    extra = body.get("vllm_xargs")
    label = body.get("session_id") or (extra.get("session_id") if isinstance(extra, dict) else None)
    return label if isinstance(label, str) else None
