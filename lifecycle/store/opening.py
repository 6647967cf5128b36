"""The durable event log that a URL names."""

from collections.abc import Callable
from typing import NamedTuple, Protocol

from lifecycle.ports import EventLog
from lifecycle.store.redis_settings import RedisSettings
from lifecycle.store.redis_streams import RedisEventLog
from lifecycle.store.settings import SqlSettings
from lifecycle.store.sql import SqlEventLog


class Settings(Protocol):
    """Values beside the log, made once and the same for every process on it."""

    async def get_or_create(self, name: str, factory: Callable[[], bytes]) -> bytes: ...


class OpenLog(NamedTuple):
    """A log, what lies beside it, and where both are, in words without a password."""

    event_log: EventLog
    settings: Settings
    place: str


async def open_log(url: str) -> OpenLog:
    """Open what `url` names: `redis://`, `rediss://` or `sqlite:///path`.

    Raises `ValueError` for another kind of URL, `LogUnavailable` and `CorruptLog` as the adapters do.
    """
    if url.startswith(("redis://", "rediss://")):
        redis = await RedisEventLog.open(url)
        return OpenLog(redis, RedisSettings(redis.server), redis.server.place)
    sql = await SqlEventLog.open(url)
    return OpenLog(sql, SqlSettings(sql.engine), url)
