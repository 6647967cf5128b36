"""The embedded engine in an event loop: requests as streams of tokens, time from a clock."""

import asyncio
from collections.abc import AsyncGenerator, Callable, Iterable, Sequence

from engine_bridge.sim.chunk_store import Deleted
from engine_bridge.sim.clock import SimClock
from engine_bridge.sim.engine import EngineStats, SimEngine
from engine_bridge.sim.requests import Output, SimRequest, TokenOutput
from lifecycle.vocabulary import Tier


class EngineRunner:
    """Drives one `SimEngine` on a clock. `run` must be running for anything to happen.

    The methods beside `generate` are those of the engine at the clock's time.
    """

    def __init__(self, engine: SimEngine, clock: SimClock) -> None:
        self.engine = engine
        self.clock = clock
        self._streams: dict[str, asyncio.Queue[Output]] = {}
        self._changed = asyncio.Event()
        self.listeners: list[Callable[[Output], None]] = []
        """Told of every output of every request, whoever reads it."""

    async def run(self) -> None:
        """Drive the engine for ever; cancel the task to end it."""
        while True:
            self._changed.clear()
            self._deliver()
            next_ns = self.engine.next_ns()
            if next_ns is None:
                await self._changed.wait()
            elif next_ns > self.clock.now_ns():
                await self._wait_until(next_ns)
            else:
                await asyncio.sleep(0)

    async def _wait_until(self, at_ns: int) -> None:
        """Until a time or the next call, whichever is first."""
        async with asyncio.TaskGroup() as tasks:
            timer = tasks.create_task(self.clock.sleep_until(at_ns))
            change = tasks.create_task(self._changed.wait())
            await asyncio.wait((timer, change), return_when=asyncio.FIRST_COMPLETED)
            timer.cancel()
            change.cancel()

    def _deliver(self) -> None:
        for output in self.engine.step(self.clock.now_ns()):
            for listener in self.listeners:
                listener(output)
            stream = self._streams.get(output.request_id)
            if stream is not None:
                stream.put_nowait(output)

    async def generate(self, request: SimRequest) -> AsyncGenerator[Output, None]:
        """Tokens as they come, then the end. Raises `ValueError` for what cannot run.

        Closing the iterator early, or cancelling the task that reads it, aborts the request.
        """
        stream: asyncio.Queue[Output] = asyncio.Queue()
        self.engine.submit(request, self.clock.now_ns())
        self._streams[request.request_id] = stream
        self._changed.set()
        try:
            while True:
                output = await stream.get()
                yield output
                if not isinstance(output, TokenOutput):
                    break
        finally:
            del self._streams[request.request_id]
            self.engine.abort(request.request_id, self.clock.now_ns())
            self._changed.set()

    def locate(self, salt: str, keys: Sequence[bytes]) -> list[frozenset[Tier]]:
        return self.engine.locate(salt, keys, self.clock.now_ns())

    def delete(self, salt: str, keys: Iterable[bytes], tiers: frozenset[Tier]) -> Deleted:
        deleted = self.engine.delete(salt, keys, tiers, self.clock.now_ns())
        self._changed.set()
        return deleted

    def pin(self, salt: str, keys: Iterable[bytes]) -> None:
        self.engine.pin(salt, keys, self.clock.now_ns())

    def unpin(self, salt: str, keys: Iterable[bytes]) -> None:
        self.engine.unpin(salt, keys, self.clock.now_ns())
        self._changed.set()

    def pins(self, salt: str) -> dict[bytes, int]:
        return self.engine.pins(salt)

    def prefetch(self, salt: str, keys: Iterable[bytes]) -> int:
        started = self.engine.prefetch(salt, keys, self.clock.now_ns())
        self._changed.set()
        return started

    def restart_engine(self) -> None:
        self.engine.restart_engine(self.clock.now_ns())
        self._changed.set()

    def restart_cache(self) -> None:
        self.engine.restart_cache(self.clock.now_ns())
        self._changed.set()

    def reset_prefix_cache(self) -> bool:
        return self.engine.reset_prefix_cache(self.clock.now_ns())

    def stats(self) -> EngineStats:
        return self.engine.stats(self.clock.now_ns())
