"""Who of several processes on one log in Redis owns it: a lease in the log's own slot, a term as its fence.

Each process says every second or so that it lives, under a key that ends by itself. The same script gives the
owner's lease to whoever finds it free, and begins a new term with it. What only the owner may say carries the
term in which it became the owner, and the log's own scripts refuse a term that is over: an owner that stood
still and does not know yet that another one took its place can record nothing, and so ask for nothing.

Between a record and the deed the clock of this process decides, not the server's: it takes the lease for lost
some time before the server does.
"""

import asyncio
import time
from collections.abc import Callable, Collection
from contextlib import suppress
from typing import Any

from lifecycle.errors import LogUnavailable
from lifecycle.store.redis_entries import number
from lifecycle.store.redis_scripts import BEAT, RESIGN
from lifecycle.store.redis_streams import RedisEventLog

LEASE_SECONDS = 5.0
"""How long an owner that is not heard of stays the owner."""

SURE_SHARE = 0.6
"""Part of the lease, from when it was asked for, in which this process takes itself for the owner."""

BLOCK_SHARE = 0.2
"""Longest wait for news, as a part of the lease: below what makes an owner doubt that it hears the others."""

NEWS_AT_ONCE = 256
"""Entries of the feed that one piece of news stands for; what is behind them is news again."""


class RedisOwnership:
    """The `Ownership` of a log in Redis. `name` is this process's own, unlike every other's."""

    shared = True

    def __init__(
        self,
        event_log: RedisEventLog,
        name: str,
        lease_seconds: float = LEASE_SECONDS,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._server = event_log.server
        self._epoch = event_log.epoch
        self._name = name
        self.lease_seconds = lease_seconds
        self._clock = clock
        self._meta, self._feed = self._server.key("meta"), self._server.key("feed")
        self._lease = self._server.key("lease", "owner")
        self._sure_until = 0.0
        self._resigned = False
        self._left = False
        self._owner = ""

    @property
    def holds(self) -> bool:
        """Whether this process is the owner: it may say no while it still is, never yes when it is not."""
        return self._clock() < self._sure_until

    @property
    def owner(self) -> str:
        """Name of the owner as it was last heard."""
        return self._owner

    async def beat(self) -> None:
        """Say that this process lives; take the lease if it is free, keep it if it is ours.

        After `resign` it lets go of it instead, in case that was not heard.
        """
        if self._left:
            return
        asked = self._clock()
        wanted = 0 if self._resigned else 1
        keys = (self._meta, self._lease, self._presence(self._name))
        lease_ms = int(self.lease_seconds * 1000)
        owner, term = await self._evaluated(BEAT, keys, (self._epoch, self._name, lease_ms, wanted))
        self._owner = owner.decode()
        if self._owner == self._name and not self._resigned:
            self._server.term = int(term)
            self._sure_until = asked + SURE_SHARE * self.lease_seconds
        else:
            self._sure_until = 0.0

    async def news(self, position: int) -> int:
        """Wait for events behind `position`, for about a second at most; answers the last one's position."""
        block_ms = int(BLOCK_SHARE * self.lease_seconds * 1000)
        command = ("XREAD", "COUNT", NEWS_AT_ONCE, "BLOCK", block_ms, "STREAMS", self._feed, f"{position}-0")
        client = self._server.client
        found = await self._server.ask(lambda: client.execute_command(*command))  # type: ignore[no-untyped-call]
        return number(found[0][1][-1][0]) if found else position

    async def silent(self, names: Collection[str]) -> frozenset[str]:
        """Which of these processes have not said for a lease's time that they live."""
        asked = sorted(names)
        if not asked:
            return frozenset()
        there = await self._server.read(*(("EXISTS", self._presence(name)) for name in asked))
        return frozenset(name for name, found in zip(asked, there, strict=True) if not found)

    async def resign(self) -> None:
        """Let somebody else own the log; this process never will again."""
        self._resigned = True
        self._sure_until = 0.0
        await self._evaluated(RESIGN, (self._lease,), (self._name,))

    async def leave(self) -> None:
        """Say that this process ends, and let go. A server that is away hears it from its own clock."""
        self._left = self._resigned = True
        self._sure_until = 0.0
        with suppress(LogUnavailable, asyncio.TimeoutError):
            await self._evaluated(RESIGN, (self._lease,), (self._name,))
            presence = self._presence(self._name)
            await self._server.ask(lambda: self._server.client.delete(presence))

    def _presence(self, name: str) -> bytes:
        return self._server.key("proxy", name)

    async def _evaluated(self, script: str, keys: Collection[bytes], arguments: Collection[Any]) -> Any:
        async def asked() -> Any:
            evaluated: Any = self._server.client.eval(script, len(keys), *keys, *arguments)
            return await evaluated

        return await self._server.ask(asked)
