"""The one owner of everything that runs beside the data path."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Any, TypeVar

import structlog

T = TypeVar("T")

log = structlog.get_logger(__name__)

RESTART_SECONDS = 1.0


class Tasks(asyncio.TaskGroup):
    """A task group in which a failing task is logged and takes nobody with it: calls go on whatever fails."""

    def __init__(self) -> None:
        super().__init__()
        self._live: set[asyncio.Task[Any]] = set()

    def spawn(self, work: Coroutine[Any, Any, object]) -> asyncio.Task[None]:
        """Run once."""
        return self._own(_guarded(work))

    def run(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        """Run once for somebody who waits for the result; it must not raise."""
        return self._own(work)

    def keep(self, loop: Callable[[], Awaitable[None]]) -> asyncio.Task[None]:
        """Run for ever: start again after a failure; end when the loop returns."""
        return self._own(_kept_going(loop))

    def cancel_all(self) -> None:
        """Cancel whatever still runs."""
        for task in list(self._live):
            task.cancel()

    def _own(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        task = self.create_task(work)
        self._live.add(task)
        task.add_done_callback(self._live.discard)
        return task


@asynccontextmanager
async def owned_tasks() -> AsyncIterator[Tasks]:
    """Tasks that are cancelled when the block ends. What the block raises leaves as it is."""
    failure: Exception | None = None
    async with Tasks() as tasks:
        try:
            yield tasks
        except Exception as error:  # noqa: BLE001 - raised again behind the group, which would wrap it
            failure = error
        finally:
            tasks.cancel_all()
    if failure is not None:
        raise failure


async def _guarded(work: Coroutine[Any, Any, object]) -> None:
    try:
        await work
    except Exception:
        log.exception("background work failed")


async def _kept_going(loop: Callable[[], Awaitable[None]]) -> None:
    while True:
        try:
            await loop()
        except Exception:
            log.exception("a background loop failed and starts again")
            await asyncio.sleep(RESTART_SECONDS)
        else:
            return
