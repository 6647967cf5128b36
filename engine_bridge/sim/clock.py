"""Clocks for the embedded engine: real, scaled, or virtual.

The engine's core never asks for the time; the runner does, here. A virtual clock belongs to an event loop
that never waits: when nothing is ready it jumps to the next timer, so a workload of hours runs in the time
its computing takes, the same way each time.
"""

import asyncio
import selectors
import time
from collections.abc import Callable, Coroutine
from typing import Any, Protocol, TypeVar

NANOSECONDS = 1_000_000_000

Result = TypeVar("Result")


class SimClock(Protocol):
    """Time of the embedded engine in nanoseconds since the epoch; it never goes back."""

    def now_ns(self) -> int: ...

    async def sleep_until(self, at_ns: int) -> None:
        """Return when `now_ns()` has reached `at_ns`, give or take the timer's grain; at once if it has."""
        ...


class RealClock:
    """The machine's clock, from the moment of construction on `speed` times as fast."""

    def __init__(self, speed: float = 1.0) -> None:
        if speed <= 0:
            raise ValueError(f"a clock's speed is above 0, not {speed}")
        self.speed = speed
        self._origin_ns = time.time_ns()
        self._started_ns = time.monotonic_ns()

    def now_ns(self) -> int:
        elapsed = time.monotonic_ns() - self._started_ns
        return self._origin_ns + (elapsed if self.speed == 1.0 else int(elapsed * self.speed))

    async def sleep_until(self, at_ns: int) -> None:
        left = at_ns - self.now_ns()
        if left > 0:
            await asyncio.sleep(left / self.speed / NANOSECONDS)


class VirtualClock:
    """The time of the `VirtualLoop` it is used in, counted from 0."""

    def now_ns(self) -> int:
        return _running_loop().now_ns

    async def sleep_until(self, at_ns: int) -> None:
        left = at_ns - self.now_ns()
        if left > 0:
            await asyncio.sleep(left / NANOSECONDS)


class _JumpingSelector(selectors.DefaultSelector):
    """Looks for ready sockets without waiting; the wait it was asked for is handed to `jump`."""

    def __init__(self, jump: Callable[[float], None]) -> None:
        super().__init__()
        self._jump = jump

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        ready = super().select(0)
        if ready or timeout == 0:
            return ready
        if timeout is None:
            # No timer is left: only a socket or another thread can go on.
            return super().select(None)
        self._jump(timeout)
        return ready


class VirtualLoop(asyncio.SelectorEventLoop):
    """An event loop whose timers, `asyncio.sleep` included, take no time.

    Deterministic as long as everything happens in the loop itself: another process or thread would see time
    jump.
    """

    def __init__(self) -> None:
        self.now_ns = 0
        super().__init__(_JumpingSelector(self._jump))

    def time(self) -> float:
        return self.now_ns / NANOSECONDS

    def _jump(self, seconds: float) -> None:
        self.now_ns += max(1, round(seconds * NANOSECONDS))


def run_virtual(main: Coroutine[Any, Any, Result]) -> Result:
    """Run `main` to its end on a virtual clock that starts at 0."""
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(main)


def _running_loop() -> VirtualLoop:
    loop = asyncio.get_running_loop()
    if not isinstance(loop, VirtualLoop):
        raise RuntimeError("a VirtualClock needs a VirtualLoop: start with run_virtual")
    return loop
