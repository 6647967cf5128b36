"""Mapping for a proxy: many contexts, one model, an event loop that must not wait."""

from __future__ import annotations

import asyncio
from array import array
from collections import OrderedDict

from engine_bridge.errors import Unmappable
from engine_bridge.mapping.mapper import ChatMapper, MappingState
from engine_bridge.mapping.prompts import ChatPrompt
from engine_bridge.mapping.ranges import MappedPrompt
from engine_bridge.mapping.workers import RenderWorkers

INLINE_CHARS = 16_384
"""Text that is tokenised on the event loop: 4 ms or less of it."""

MAX_CHARS = 16 * 2**20
"""Text that is tokenised at all: about four million tokens. What is larger would keep a thread busy for
minutes, for a prompt that the engine has refused long before."""

INLINE_MESSAGES = 64
"""Messages that are normalised or rendered again on the event loop."""


class _Context:
    """State of one key. `waiting` counts the maps that run or wait on it."""

    def __init__(self, state: MappingState) -> None:
        self.state = state
        self.lock = asyncio.Lock()
        self.waiting = 0


class MappingService:
    """Maps prompts under state keys; calls under one key wait for each other.

    States of the least recently used keys are dropped beyond `budget_bytes`; their next map is a cold one.
    """

    def __init__(
        self, mapper: ChatMapper, workers: RenderWorkers | None = None, budget_bytes: int = 1 << 30
    ) -> None:
        self._mapper = mapper
        self._workers = workers or RenderWorkers()
        self._budget = budget_bytes
        self._contexts: OrderedDict[str, _Context] = OrderedDict()
        self._sizes: dict[str, int] = {}
        self._total = 0

    async def map(self, state_key: str, prompt: ChatPrompt) -> MappedPrompt:
        """Tokens, ranges and keys of the next prompt of a context. Raises `Unmappable`."""
        context = self._contexts.get(state_key)
        if context is None:
            context = self._contexts[state_key] = _Context(MappingState())
        self._contexts.move_to_end(state_key)
        context.waiting += 1
        try:
            async with context.lock:
                done = False
                try:
                    mapped = await self._map(context.state, prompt)
                    done = True
                finally:
                    if not done:
                        context.state = MappingState()
        finally:
            context.waiting -= 1
            self._account(state_key, context)
        return mapped

    async def _map(self, state: MappingState, prompt: ChatPrompt) -> MappedPrompt:
        mapper = self._mapper
        if len(prompt.messages) - len(state.history.raw) > INLINE_MESSAGES:
            prepared = await asyncio.to_thread(mapper.prepare, prompt, state)
        else:
            prepared = mapper.prepare(prompt, state)
        rendering = mapper.resume(prepared, state, INLINE_MESSAGES)
        if rendering is None:
            rendering = await self._workers.render(prepared.facts.source, prepared.given)
        num_chars = mapper.chars_to_encode(rendering, state)
        if num_chars > MAX_CHARS:
            raise Unmappable(f"{num_chars} new characters are more than any model's context holds")
        if num_chars > INLINE_CHARS:
            return await asyncio.to_thread(mapper.finish, prepared, rendering, state)
        return mapper.finish(prepared, rendering, state)

    def token_ids(self, state_key: str) -> array[int] | None:
        """Ids of the context's last prompt; None while it is being mapped, or when it is not known."""
        context = self._contexts.get(state_key)
        if context is None or context.waiting or not context.state.tokens.ids:
            return None
        return context.state.tokens.ids[:]

    def clone(self, source_key: str, target_key: str) -> bool:
        """Give another context the state of this one, so that its first map is incremental.

        False, and nothing done, when there is no state or one of the two is being mapped.
        """
        source, target = self._contexts.get(source_key), self._contexts.get(target_key)
        if source is None or source.waiting or (target is not None and target.waiting):
            return False
        self._contexts[target_key] = context = _Context(source.state.clone())
        self._contexts.move_to_end(target_key)
        self._account(target_key, context)
        return True

    def forget(self, state_key: str) -> None:
        """Drop a context's state."""
        self._contexts.pop(state_key, None)
        self._total -= self._sizes.pop(state_key, 0)

    @property
    def size_bytes(self) -> int:
        """Rough size of all states."""
        return self._total

    async def close(self) -> None:
        """Drop everything and end the render processes."""
        self._contexts.clear()
        self._sizes.clear()
        self._total = 0
        await self._workers.close()

    def _account(self, state_key: str, context: _Context) -> None:
        if self._contexts.get(state_key) is not context:
            return
        size = context.state.size_bytes
        self._total += size - self._sizes.get(state_key, 0)
        self._sizes[state_key] = size
        for key in list(self._contexts):
            if self._total <= self._budget:
                break
            if not self._contexts[key].waiting:
                self.forget(key)
