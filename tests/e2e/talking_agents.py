"""Agents that talk until they are told to stop, whatever dies meanwhile, as a test tool."""

import asyncio
from array import array
from collections.abc import Awaitable, Callable, Iterable
from typing import Any, TypeVar

import httpx
import openai

from engine_bridge.chunk_keys import chunk_keys
from engine_bridge.stack.engine_stack import EngineStack
from lifecycle.core.events import ChunksConfirmed
from lifecycle.core.ids import split_keys
from tests.e2e.agent import Agent, World, prose
from tests.e2e.engine_cache import Cache
from tests.e2e.polling import SECONDS

T = TypeVar("T")
PAUSE_SECONDS = 0.2
NUM_AGENTS = 3
MAX_TURNS = 300
"""Bound of what one agent says in one test."""

THINKS_SECONDS = 0.3
NUM_LOOKS = int(4 * SECONDS / PAUSE_SECONDS)
"""What could not be deleted is tried again after half a minute, more than once where a server was away."""


KEEPS_NOTHING = {"kv_transfer_params": {"lmcache.max_offload_tokens": 0}}


class Talk:
    """Agents that talk until they are told to stop: questions, and a summary in their place now and then.

    A call that fails is made again. `answered` and `failed` count, `keys` has every chunk that was computed.
    """

    def __init__(self, world: Any, num_agents: int = NUM_AGENTS) -> None:
        self.world = world
        self.agents: list[Agent] = [world.agent(f"talker-{n}") for n in range(num_agents)]
        self.answered = 0
        self.failed: list[str] = []
        self.keys: dict[bytes, None] = {}
        self.last: dict[str, list[dict[str, Any]]] = {}
        self.declares = True
        self.declared: dict[str, int] = {}
        self._stop = asyncio.Event()
        self._heard = asyncio.Event()

    async def _turn(self, agent: Agent, number: int) -> None:
        if number % 3 == 2:
            if self.declares:
                await self.declare(agent, op="replace", span=[1, len(agent.messages)], n=1)
            agent.messages[1:] = [{"role": "user", "content": "so far: " + prose(20)}]
        else:
            agent.messages.append({"role": "user", "content": prose(25)})
        answer = await self._persist(lambda: agent.call(1, call=f"call-{number}"))
        self.last[agent.ctx] = list(agent.asked)
        agent.messages.append(answer)
        self.answered += 1
        self._heard.set()
        prompt = await self._persist(lambda: self.world.cache.tokens(agent.asked))
        computed = [*prompt, *agent.ids[0][:-1]]
        self.keys |= dict.fromkeys(split_keys(chunk_keys(array("I", computed), self.world.cache.chunk)))

    async def declare(self, agent: Agent, **operation: Any) -> None:
        """One operation, the same again until it was answered."""
        seq = self.declared[agent.ctx] = self.declared.get(agent.ctx, 0) + 1
        body = {"source": agent.ctx, "ops": [{"ctx": agent.ctx, "seq": seq, **operation}]}

        async def attempt() -> dict[str, Any]:
            reply = await self.world.http.post(f"{self.world.data_url}/kv/v1/ops", json=body)
            reply.raise_for_status()
            return dict(reply.json()["results"][0])

        result = await self._persist(attempt)
        # Calls may be answered by a process that dies before it has written them down.
        if result["status"] == "rejected" and result["reason"] == "no such context":
            self.declared[agent.ctx] -= 1
        elif result["status"] == "rejected":
            assert "no list" in result["reason"]
        else:
            assert result["status"] in ("applied", "duplicate"), result

    async def _persist(self, attempt: Callable[[], Awaitable[T]]) -> T:
        for _ in range(int(3 * SECONDS / PAUSE_SECONDS)):
            try:
                return await attempt()
            except (openai.APIError, httpx.HTTPError) as error:
                self.failed.append(f"{type(error).__name__}: {error}")
                await asyncio.sleep(PAUSE_SECONDS)
        raise AssertionError(self.failed[-1])

    async def _talk(self, agent: Agent) -> None:
        for number in range(MAX_TURNS):
            if self._stop.is_set():
                return
            await self._turn(agent, number)
            await asyncio.sleep(THINKS_SECONDS)

    async def until_answered(self, more: int) -> None:
        """So many answers more."""
        wanted = self.answered + more
        async with asyncio.timeout(2 * SECONDS):
            while self.answered < wanted:
                self._heard.clear()
                waits = [*self._tasks, asyncio.ensure_future(self._heard.wait())]
                done, _ = await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
                waits[-1].cancel()
                for task in done & set(self._tasks):
                    task.result()
                    raise AssertionError("an agent has said everything it may")

    async def __aenter__(self) -> "Talk":
        self._tasks = [asyncio.ensure_future(self._talk(agent)) for agent in self.agents]
        await self.until_answered(2 * len(self.agents))
        return self

    async def __aexit__(self, kind: Any, error: Any, trace: Any) -> None:
        self._stop.set()
        results = await asyncio.gather(*self._tasks, return_exceptions=True)
        if error is None:
            assert [r for r in results if isinstance(r, BaseException)] == []

    async def close(self) -> None:
        """Close every context."""
        for agent in self.agents:
            await self.declare(agent, op="close")

    async def all_gone(self, keys: Iterable[bytes] | None = None) -> None:
        """Close every context: then the directory shows none of the chunks, the disk has no file of them, and
        the engine finds nothing. Of all that were computed, or of these."""
        await self.close()
        cache: Cache = self.world.cache
        chosen = list(self.keys if keys is None else set(keys) & set(self.keys))
        for _ in range(NUM_LOOKS):
            shown = [key for key, tiers in zip(chosen, await cache.where(chosen), strict=True) if tiers]
            left = {*shown, *on_disk(cache.stack, chosen)}
            if not left:
                break
            await asyncio.sleep(PAUSE_SECONDS)
        else:
            raise AssertionError(f"{len(left)} of {len(chosen)} are left: {self.world.explained(list(left))}")
        await cache.forget_engine_cache()
        for asked in self.last.values():
            reply = await cache.direct(asked, max_tokens=1, **KEEPS_NOTHING)
            details = reply["usage"]["prompt_tokens_details"] or {}
            assert (details.get("cached_tokens") or 0) == 0


def on_disk(stack: EngineStack, keys: Iterable[bytes]) -> list[bytes]:
    """Which of the chunks have a file in L2, whatever the directory says."""
    names = "\n".join(path.name for path in stack.l2_dir.rglob("*"))
    return [key for key in keys if key.hex() in names]


def proven(world: World) -> set[bytes]:
    """Chunks that the cache has shown, stored by our calls."""
    return {key for e in world.events(ChunksConfirmed) if e.stored for key in split_keys(e.keys)}
