"""Mapping for a proxy: many contexts, one model, an event loop that must not wait."""

from __future__ import annotations

import asyncio
import os
from array import array
from collections import OrderedDict
from collections.abc import Callable
from typing import ParamSpec, TypeAlias, TypeVar

import msgspec

from engine_bridge.errors import Unmappable
from engine_bridge.mapping.anthropic import MessagesPrompt
from engine_bridge.mapping.backlog import MappingBacklog, Room
from engine_bridge.mapping.mapper import ChatMapper, MappingState
from engine_bridge.mapping.plain import PlainPrompt
from engine_bridge.mapping.prompts import ChatPrompt
from engine_bridge.mapping.ranges import MappedPrompt
from engine_bridge.mapping.responses import ResponsesPrompt
from engine_bridge.mapping.template import Rendering, RenderInput, compiled
from engine_bridge.mapping.workers import RenderWorkers


def _num_processors() -> int:
    """Those that we may use; a container may have fewer than its machine."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


INLINE_CHARS = 16_384
"""Text that is tokenised on the event loop: 4 ms or less of it."""

MAX_CHARS = 16 * 2**20
"""Text that is tokenised at all: about four million tokens. What is larger would keep a thread busy for
minutes, for a prompt that the engine has refused long before."""

MAX_BYTES_PER_CHAR = 6
"""Of a body: JSON may write any character as six."""

INLINE_MESSAGES = 64
"""Messages that are normalised or rendered again on the event loop."""

INLINE_WHOLE_MESSAGES = 32
INLINE_WHOLE_BYTES = 8_192
"""Prompts, their tools included, that are rendered whole on the event loop: a millisecond or less. A process
costs three times that, in switches and pickling."""

LONG_AT_ONCE = max(1, _num_processors() // 2)
"""Long texts of a model that are read at the same time. They take a processor each, and there is a thread
that has calls to forward."""

P = ParamSpec("P")
T = TypeVar("T")

Prompt: TypeAlias = ChatPrompt | PlainPrompt | MessagesPrompt | ResponsesPrompt
"""What can be mapped, each as its API asks for it."""


class _Context:
    """State of one key. `waiting` counts the maps that run or wait on it."""

    def __init__(self, state: MappingState) -> None:
        self.state = state
        self.lock = asyncio.Lock()
        self.waiting = 0


class MappingService:
    """Maps prompts under state keys; calls under one key wait for each other.

    States of the least recently used keys are dropped beyond `budget_bytes`; their next map is a cold one.
    New text counts in `backlog`, which several services may share.
    """

    def __init__(
        self,
        mapper: ChatMapper,
        workers: RenderWorkers | None = None,
        budget_bytes: int = 1 << 30,
        backlog: MappingBacklog | None = None,
    ) -> None:
        self._mapper = mapper
        self._workers = workers or RenderWorkers()
        self._budget = budget_bytes
        self._backlog = backlog or MappingBacklog()
        self._contexts: OrderedDict[str, _Context] = OrderedDict()
        self._sizes: dict[str, int] = {}
        self._total = 0
        self._long = asyncio.Semaphore(LONG_AT_ONCE)
        self._proven: set[str] = set()
        """Templates that a process has rendered: one that never ends must not do so on the event loop."""

    async def map(self, state_key: str, prompt: Prompt, size_bytes: int = 0) -> MappedPrompt:
        """Tokens, ranges and keys of the next prompt of a context. Raises `Unmappable`.

        `size_bytes` is that of the body it came in; it stands for the text until that is rendered.
        """
        if size_bytes > MAX_BYTES_PER_CHAR * MAX_CHARS:
            _refuse_too_long(size_bytes // MAX_BYTES_PER_CHAR)
        context = self._contexts.get(state_key)
        if context is None:
            context = self._contexts[state_key] = _Context(MappingState())
        self._contexts.move_to_end(state_key)
        context.waiting += 1
        try:
            with self._backlog.room() as room:
                if not context.state.tokens.ids:
                    _take_if_long(room, size_bytes)
                mapped = await self._in_turn(context, prompt, room, size_bytes)
        finally:
            context.waiting -= 1
            self._account(state_key, context)
        return mapped

    async def _in_turn(self, context: _Context, prompt: Prompt, room: Room, size_bytes: int) -> MappedPrompt:
        async with context.lock:
            done = False
            try:
                mapped = await self._map(context.state, prompt, room, size_bytes)
                done = True
            finally:
                if not done:
                    context.state = MappingState()
            return mapped

    async def _map(self, state: MappingState, prompt: Prompt, room: Room, size_bytes: int) -> MappedPrompt:
        mapper = self._mapper
        if isinstance(prompt, PlainPrompt):
            _refuse_too_long(len(prompt.given))
            if len(prompt.given) > INLINE_CHARS:
                room.take(len(prompt.given))
                return await self._beside(mapper.map_plain, prompt, state)
            return mapper.map_plain(prompt, state)
        if isinstance(prompt, MessagesPrompt | ResponsesPrompt):
            converted = mapper.converted(prompt)
            return converted.by_client_message(await self._map(state, converted.prompt, room, size_bytes))
        if len(prompt.messages) - len(state.history.raw) > INLINE_MESSAGES:
            prepared = await self._beside(mapper.prepare, prompt, state)
        else:
            prepared = mapper.prepare(prompt, state)
        rendering = mapper.resume(prepared, state, INLINE_MESSAGES)
        if rendering is None:
            _take_if_long(room, size_bytes)
            rendering = await self._whole(prepared.facts.source, prepared.given)
        num_chars = mapper.chars_to_encode(rendering, state)
        _refuse_too_long(num_chars)
        if num_chars > INLINE_CHARS:
            room.take(num_chars)
            return await self._beside(mapper.finish, prepared, rendering, state)
        return mapper.finish(prepared, rendering, state)

    async def _beside(self, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Do it in a thread, when it is its turn."""
        async with self._long:
            return await asyncio.to_thread(work, *args, **kwargs)

    async def _whole(self, source: str, given: RenderInput) -> Rendering:
        if source in self._proven and _is_short(given):
            return compiled(source).render_whole(given)
        rendering = await self._workers.render(source, given)
        self._proven.add(source)
        return rendering

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
        if self._total > self._budget:
            self._shrink()

    def _shrink(self) -> None:
        for key in list(self._contexts):
            if self._total <= self._budget:
                break
            if not self._contexts[key].waiting:
                self.forget(key)


def _take_if_long(room: Room, size_bytes: int) -> None:
    if size_bytes > INLINE_CHARS:
        room.take(size_bytes)


def _refuse_too_long(num_chars: int) -> None:
    if num_chars > MAX_CHARS:
        raise Unmappable(f"{num_chars} new characters are more than any model's context holds")


def _is_short(given: RenderInput) -> bool:
    if len(given.conversation) > INLINE_WHOLE_MESSAGES:
        return False
    try:
        return len(msgspec.json.encode([given.conversation, given.tools])) <= INLINE_WHOLE_BYTES
    except (TypeError, ValueError, RecursionError):
        return False
