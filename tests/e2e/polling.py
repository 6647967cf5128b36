"""Waits with a bound for what no event tells."""

import asyncio
from collections.abc import Awaitable, Callable

SECONDS = 45.0
"""Bound of every wait: far above what anything here takes."""

POLL_SECONDS = 0.1
NUM_POLLS = int(SECONDS / POLL_SECONDS)


async def polled(holds: Callable[[], Awaitable[bool]], seconds: float = POLL_SECONDS) -> None:
    """Until something holds of which no news comes; `seconds` is the pause between two looks."""
    for _ in range(int(SECONDS / seconds)):
        if await holds():
            return
        await asyncio.sleep(seconds)
    raise AssertionError(f"{holds.__name__} waited for {SECONDS} s in vain")
