"""A wrapper that makes any event log misbehave in the ways a real one can."""

import asyncio
from collections.abc import AsyncIterator, Collection, Sequence

from lifecycle.core.events import Event, RecordedEvent
from lifecycle.errors import LogUnavailable
from lifecycle.ports import EventLog


class FaultyEventLog:
    """Passes everything on to `inner`, after `hops` turns of the event loop.

    `drop_next` appends are refused before they reach it; `forget_next` are recorded, but their caller is told
    otherwise (the answer was lost). While `gate` is clear, appends wait in front of it.
    """

    def __init__(self, inner: EventLog, hops: int = 0) -> None:
        self.inner = inner
        self.hops = hops
        self.drop_next = 0
        self.forget_next = 0
        self.gate = asyncio.Event()
        self.gate.set()

    async def append(
        self, stream: str, events: Sequence[Event], expected_version: int
    ) -> Sequence[RecordedEvent]:
        await self._delay()
        await self.gate.wait()
        if self.drop_next:
            self.drop_next -= 1
            raise LogUnavailable("dropped")
        recorded = await self.inner.append(stream, events, expected_version)
        if self.forget_next:
            self.forget_next -= 1
            raise LogUnavailable("the answer was lost")
        await self._delay()
        return recorded

    async def read_stream(self, stream: str, after_version: int = 0) -> AsyncIterator[RecordedEvent]:
        async for recorded in self.inner.read_stream(stream, after_version):
            await self._delay()
            yield recorded

    async def read_all(self, after_position: int = 0) -> AsyncIterator[RecordedEvent]:
        async for recorded in self.inner.read_all(after_position):
            await self._delay()
            yield recorded

    async def head(self) -> int:
        await self._delay()
        return await self.inner.head()

    async def first_position(self) -> int:
        return await self.inner.first_position()

    async def trim(self, through: int, streams: Collection[str]) -> int:
        return await self.inner.trim(through, streams)

    async def close(self) -> None:
        await self.inner.close()

    async def _delay(self) -> None:
        for _ in range(self.hops):
            await asyncio.sleep(0)
