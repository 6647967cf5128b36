"""A follower of the read models that runs beside a test, and may be killed at any point."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from functools import partial

from lifecycle.ports import EventLog
from lifecycle.store.read_model_follower import Feed, ReadModelFollower
from lifecycle.store.read_models import ReadModels, Status

SECONDS = 30.0
LOG_ID = "a log"


def follower_of(log: EventLog, url: str, feed: Feed, log_id: str = LOG_ID) -> ReadModelFollower:
    return ReadModelFollower(log, log_id, partial(ReadModels.open, url), feed)


@asynccontextmanager
async def running(follower: ReadModelFollower) -> AsyncIterator[ReadModelFollower]:
    """In the block it follows; at its end it is killed, wherever it is."""
    task = asyncio.ensure_future(follower.run())
    try:
        yield follower
    finally:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task
        await follower.close()


async def reached(follower: ReadModelFollower, position: int) -> None:
    """Wait until the rows tell up to there and nothing is wrong."""
    async with asyncio.timeout(SECONDS):
        while True:
            if follower.position >= position and not follower.problem:
                return
            await asyncio.sleep(0.01)


async def marked_stale(models: ReadModels) -> Status:
    """Wait until readers of the rows can see that they are stale; the complaint comes before the mark."""
    async with asyncio.timeout(SECONDS):
        while True:
            status = await models.status()
            if status is not None and status.stale:
                return status
            await asyncio.sleep(0.01)


async def complaint(follower: ReadModelFollower, about: str) -> str:
    """Wait until it complains of this."""
    async with asyncio.timeout(SECONDS):
        while True:
            if about in follower.problem:
                return follower.problem
            await asyncio.sleep(0.01)
