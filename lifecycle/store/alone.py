"""Ownership where one process has a log to itself: it owns it from the beginning to the end."""

import asyncio
from collections.abc import Collection


class Alone:
    """The `Ownership` of a log in memory or in SQLite. Whoever else wrote there is dead by now."""

    shared = False
    holds = True
    lease_seconds = 0.0

    def __init__(self, name: str) -> None:
        self._name = name

    @property
    def owner(self) -> str:
        """This process."""
        return self._name

    async def beat(self) -> None:
        """Nobody needs to hear it."""

    async def news(self, position: int) -> int:
        """For ever: nobody else writes."""
        await asyncio.Event().wait()
        return position

    async def silent(self, names: Collection[str]) -> frozenset[str]:
        """Everybody else."""
        return frozenset(names) - {self._name}

    async def resign(self) -> None:
        """There is nobody to take over: it stays the owner until it ends."""

    async def leave(self) -> None:
        """Nobody needs to hear it."""
