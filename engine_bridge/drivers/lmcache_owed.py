"""Deletes that a cache server owes because it was away when they were made.

A server that the coordinator gave up lost its L1 with its process, but an L2 of its own may hold copies that
it never reported: the directory does not show them, and nobody can be asked. They are remembered, and deleted
when the server is back. It is known by its address, for its id may be another one in every process. What is
owed is lost with our process, and beyond `MAX_OBJECTS` and `MAX_GONE` the oldest is forgotten: such copies go
when the server evicts them.
"""

from collections import OrderedDict
from collections.abc import Callable, Collection, Sequence

import structlog

from engine_bridge.drivers.lmcache_client import Instance, LmcacheClient
from engine_bridge.drivers.lmcache_keys import MAX_KEYS_PER_REQUEST, ObjectKey, batched
from engine_bridge.errors import CacheUnavailable
from lifecycle.vocabulary import Tier

log = structlog.get_logger(__name__)

MAX_OBJECTS = 100_000
"""Remembered for each server."""

MAX_GONE = 16
"""Servers that are away and remembered: one that did not come back while so many others went never will."""

StillDead = Callable[[bytes], bool]


class OwedDeletes:
    """Knows the servers that it was told of, by URL, and what those that are gone have missed."""

    def __init__(self, client: LmcacheClient) -> None:
        self._client = client
        self._seen: OrderedDict[str, None] = OrderedDict()
        self._owed: dict[str, OrderedDict[ObjectKey, StillDead]] = {}

    def __bool__(self) -> bool:
        return any(self._owed.values())

    def num_owed(self, url: str) -> int:
        """Objects that a server owes."""
        return len(self._owed.get(url, ()))

    def made(self, objects: Sequence[ObjectKey], registered: Collection[str], still_dead: StillDead) -> None:
        """These were deleted on all servers with `registered` URLs. `still_dead` is asked before a late
        delete."""
        for url in registered:
            self._seen[url] = None
            self._seen.move_to_end(url)
        gone = [url for url in self._seen if url not in registered]
        for url in gone[:-MAX_GONE]:
            del self._seen[url]
            self._owed.pop(url, None)
        for url in gone[-MAX_GONE:]:
            owed = self._owed.setdefault(url, OrderedDict())
            owed.update(dict.fromkeys(objects, still_dead))
            while len(owed) > MAX_OBJECTS:
                owed.popitem(last=False)

    async def collect(self, instances: Sequence[Instance]) -> None:
        """Have every server that is back do what it owes; one that fails is asked again the next time."""
        for instance in instances:
            owed = self._owed.get(instance.url)
            if not owed:
                continue
            try:
                await self._delete(instance, owed)
            except CacheUnavailable as error:
                log.info("a cache server still owes deletes", server=instance.url, error=str(error))

    async def _delete(self, instance: Instance, owed: OrderedDict[ObjectKey, StillDead]) -> None:
        """What is alive again, or may not be touched now, stays owed."""
        adapters = await self._client.adapters(instance)
        for batch in batched(list(owed), MAX_KEYS_PER_REQUEST):
            dead = [key for key in batch if key in owed and owed[key](key.chunk_key)]
            for adapter in adapters if dead else ():
                await self._client.delete(instance, dead, Tier.L2, adapter)
            for key in dead:
                owed.pop(key, None)
