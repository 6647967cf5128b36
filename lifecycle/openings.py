"""Contexts that begin while the event log is away: their calls wait for it, the engine does not."""

import asyncio
from contextlib import suppress

from lifecycle.core.ids import ContextKey
from lifecycle.core.observations import ContextOpened
from lifecycle.core.state import ContextState
from lifecycle.errors import LogUnavailable
from lifecycle.tracker import Tracker

MAX_OPENING = 1_000
"""Calls of new contexts that may wait for the log to come back: each holds its messages."""

OPENING_PAUSE_SECONDS = 0.5
NUM_OPENINGS_TRIED = 600
"""Five minutes, after which such a call counts as untracked."""


async def open_for_call(
    tracker: Tracker, observation: ContextOpened, parent: ContextKey | None
) -> ContextState:
    """`Tracker.open`, waiting for a log that is away as an observation does.

    Raises `LogUnavailable` where it stays away too long, was not read yet, or too many wait.
    """
    try:
        return await tracker.open(observation, parent)
    except LogUnavailable:
        if not tracker.read.is_set() or tracker.num_opening >= MAX_OPENING:
            raise
    tracker.num_opening += 1
    try:
        for _ in range(NUM_OPENINGS_TRIED):
            await asyncio.sleep(OPENING_PAUSE_SECONDS)
            with suppress(LogUnavailable):
                return await tracker.open(observation, parent)
    finally:
        tracker.num_opening -= 1
    raise LogUnavailable("the event log stayed away")
