"""One of several proxies on a log owns it: it alone asks the cache to free or to hold, and trims the log.

Everybody follows what the others record, so the books of each proxy contain everything, and each may become
the owner: it takes the lease, reads the feed to its head, and goes on where the last owner left off. Who lost
the lease, or cannot hear what the others record, stops at once, in the middle of a directive if need be: what
is left of it is asked for again by the next owner.

With a log that only one process can use, that process is the owner from beginning to end.
"""

import asyncio
import time
from collections.abc import Callable, Coroutine, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

import structlog

from lifecycle.core.events import CallArrived, RecordedEvent
from lifecycle.errors import CorruptLog, LifecycleError
from lifecycle.log_keeper import LogKeeper
from lifecycle.orphans import callers, end_orphans
from lifecycle.ports import Ownership
from lifecycle.tracker import Tracker

log = structlog.get_logger(__name__)

BEAT_SHARE = 0.2
"""How often a proxy says that it lives, as a part of the lease."""

PATIENCE_SHARE = 0.6
"""As a part of the lease: how long after an owner heard where the feed's head is, and then read up to it, it
may act on what it read, and how long a proxy must be silent, after its own lease, before its calls are
ended. Where the log was away everybody is silent for a moment."""

BEAT_LIMIT_SECONDS = 2.0
"""How long a proxy waits for the log to hear that it lives, before it says it again."""

GATHER_SECONDS = 0.005
"""Events come in bursts; one read serves a burst."""

TICK_SECONDS = 1.0

SETTLE_SECONDS = 5.0
"""How long an owner that resigns waits for the cache to answer what it was asked."""

Loop = Callable[[], Coroutine[Any, Any, None]]


class Office:
    """This proxy's part in the ownership. Its loops run in the lifespan's tasks: `follow` and `keep`.

    `settled` waits until nothing that was asked of the cache is under way.
    """

    def __init__(
        self,
        tracker: Tracker,
        log_keeper: LogKeeper,
        settled: Loop,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._tracker = tracker
        self.log_keeper = log_keeper
        self._settled = settled
        self._clock = clock
        self._ownership: Ownership | None = None
        self._joined = asyncio.Event()
        self._in = asyncio.Event()
        self._out = asyncio.Event()
        self._out.set()
        self._resigning = False
        self._beaten = asyncio.Event()
        self._num_lost = 0
        self._fresh_until = 0.0
        self._silent_since: dict[str, float] = {}
        self._heard_of: set[str] = set()
        self.taken_over: list[Callable[[], None]] = []
        """Called when this proxy becomes the owner of a log that others use, too."""
        tracker.listeners.append(self._heard)

    @property
    def name(self) -> str:
        """Of this proxy, as its calls are recorded and as the others see it."""
        return self._tracker.name

    @property
    def shared(self) -> bool:
        """Whether other proxies may use the same log."""
        return self._ownership is not None and self._ownership.shared

    @property
    def owner(self) -> str:
        """Name of the proxy that owns the log, as it was last heard; empty while there is none."""
        return self._ownership.owner if self._ownership is not None else ""

    @property
    def holds(self) -> bool:
        """Whether this proxy may ask the cache to free or to hold something, at this moment."""
        ownership = self._ownership
        if ownership is None or not self._in.is_set() or not ownership.holds:
            return False
        return not ownership.shared or self._clock() < self._fresh_until

    @property
    def in_office(self) -> bool:
        """Whether this proxy became the owner and did not lose it, as far as it was told."""
        return self._in.is_set()

    @property
    def plans(self) -> bool:
        """Whether this proxy may begin to: it ends what it began before it lets another one take over."""
        return self.holds and not self._resigning

    @property
    def objection(self) -> str:
        """Why this proxy must leave the cache to others; empty if it is the owner."""
        if self.holds:
            return ""
        if self.owner == self.name:
            return "this proxy is about to take over the event log, or to let go of it: ask again in a moment"
        return f"another proxy on the same event log owns it: ask {self.owner or 'it once there is one'}"

    async def join(self, ownership: Ownership) -> None:
        """Begin, once the books are read; twice changes nothing. Raises `LogUnavailable`."""
        if self._ownership is None:
            self._ownership = ownership
            self._tracker.shared = ownership.shared
        if ownership.shared:
            await self._ownership.beat()
            self._fresh_until = self._clock() + PATIENCE_SHARE * ownership.lease_seconds
            await self._take_over(self._ownership)
        else:
            await end_orphans(self._tracker, callers(self._tracker.contexts) - {self.name})
            self._take_office()
        self._joined.set()

    async def follow(self) -> None:
        """Take in what the others record, for ever; at once over if there are none."""
        await self._joined.wait()
        ownership = self._ownership
        while ownership is not None and ownership.shared:
            try:
                newest = await ownership.news(self._tracker.contexts.position)
                heard = self._clock()  # what is recorded while we read is not read
                if newest > self._tracker.contexts.position:
                    await asyncio.sleep(GATHER_SECONDS)
                    await self._tracker.catch_up(newest)
                self._fresh_until = heard + PATIENCE_SHARE * ownership.lease_seconds
            except LifecycleError as error:
                level = log.error if isinstance(error, CorruptLog) else log.warning
                level("what other proxies record is not heard", error=str(error))
                await asyncio.sleep(TICK_SECONDS)

    async def keep(self) -> None:
        """Say that this proxy lives, and be the owner if nobody else is, for ever.

        What an owner has to do first, or for those who are gone, may take longer than a lease: the beat goes
        on meanwhile.
        """
        await self._joined.wait()
        ownership = self._ownership
        if ownership is None or not ownership.shared:
            return
        ending = self.while_owner(partial(self._end_calls_of_the_gone, ownership))
        async with asyncio.TaskGroup() as tasks:
            for loop in (partial(self._beat, ownership), partial(self._watch_lease, ownership), ending):
                tasks.create_task(loop())

    async def keep_time(self) -> None:
        """Let leases, doubts and pins run out, if this is the owner, and record what waited for the log."""
        await self._joined.wait()
        while True:
            await asyncio.sleep(TICK_SECONDS)
            try:
                await self._tracker.retry_waiting()
                if self.holds:
                    await self._tracker.tick()
                else:
                    self._tracker.rest()
            except LifecycleError as error:
                log.warning("time stands still", error=str(error))

    def while_owner(self, loop: Loop) -> Loop:
        """The loop, run as long as this proxy is the owner, and again when it becomes the owner again."""

        async def run() -> None:
            while True:
                await self._in.wait()
                work, over = asyncio.ensure_future(loop()), asyncio.ensure_future(self._out.wait())
                try:
                    await asyncio.wait((work, over), return_when=asyncio.FIRST_COMPLETED)
                    if work.done():
                        return work.result()
                finally:
                    work.cancel()
                    over.cancel()
                    await asyncio.gather(work, over, return_exceptions=True)

        return run

    async def resign(self) -> None:
        """Let another proxy take over now, with a snapshot to start from; this one goes on following."""
        ownership = self._ownership
        if ownership is None or not ownership.shared:
            return
        held, self._resigning = self.holds, True
        if self._in.is_set():  # what others asked for they wait for themselves
            with suppress(LifecycleError, TimeoutError):
                async with asyncio.timeout(SETTLE_SECONDS):
                    await self._settled()
        if held:
            await self.log_keeper.close()
        self._leave_office()
        with suppress(LifecycleError, TimeoutError):
            async with asyncio.timeout(BEAT_LIMIT_SECONDS):
                await ownership.resign()

    async def close(self) -> None:
        """The last of this proxy: a snapshot if it is the owner, and a word to the others."""
        ownership = self._ownership
        if ownership is None:
            return
        if self._in.is_set():
            with suppress(LifecycleError, TimeoutError):
                async with asyncio.timeout(BEAT_LIMIT_SECONDS):
                    await ownership.beat()  # the loop that did so has ended, and settling took its time
        if ownership.holds:
            await self.log_keeper.close()
        with suppress(TimeoutError):
            async with asyncio.timeout(BEAT_LIMIT_SECONDS):
                await ownership.leave()

    async def _beat(self, ownership: Ownership) -> None:
        while True:
            await asyncio.sleep(BEAT_SHARE * ownership.lease_seconds)
            self._step_down_unless(ownership.holds)  # a process that stood still may get back what it lost
            try:
                async with asyncio.timeout(BEAT_LIMIT_SECONDS):
                    await ownership.beat()
            except (LifecycleError, TimeoutError) as error:
                log.warning("the event log does not hear that this proxy lives", error=str(error))
            self._step_down_unless(ownership.holds)
            self._beaten.set()

    def _step_down_unless(self, holds: bool) -> None:
        if not holds:
            self._num_lost += 1
            self._leave_office()

    async def _watch_lease(self, ownership: Ownership) -> None:
        while True:
            await self._beaten.wait()
            self._beaten.clear()
            try:
                await self._take_over(ownership)
            except (LifecycleError, TimeoutError) as error:
                log.warning("the event log cannot be taken over yet", error=str(error))

    async def _take_over(self, ownership: Ownership) -> None:
        """Take office if the lease is ours, and still is, without a break, when we know all there is."""
        num_lost = self._num_lost
        if not ownership.holds or self._resigning or self._in.is_set():
            return
        await self._tracker.catch_up()
        await self.log_keeper.take_over()
        await end_orphans(self._tracker, ())  # nobody, but what the last owner did not prove any more
        if ownership.holds and not self._resigning and num_lost == self._num_lost:
            self._take_office()
            for called in self.taken_over:
                called()
            log.info("this proxy owns the event log", proxy=self.name)

    async def _end_calls_of_the_gone(self, ownership: Ownership) -> None:
        """Look after those who are not heard any more, until somebody else does."""
        while True:
            try:
                if not self._resigning:
                    await self._end_calls_of_the_silent(ownership)
            except (LifecycleError, TimeoutError) as error:
                log.warning("calls that proxies left behind are ended later", error=str(error))
            await asyncio.sleep(BEAT_SHARE * ownership.lease_seconds)

    async def _end_calls_of_the_silent(self, ownership: Ownership) -> None:
        now = self._clock()
        silent = await ownership.silent((callers(self._tracker.contexts) | self._heard_of) - {self.name})
        self._silent_since = {name: self._silent_since.get(name, now) for name in silent}
        patience = PATIENCE_SHARE * ownership.lease_seconds
        gone = {name for name, since in self._silent_since.items() if now - since >= patience}
        if gone:
            log.info("proxies are gone: whatever calls they left behind are ended", proxies=sorted(gone))
            await end_orphans(self._tracker, gone)
            self._heard_of -= gone

    def _heard(self, batch: Sequence[RecordedEvent]) -> None:
        self._heard_of.update(r.event.proxy for r in batch if isinstance(r.event, CallArrived))

    def _take_office(self) -> None:
        self._out.clear()
        self._in.set()

    def _leave_office(self) -> None:
        if self._in.is_set():
            log.info("this proxy does not own the event log any more", proxy=self.name)
            self._in.clear()
            self._out.set()
