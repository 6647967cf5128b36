"""How much new text is being mapped, or waits to be, of all models: beyond a bound it is known too late."""

from collections.abc import Iterator
from contextlib import contextmanager

from engine_bridge.errors import Unmappable

MAX_WAITING_CHARS = 32 * 2**20
"""A million characters take a processor some 0.15 s. What comes behind so many is known when its answer is
long over, and calls would share the processor with all of it."""


class MappingBacklog:
    """Counts characters. `waiting_chars` are those of prompts that are being mapped, or wait to be."""

    def __init__(self, max_chars: int = MAX_WAITING_CHARS) -> None:
        self.waiting_chars = 0
        self._max_chars = max_chars

    @contextmanager
    def room(self) -> Iterator["Room"]:
        """Room for one prompt, as long as the block runs. It begins empty."""
        room = Room(self, self._max_chars)
        try:
            yield room
        finally:
            self.waiting_chars -= room.num_chars


class Room:
    """What one prompt takes of a backlog."""

    def __init__(self, backlog: MappingBacklog, max_chars: int) -> None:
        self.num_chars = 0
        self._backlog = backlog
        self._max_chars = max_chars

    def take(self, num_chars: int) -> None:
        """Be at least so large. Raises `Unmappable` where others take too much; one alone may be any size."""
        more = max(0, num_chars - self.num_chars)
        others = self._backlog.waiting_chars - self.num_chars
        if more and others and others + num_chars > self._max_chars:
            raise Unmappable(f"{others} characters of prompts wait to be mapped: more would come too late")
        self.num_chars += more
        self._backlog.waiting_chars += more
