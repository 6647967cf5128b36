"""A scaled clock that stands still while work outside the simulation is under way.

A workload that is played over real sockets takes real time between an agent and the engine: messages are
rendered, bodies are parsed, the proxy thinks. On a clock that runs forty times as fast a busy machine's delay
of 50 ms would be two seconds, and two runs could not be compared. So time stands still from the moment a call
is begun until the engine has it, and from the end of its answer until the agent has that.
"""

import asyncio
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

NANOSECONDS = 1_000_000_000


class HeldClock:
    """`SimClock` and the agents' `Pace`: `speed` times the machine's clock, when nothing is on its way.

    `num_inside` tells how many calls the engine has now. Time passes between two looks at the clock as the
    first of them found things.
    """

    def __init__(self, speed: float, num_inside: Callable[[], int] = lambda: 0) -> None:
        if speed <= 0:
            raise ValueError(f"a clock's speed is above 0, not {speed}")
        self.speed = speed
        self.num_inside = num_inside
        self._num_open = 0
        self._now_ns = time.time_ns()
        self._looked_ns = time.monotonic_ns()
        self._stands = False

    @contextmanager
    def call(self) -> Iterator[None]:
        """A call of an agent, from before it is sent until its answer was read."""
        self._count(1)
        try:
            yield
        finally:
            self._count(-1)

    def now_ns(self) -> int:
        looked_ns = time.monotonic_ns()
        if not self._stands:
            self._now_ns += int((looked_ns - self._looked_ns) * self.speed)
        self._looked_ns = looked_ns
        self._stands = self._num_open > self.num_inside()
        return self._now_ns

    async def sleep_until(self, at_ns: int) -> None:
        while (left := at_ns - self.now_ns()) > 0:  # noqa: ASYNC110
            # No event tells that time went on: whether it stands is known by looking.
            await asyncio.sleep(left / self.speed / NANOSECONDS)

    def _count(self, change: int) -> None:
        self.now_ns()
        self._num_open += change
        self.now_ns()

    # -- the agents' pace ---------------------------------------------------------------------------------

    def now_seconds(self) -> float:
        return self.now_ns() / NANOSECONDS

    async def wait_until(self, at_seconds: float) -> None:
        await self.sleep_until(round(at_seconds * NANOSECONDS))
