"""One queue a context: what happened to it is worked off in the order it happened, off the data path."""

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Hashable

import structlog

from proxy.request_record import current_request, run_for
from proxy.tasks import Tasks

log = structlog.get_logger(__name__)

Job = Callable[[], Awaitable[None]]


class Mailboxes:
    """Jobs by key. Jobs of one key run one after another, in the order of `post`; keys run side by side.

    `post` never blocks and may be called from any callback on the event loop. A job that raises is logged,
    and the next one runs.
    """

    def __init__(self, tasks: Tasks) -> None:
        self._tasks = tasks
        self._jobs: dict[Hashable, deque[Job]] = {}
        self._idle = asyncio.Event()
        self._idle.set()

    def post(self, key: Hashable, job: Job, behind: Hashable = None) -> None:
        """Put a job behind those that wait under the key, and behind those that wait now under `behind`.

        It runs for the request that it was posted for, whoever's task works it off.
        """
        job = _as_posted(job)
        if behind in self._jobs and behind != key:
            job = self._after(self._jobs[behind], job)
        jobs = self._jobs.get(key)
        if jobs is not None:
            jobs.append(job)
            return
        self._jobs[key] = deque([job])
        self._idle.clear()
        self._tasks.spawn(self._drain(key))

    async def settled(self) -> None:
        """Wait until no job waits or runs."""
        await self._idle.wait()

    def _after(self, others: deque[Job], job: Job) -> Job:
        """The job, once the others are through. Whoever waits was posted later: nobody waits in a circle."""
        passed = asyncio.Event()

        async def mark() -> None:
            passed.set()

        async def waiting() -> None:
            await passed.wait()
            await job()

        others.append(mark)
        return waiting

    async def _drain(self, key: Hashable) -> None:
        jobs = self._jobs[key]
        while jobs:
            try:
                await jobs[0]()
            except Exception:
                log.exception("a job failed")
            jobs.popleft()
        del self._jobs[key]
        if not self._jobs:
            self._idle.set()


def _as_posted(job: Job) -> Job:
    request = current_request()

    async def run() -> None:
        run_for(request)
        await job()

    return run
