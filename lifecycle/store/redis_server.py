"""One Redis server: how it is reached, what it must promise, how its failures are named."""

import asyncio
import re
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar
from urllib.parse import parse_qs, urlencode, urlsplit

from redis.asyncio import BlockingConnectionPool, Redis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import (
    AuthenticationError,
    BusyLoadingError,
    ConnectionError,
    NoPermissionError,
    OutOfMemoryError,
    ReadOnlyError,
    RedisError,
    ResponseError,
    TimeoutError,
)

from lifecycle.errors import CorruptLog, Deposed, LogUnavailable

MAX_CONNECTIONS = 8
"""Connections of one log: one writes, the others read."""

T = TypeVar("T")

DEFAULT_PORT = 6379
DEFAULT_PREFIX = "kvtether"

REQUIRED = {"appendonly": "yes", "appendfsync": "always", "maxmemory-policy": "noeviction"}
"""What makes an acknowledged write one that stays."""

_CONFIG_PATTERNS = ("append*", "maxmemory-policy")
"""Two questions that cover `REQUIRED`: before Redis 7 one question takes one pattern."""

_NO_ADDRESS = (  # says nothing of what it read: with a password in it, any part may be the password
    "the URL of the event log needs a port and the number of a database as in redis://host:6379/0; in a user "
    "or a password, characters such as / and # are written as %2F and %23"
)

_PREFIX = re.compile(r"[A-Za-z0-9_.:-]{1,64}")
_FILES = frozenset({"ssl_ca_certs", "ssl_certfile", "ssl_keyfile"})

_ADVICE: tuple[tuple[tuple[type[RedisError], ...], str, str], ...] = (
    ((AuthenticationError,), r"\bNOAUTH\b", "look at the user and the password in log_url"),
    ((NoPermissionError,), r"\bNOPERM\b", "its user may not do this"),
    ((BusyLoadingError,), r"\bLOADING\b", "it is still loading its data"),
    ((OutOfMemoryError,), r"\bOOM\b", "its memory limit is reached: raise maxmemory"),
    ((ReadOnlyError,), r"\bREADONLY\b", "it is a replica: name the primary in log_url"),
    ((), r"\bMISCONF\b", "it cannot write its files: look at its disk"),
    ((ConnectionError, TimeoutError), r"$^", "what was on its way may or may not be recorded"),
)
"""By the client's class, or by Redis' code where a script's error wraps it; the first that fits."""


class UnsafeServer(RedisError):
    """The server may lose what it has acknowledged, or does not say whether it may."""


class RedisServer:
    """A pool of connections; each one makes sure when it begins that the server keeps what it acknowledges.

    So it is asked again after a restart or a failover. The client itself never sends a command twice.
    """

    def __init__(self, url: str, timeout_s: float) -> None:
        """Reads `url` (`redis://` or `rediss://`); connects later. Raises `ValueError`."""
        parts = urlsplit(url)
        query = {name: values[-1] for name, values in parse_qs(parts.query).items()}
        self._prefix = query.pop("prefix", DEFAULT_PREFIX)
        if parts.scheme not in ("redis", "rediss") or not parts.hostname:
            raise ValueError("the event log needs a URL like redis://host:6379/0")
        try:
            port = parts.port or DEFAULT_PORT
        except ValueError:
            port = -1
        if port < 0 or not re.fullmatch(r"/?\d*", parts.path):
            raise ValueError(_NO_ADDRESS)
        if not _PREFIX.fullmatch(self._prefix):
            raise ValueError(f"prefix {self._prefix!r}: letters, digits and _ . : - only, 64 at most")
        if unknown := sorted(set(query) - _FILES):
            raise ValueError(f"unknown in the URL of the event log: {', '.join(unknown)}")
        self.place = (
            f"{parts.scheme}://{parts.hostname}:{port}/{parts.path.strip('/') or 0} (prefix {self._prefix})"
        )
        """The server and the keys as people may read them: without user and password."""
        pool = BlockingConnectionPool.from_url(
            parts._replace(query=urlencode(query)).geturl(),
            max_connections=MAX_CONNECTIONS,
            timeout=timeout_s,
            socket_timeout=timeout_s,
            socket_connect_timeout=timeout_s,
            retry=Retry(NoBackoff(), 0),
            redis_connect_func=self._prepare,
            protocol=2,
        )
        self.client = Redis.from_pool(pool)
        self.term = 0
        """The last term in which this process owned the log, 0 if it never did."""

    def key(self, kind: str, name: str = "") -> bytes:
        """The name of a key. All of one log lie in one hash slot, so that one script may touch them."""
        return f"{{{self._prefix}}}:{kind}{':' if name else ''}{name}".encode()

    async def ask(self, question: Callable[[], Awaitable[T]]) -> T:
        """What `question` answers. Raises `LogUnavailable` or `CorruptLog`.

        It is asked once more, on fresh connections, when one breaks: after a restart all the old ones are
        dead. So it must be safe to ask it twice.
        """
        task = asyncio.current_task()
        cancellations = task.cancelling() if task is not None else 0
        try:
            try:
                return await question()
            except ConnectionError:
                await self.client.connection_pool.disconnect(inuse_connections=False)
                return await question()
        except RedisError as error:
            raise self.named(error) from error
        finally:
            if task is not None and task.cancelling() > cancellations:
                # The client sends under asyncio.wait_for, which before Python 3.12 drops a cancellation that
                # comes just as the sending ends: whoever waits for our end would wait for ever.
                raise asyncio.CancelledError

    async def read(self, *commands: tuple[Any, ...]) -> list[Any]:
        """What commands that only read answer, with no write of others between them. Raises as `ask`."""

        async def answered(transaction: bool) -> list[Any]:
            async with self.client.pipeline(transaction=transaction) as pipeline:
                for command in commands:
                    pipeline.execute_command(*command)
                return await pipeline.execute()

        async def asked() -> list[Any]:
            try:
                return await answered(True)
            except OutOfMemoryError:
                # A full server refuses to queue even reads. It takes no write either that could come between.
                return await answered(False)

        return await self.ask(asked)

    def deposed(self, term: bytes) -> Deposed:
        """The refusal of what an owner says whose term is over."""
        return Deposed(
            f"the event log in Redis at {self.place} is in term {term.decode()}: another proxy owns it since "
            f"term {self.term} of this one, or always did"
        )

    async def close(self) -> None:
        """Let go of all connections."""
        await self.client.aclose()

    async def _prepare(self, connection: Any) -> None:
        await connection.on_connect()
        found: dict[str, str] = {}
        for pattern in _CONFIG_PATTERNS:
            await connection.send_command("CONFIG", "GET", pattern)
            try:
                answer = [value.decode() for value in await connection.read_response()]
            except ResponseError as error:
                raise UnsafeServer(
                    f"does not say whether it keeps what it acknowledges ({error}): allow CONFIG GET for its "
                    f"user (ACL SETUSER ... +config|get), and set {_settings(REQUIRED)}"
                ) from error
            found |= zip(answer[::2], answer[1::2], strict=True)
        wrong = {name: found.get(name, "") for name, value in REQUIRED.items() if found.get(name) != value}
        if wrong:
            raise UnsafeServer(
                f"may lose what it has acknowledged ({_settings(wrong)}): set "
                f"{_settings({name: REQUIRED[name] for name in wrong})}"
            )

    def named(self, error: RedisError) -> LogUnavailable | CorruptLog:
        """The client's error in the words of the port, with what a person can do about it."""
        if isinstance(error, UnsafeServer):
            return LogUnavailable(f"Redis at {self.place} {error}")
        text = str(error)
        if "WRONGTYPE" in text:
            return CorruptLog(f"Redis at {self.place} holds something else under the log's keys: {text}")
        fits = (why for kinds, code, why in _ADVICE if isinstance(error, kinds) or re.search(code, text))
        advice = next((f" ({why})" for why in fits), "")
        return LogUnavailable(f"Redis at {self.place} is unavailable: {text}{advice}")


def _settings(values: dict[str, str]) -> str:
    return ", ".join(f"{name} {value or '?'}" for name, value in values.items())
