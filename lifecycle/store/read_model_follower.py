"""Keeps the read models up with the log, and lets nobody wait for it.

Whatever goes wrong here is said in `problem` and tried again, ever less often. Nothing is passed over: events
that cannot be read, or rows that cannot be written, mark the read models as stale until they could be.
"""

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, Protocol, TypeVar

import structlog
from sqlalchemy.exc import DBAPIError

from lifecycle.core.events import RecordedEvent
from lifecycle.errors import CorruptLog, LogUnavailable, ReadModelsUnavailable
from lifecycle.ports import EventLog
from lifecycle.store.read_models import ReadModels, pages

log = structlog.get_logger(__name__)

T = TypeVar("T")

GATHER_SECONDS = 0.2
"""Rest after a commit, so that the next one takes more events along."""

REST_PER_PAGE = 2.0
"""Rest after each page of a backlog, as a multiple of the time it took: calls run on the same event loop."""

RETRY_SECONDS = 0.5
MAX_RETRY_SECONDS = 60.0

REST_PER_REBUILD = 9.0
"""Rest after a rebuild that failed, as a multiple of the time it took: it reads a whole log each time."""


class Feed(Protocol):
    """Says when to look at the log."""

    async def holds(self) -> bool:
        """Whether it is this process's turn to write; called before each look. Raises `LogUnavailable`."""
        ...

    async def wait(self) -> None:
        """Until there may be something new, or it may have become our turn. Raises `LogUnavailable`."""
        ...

    async def done(self, position: int) -> None:
        """Everything at and below `position` is committed. Raises `LogUnavailable`."""
        ...

    async def close(self) -> None: ...


class HeardFeed:
    """The feed of a log with one writer, who tells us: `heard` is called with every batch."""

    def __init__(self) -> None:
        self._news = asyncio.Event()

    def heard(self, _batch: Sequence[RecordedEvent]) -> None:
        """There is something new."""
        self._news.set()

    async def holds(self) -> bool:
        """Nobody else writes."""
        return True

    async def wait(self) -> None:
        """Until something was heard since the last time."""
        await self._news.wait()
        self._news.clear()

    async def done(self, position: int) -> None:
        """Nobody wants to know."""

    async def close(self) -> None:
        """There is nothing to let go of."""


class ReadModelFollower:
    """One loop from a log to its read models, which `opened` opens when they can be reached."""

    def __init__(
        self,
        event_log: EventLog,
        log_id: str,
        opened: Callable[[], Coroutine[Any, Any, ReadModels]],
        feed: Feed,
    ) -> None:
        self.problem = ""
        """Why the rows are behind or not to be trusted; empty when they are neither."""
        self._log = event_log
        self._log_id = log_id
        self._open = opened
        self._feed = feed
        self._models: ReadModels | None = None
        self._position = 0
        self._rest = 0.0
        self._rested = 0.0
        self._under_way: asyncio.Task[Any] | None = None
        self._closing = False

    @property
    def position(self) -> int:
        """Position that the rows tell up to, as last heard: never ahead of them. 0 before they were reached.

        Events above it are needed still.
        """
        return self._position

    async def run(self) -> None:
        """Until cancelled."""
        pause = RETRY_SECONDS
        while True:
            self._rest = 0.0
            if await self._attempted():
                pause = RETRY_SECONDS
            else:
                await asyncio.sleep(max(pause, self._rest))
                pause = min(2 * pause, MAX_RETRY_SECONDS)

    async def close(self) -> None:
        """Let a transaction end that has begun, then let go of the database and the feed."""
        self._closing = True
        if self._under_way is not None:
            await asyncio.wait([self._under_way])
            if not self._under_way.cancelled():
                self._under_way.exception()  # nobody else will hear of it
        await self._feed.close()
        if self._models is not None:
            await self._models.close()

    async def _attempted(self) -> bool:
        """One turn, and then a wait for the next. False if it failed."""
        try:
            if await self._caught_up():
                self._say("")
                await self._feed.wait()
            else:
                await asyncio.sleep(GATHER_SECONDS)
        except (ReadModelsUnavailable, LogUnavailable) as error:
            self._say(str(error))
        except CorruptLog as error:
            await self._stale(f"the event log cannot be read on: {error}", rebuild=False)
        except DBAPIError as error:
            await self._stale(f"rows could not be written: {error.orig}", rebuild=True)
        except Exception as error:
            log.exception("the read models failed")
            await self._stale(f"rows could not be made: {type(error).__name__}: {error}", rebuild=True)
        else:
            return True
        return False

    async def _caught_up(self) -> bool:
        """Write what is new, if it is our turn. False if somebody else changed the rows meanwhile."""
        models = self._models
        if models is None:
            models = await self._whole(self._opened())
        status = await self._whole(models.attach(self._log_id))
        self._position = status.position
        if not await self._feed.holds():
            return True
        if status.rebuild or status.position < await self._log.first_position() - 1:
            log.warning("the read models are rebuilt", reason=status.stale or "events they lack are trimmed")
            await self._rebuild(models)
        self._rested = asyncio.get_running_loop().time()
        async for page in pages(self._log.read_all(self._position)):
            self._position = await self._whole(models.write(page))
            if self._position < page[-1].position:
                return False
            await self._give_way(self._position)
        if status.stale and not status.rebuild:
            await self._whole(models.mark_current())
        await self._feed.done(self._position)
        await asyncio.sleep(GATHER_SECONDS)
        return True

    async def _rebuild(self, models: ReadModels) -> None:
        clock = asyncio.get_running_loop().time
        began = self._rested = clock()
        try:
            work = models.rebuild(self._log, self._log_id, self._give_way)
            self._position = (await self._whole(work)).position
        finally:
            self._rest = REST_PER_REBUILD * (clock() - began)

    async def _give_way(self, _position: int) -> None:
        """Called after each page."""
        if self._closing:
            raise ReadModelsUnavailable("the work on the read models is broken off")
        clock = asyncio.get_running_loop().time
        await asyncio.sleep(REST_PER_PAGE * (clock() - self._rested))
        self._rested = clock()

    async def _opened(self) -> ReadModels:
        self._models = await self._open()
        return self._models

    async def _whole(self, work: Coroutine[Any, Any, T]) -> T:
        """Do it to its end even if we are cancelled: a transaction that is dropped midway keeps its lock."""
        self._under_way = task = asyncio.ensure_future(work)
        return await asyncio.shield(task)

    async def _stale(self, reason: str, rebuild: bool) -> None:
        self._say(f"the read models are stale: {reason}")
        try:
            if self._models is not None:
                await self._whole(self._models.mark_stale(reason, rebuild))
        except Exception as error:  # noqa: BLE001 - the database may be what failed; the next attempt marks again
            log.warning("the read models cannot be marked as stale", error=str(error))

    def _say(self, problem: str) -> None:
        if problem and problem != self.problem:
            log.warning("read models", problem=problem)
        self.problem = problem
