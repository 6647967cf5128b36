"""The event log that a URL names."""

from collections.abc import Awaitable, Callable
from functools import partial
from typing import NamedTuple, Protocol

from lifecycle.ports import EventLog, Ownership, SnapshotStore
from lifecycle.store.alone import Alone
from lifecycle.store.memory import MemoryEventLog
from lifecycle.store.pin_vault import PinVault
from lifecycle.store.redis_ownership import RedisOwnership
from lifecycle.store.redis_settings import RedisSettings
from lifecycle.store.redis_streams import RedisEventLog
from lifecycle.store.settings import SqlSettings
from lifecycle.store.snapshots import MemorySnapshots, RedisSnapshots, SqlSnapshots
from lifecycle.store.sql import SqlEventLog

MEMORY_LOG = "memory:"


class Settings(Protocol):
    """Values beside the log, made once and the same for every process on it."""

    async def get_or_create(self, name: str, factory: Callable[[], bytes]) -> bytes: ...


class OpenLog(NamedTuple):
    """A log, what lies beside it, and where both are, in words without a password.

    `open_vault` opens the vault of held pins; None where this kind of log has none beside it. `join` begins,
    under the process's name, its part in who owns the log.
    """

    event_log: EventLog
    settings: Settings
    snapshots: SnapshotStore
    place: str
    open_vault: Callable[[], Awaitable[PinVault]] | None = None
    join: Callable[[str], Ownership] = Alone


class _NoSettings:
    """Values that nobody will ask for again."""

    async def get_or_create(self, name: str, factory: Callable[[], bytes]) -> bytes:
        return factory()


async def open_log(url: str) -> OpenLog:
    """Open what `url` names: `redis://`, `rediss://`, `sqlite:///path`, or `memory:`, which nothing outlives.

    Raises `ValueError` for another kind of URL, `LogUnavailable` and `CorruptLog` as the adapters do.
    """
    if url == MEMORY_LOG:
        return OpenLog(MemoryEventLog(), _NoSettings(), MemorySnapshots(), "memory")
    if url.startswith(("redis://", "rediss://")):
        redis = await RedisEventLog.open(url)
        server = redis.server
        join = partial(RedisOwnership, redis)
        return OpenLog(redis, RedisSettings(server), RedisSnapshots(server), server.place, join=join)
    sql = await SqlEventLog.open(url)
    engine = sql.engine
    return OpenLog(sql, SqlSettings(engine), SqlSnapshots(engine), url, partial(PinVault.open, engine))
