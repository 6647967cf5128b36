"""The consumer group of the read models, on the feed of a log in Redis.

Order matters and rows are written by one process at a time, so the group has one consumer, and a lease says
which process it is; the others stand by and take over when the lease runs out. The group wakes the consumer,
shows operators and trims how far it has come, and nothing else: what is written is read from the log behind
the position that lies with the rows. So an entry that comes again, or to two processes because a lease was
lost unnoticed, changes nothing.
"""

import asyncio
import secrets
from contextlib import suppress
from typing import Any

from lifecycle.errors import LogUnavailable
from lifecycle.store.redis_server import RedisServer

GROUP = "read-models"
LEASE_SECONDS = 15.0
BLOCK_SECONDS = 2.0
"""Longest wait for news: below the time limit of an answer, and often enough to keep the lease."""

_TAKE = """
local holder = redis.call('GET', KEYS[1])
if holder and holder ~= ARGV[1] then return 0 end
redis.call('SET', KEYS[1], ARGV[1], 'PX', ARGV[2])
return 1
"""

_RELEASE = """
if redis.call('GET', KEYS[1]) == ARGV[1] then return redis.call('DEL', KEYS[1]) end
return 0
"""

_DONE = """
redis.pcall('XGROUP', 'CREATE', KEYS[1], ARGV[1], ARGV[2])
redis.call('XGROUP', 'SETID', KEYS[1], ARGV[1], ARGV[2])
for _, entry in ipairs(redis.call('XPENDING', KEYS[1], ARGV[1], '-', ARGV[2], 1000)) do
  redis.call('XACK', KEYS[1], ARGV[1], entry[1])
end
"""


class FeedConsumer:
    """One process's part in the group; a `Feed`. Connects when it is first asked."""

    def __init__(self, url: str, timeout_s: float = 5.0) -> None:
        """Reads `url` as the log does. Raises `ValueError`."""
        self._server = RedisServer(url, timeout_s)
        self._feed = self._server.key("feed")
        self._lease = self._server.key("lease", GROUP)
        self._name = secrets.token_hex(8)
        self._holds = False

    async def holds(self) -> bool:
        """Take the lease if it is free, or keep it. Raises `LogUnavailable`."""
        lease_ms = int(LEASE_SECONDS * 1000)
        self._holds = bool(await self._asked("EVAL", _TAKE, 1, self._lease, self._name, lease_ms))
        return self._holds

    async def wait(self) -> None:
        """Until the feed has something new, for `BLOCK_SECONDS` at most. Raises `LogUnavailable`."""
        if not self._holds:
            await asyncio.sleep(BLOCK_SECONDS)
            return
        block_ms = int(BLOCK_SECONDS * 1000)
        command = ("XREADGROUP", "GROUP", GROUP, GROUP, "COUNT", 1, "BLOCK", block_ms, "STREAMS")
        try:
            await self._asked(*command, self._feed, ">")
        except LogUnavailable as error:
            if "NOGROUP" not in str(error):
                raise
            await asyncio.sleep(BLOCK_SECONDS)  # nothing was ever recorded, or another log took its place

    async def done(self, position: int) -> None:
        """Move the group to `position`, and acknowledge what it was given until there."""
        if position:
            await self._asked("EVAL", _DONE, 1, self._feed, GROUP, position)

    async def close(self) -> None:
        """Leave the lease to others, and let go of the server."""
        with suppress(LogUnavailable):
            await self._asked("EVAL", _RELEASE, 1, self._lease, self._name)
        await self._server.close()

    async def _asked(self, *command: Any) -> Any:
        client = self._server.client
        return await self._server.ask(lambda: client.execute_command(*command))  # type: ignore[no-untyped-call]
