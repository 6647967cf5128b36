"""Whole renders in processes of their own.

A Jinja render in a thread holds the interpreter: event-loop round trips rose from 0.06 ms to 10–20 ms when
it was tried. So the renders that cannot be resumed happen elsewhere; only the text comes back.
"""

import asyncio
import contextlib
import multiprocessing
import os
import pickle
import signal
import threading
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool

from engine_bridge.errors import Unmappable
from engine_bridge.mapping.template import Rendering, RenderInput, compiled

PATIENCE_SECONDS = 60.0
"""How long a render waits for a process: for others to be done with it, and for it to start."""


class RenderWorkers:
    """A pool of render processes, started with the first render.

    A render that takes longer than `timeout_seconds` raises `Unmappable`, and its process is ended. Neither
    waiting for a process nor its start counts; either raises `Unmappable` after `patience_seconds`.
    """

    def __init__(
        self,
        processes: int = 1,
        timeout_seconds: float = 15.0,
        patience_seconds: float = PATIENCE_SECONDS,
    ) -> None:
        self._processes = processes
        self._timeout = timeout_seconds
        self._patience = patience_seconds
        self._pool: ProcessPoolExecutor | None = None
        self._starts: list[asyncio.Future[None]] = []
        self._turns = asyncio.Semaphore(processes)

    async def render(self, source: str, given: RenderInput) -> Rendering:
        """`ChatTemplate.render_whole` elsewhere. Raises what it raises."""
        try:
            async with asyncio.timeout(self._patience):
                await self._turns.acquire()
        except TimeoutError:
            raise Unmappable(f"no render process was free in {self._patience:g} s") from None
        try:
            return await self._render(source, given)
        finally:
            self._turns.release()

    async def _render(self, source: str, given: RenderInput) -> Rendering:
        loop = asyncio.get_running_loop()
        if self._pool is None:
            context = multiprocessing.get_context("spawn")
            self._pool = ProcessPoolExecutor(
                self._processes, mp_context=context, initializer=_end_with_parent
            )
            self._starts = [loop.run_in_executor(self._pool, _started) for _ in range(self._processes)]
        pool = self._pool
        try:
            _, starting = await asyncio.wait(self._starts, timeout=self._patience)
            if starting:
                self._discard(pool)
                raise Unmappable(f"the render process did not start in {self._patience:g} s")
            running = loop.run_in_executor(pool, _render, source, given)
            return await asyncio.wait_for(running, self._timeout)
        except TimeoutError:
            self._discard(pool)
            raise Unmappable(f"the render took longer than {self._timeout:g} s") from None
        except BrokenProcessPool:
            self._discard(pool)
            raise Unmappable("the render process died") from None

    def _discard(self, pool: ProcessPoolExecutor) -> None:
        if self._pool is pool:
            self._pool = None
        for process in list((pool._processes or {}).values()):
            process.terminate()
        pool.shutdown(wait=False, cancel_futures=True)

    async def close(self) -> None:
        """End the processes."""
        pool, self._pool = self._pool, None
        if pool is not None:
            await asyncio.to_thread(pool.shutdown, True, cancel_futures=True)


def _end_with_parent() -> None:
    """A worker that waits for work does not notice that nobody is left to give it any."""
    # Ctrl-C goes to the whole group: the parent ends us when it has no more use for us.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    parent = multiprocessing.parent_process()
    if parent is not None:

        def wait() -> None:
            parent.join()
            os._exit(1)

        threading.Thread(target=wait, daemon=True).start()


def _started() -> None:
    """Answers once a process is there to answer."""


def _render(source: str, given: RenderInput) -> Rendering:
    rendering = compiled(source).render_whole(given)
    with contextlib.suppress(Exception):
        pickle.dumps(rendering.state)
        return rendering
    rendering.state = None
    return rendering
