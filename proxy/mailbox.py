"""One queue a context: what happened to it is worked off in the order it happened, off the data path."""

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Hashable

from proxy.tasks import Tasks


class Mailboxes:
    """Jobs by key. Jobs of one key run one after another, in the order of `post`; keys run side by side.

    `post` never blocks and may be called from any callback on the event loop. Jobs must not raise: one that
    does stops its key.
    """

    def __init__(self, tasks: Tasks) -> None:
        self._tasks = tasks
        self._jobs: dict[Hashable, deque[Callable[[], Awaitable[None]]]] = {}
        self._idle = asyncio.Event()
        self._idle.set()

    def post(self, key: Hashable, job: Callable[[], Awaitable[None]]) -> None:
        """Put a job behind those that wait under the key."""
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

    async def _drain(self, key: Hashable) -> None:
        jobs = self._jobs[key]
        while jobs:
            await jobs[0]()
            jobs.popleft()
        del self._jobs[key]
        if not self._jobs:
            self._idle.set()
