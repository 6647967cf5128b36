"""The read models beside a running proxy, and their rebuild by command.

They have a connection to the log of their own: what is read for them holds up nobody who writes.
"""

import asyncio
import secrets
from collections.abc import Callable
from contextlib import AsyncExitStack
from functools import partial
from pathlib import Path

import structlog
from prometheus_client import CollectorRegistry, Gauge
from sqlalchemy.engine import make_url

from lifecycle.errors import LifecycleError
from lifecycle.store.feed_consumer import FeedConsumer
from lifecycle.store.opening import OpenLog, open_log
from lifecycle.store.read_model_database import parse_url
from lifecycle.store.read_model_follower import Feed, HeardFeed, ReadModelFollower
from lifecycle.store.read_models import ReadModels, Rebuilt
from lifecycle.tracker import Tracker
from proxy.config import Config, InvalidConfig

log = structlog.get_logger(__name__)

MEMORY_LOG = "memory:"
LOG_ID = "log_id"
LOG_ID_BYTES = 16
ASK_AGAIN_SECONDS = 5.0
"""Pause between attempts to open the log."""


class ReadModelLoop:
    """Keeps the read models up, where the configuration names a database for them.

    Raises `InvalidConfig` for a URL that names none.
    """

    def __init__(self, config: Config, tracker: Tracker, registry: CollectorRegistry) -> None:
        self._log_url = config.log_url
        self._url = config.read_models_url
        self._tracker = tracker
        self._heard = HeardFeed()
        self._follower: ReadModelFollower | None = None
        self._problem = ""
        if self._url:
            _check(config)
            tracker.listeners.append(self._heard.heard)
            lag = Gauge(
                "kvtether_read_models_lag_events",
                "Events that the read models do not show yet.",
                registry=registry,
            )
            lag.set_function(lambda: max(tracker.contexts.position - self._position, 0))

    @property
    def warnings(self) -> tuple[str, ...]:
        """Why the rows are behind or stale. Calls and control do not suffer from it."""
        problem = self._follower.problem if self._follower is not None else self._problem
        return (problem,) if problem else ()

    async def position(self) -> int | None:
        """Events above it are needed for the rows still; None if there are no read models."""
        return self._position if self._url else None

    async def run(self) -> None:
        """For ever; at once over if there are no read models."""
        while self._url:
            try:
                await self._follow()
            except LifecycleError as error:
                self._problem = f"the read models wait for the event log: {error}"
                log.warning(self._problem)
                await asyncio.sleep(ASK_AGAIN_SECONDS)

    @property
    def _position(self) -> int:
        return self._follower.position if self._follower is not None else 0

    async def _follow(self) -> None:
        async with AsyncExitStack() as stack:
            opened = await open_log(self._log_url)
            stack.push_async_callback(opened.event_log.close)
            log_id = await _log_id(opened)
            feed = self._feed()
            self._follower = ReadModelFollower(
                opened.event_log, log_id, partial(ReadModels.open, self._url), feed
            )
            stack.push_async_callback(self._follower.close)
            await self._follower.run()

    def _feed(self) -> Feed:
        if self._log_url.startswith(("redis://", "rediss://")):
            return FeedConsumer(self._log_url)
        return self._heard


async def rebuild(config: Config, progress: Callable[[int, int], None]) -> Rebuilt:
    """Replace the rows by what the log says; a running proxy waits meanwhile, and its calls do not.

    `progress` hears the position reached and the one to reach. Raises `InvalidConfig` where there is nothing
    to rebuild or nothing to rebuild it from, and `LifecycleError`.
    """
    if not config.read_models_url:
        raise InvalidConfig("read_models_url is empty: there are no read models")
    _check(config)
    _check_log_is_there(config)
    async with AsyncExitStack() as stack:
        opened = await open_log(config.log_url)
        stack.push_async_callback(opened.event_log.close)
        head = await opened.event_log.head()
        if not head:
            raise InvalidConfig(f"log_url: the event log at {opened.place} is empty: is it the right one?")
        models = await ReadModels.open(config.read_models_url)
        stack.push_async_callback(models.close)

        async def reached(position: int) -> None:
            progress(position, head)

        return await models.rebuild(opened.event_log, await _log_id(opened), reached)


def _check(config: Config) -> None:
    try:
        rows = parse_url(config.read_models_url)
    except ValueError as error:
        raise InvalidConfig(f"read_models_url: {error}") from error
    if config.log_url == MEMORY_LOG:
        raise InvalidConfig("read_models_url: rows are made from the log, and log_url names one that is lost")
    log_file = _log_file(config)
    if log_file is None or rows.get_backend_name() != "sqlite":
        return
    if Path(rows.database or "").resolve() == log_file.resolve():
        raise InvalidConfig("read_models_url: not the log's own file, where each would hold up the other")


def _check_log_is_there(config: Config) -> None:
    log_file = _log_file(config)
    if log_file is not None and not log_file.exists():
        raise InvalidConfig(f"log_url: there is no {log_file}; rebuild with the settings of the proxy")


def _log_file(config: Config) -> Path | None:
    return Path(make_url(config.log_url).database or "") if config.log_url.startswith("sqlite:") else None


async def _log_id(opened: OpenLog) -> str:
    """What tells this log from every other one."""
    made = await opened.settings.get_or_create(LOG_ID, lambda: secrets.token_bytes(LOG_ID_BYTES))
    return made.hex()
