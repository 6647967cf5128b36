"""Follows the keys file while the proxy runs, and says where nobody may be served without a key."""

import asyncio
import os
from collections.abc import Callable
from ipaddress import ip_address
from pathlib import Path

import structlog

from proxy.auth import Authenticator, KeySet
from proxy.config import DEFAULT_KEYS_FILE, Config, InvalidConfig
from proxy.keys import InvalidKeys, KeyFile, read_keys

log = structlog.get_logger(__name__)

LOOK_SECONDS = 1.0
"""How long a new key, or a revoked one, may take to count: the file is looked at this often."""

_Stamp = tuple[int, int, int]


class KeyWatch:
    """One keys file. `take` is given the valid keys whenever they changed.

    What cannot be read changes nothing: the last good keys stay in force, and `problem` says why. A file that
    appears while the proxy runs puts keys in force; one that goes away does not take them out of force.
    """

    def __init__(self, config: Config, take: Callable[[KeySet], None]) -> None:
        self.path = _path(config)
        self.problem = ""
        self._must_be_there = bool(config.keys_file)
        self._take = take
        self._seen: _Stamp | None = None

    def begin(self) -> None:
        """Read the keys. Raises `InvalidConfig` for a file that cannot be read, or is named and not there."""
        self._seen = self._stamp()
        try:
            self._take(read_keys(self.path).valid())
        except FileNotFoundError as error:
            if self._must_be_there:
                raise _not_there(self.path) from error
        except InvalidKeys as error:
            raise InvalidConfig(f"keys_file: {error}") from error

    def prepared(self, config: Config) -> Callable[[], None]:
        """What follows the file that a configuration names from when it is called on; it cannot fail.

        Raises `InvalidConfig` as `begin` does, for another file than the one that is followed.
        """
        if _path(config) == self.path:
            return lambda: None
        other = KeyWatch(config, self._take)
        try:
            keys: KeySet | None = read_keys(other.path).valid()
        except FileNotFoundError as error:
            if config.keys_file:
                raise _not_there(other.path) from error
            keys = None
        except InvalidKeys as error:
            raise InvalidConfig(f"keys_file: {error}") from error
        seen = other._stamp()

        def follow() -> None:
            self.path, self.problem, self._seen = other.path, "", seen
            if keys is not None:
                self._take(keys)

        return follow

    async def run(self) -> None:
        """Look for changes, for ever."""
        while True:
            await asyncio.sleep(LOOK_SECONDS)
            await self.look()

    async def look(self) -> None:
        """Take the file in if it is another than the one last seen. Never raises for what stands in it."""
        path = self.path
        stamp, content = await asyncio.to_thread(self._changed)
        if stamp == self._seen or path != self.path:
            return
        self._seen = stamp
        if isinstance(content, KeyFile):
            self.problem = ""
            keys = content.valid()
            self._take(keys)
            log.info("keys taken over", file=str(self.path), keys=len(keys.callers))
        else:
            self.problem = f"{content}; the keys read last stay in force"
            log.error("the keys file cannot be used", problem=self.problem)

    def _changed(self) -> tuple[_Stamp | None, KeyFile | str]:
        """The file's stamp, and its content or what is wrong if the stamp is a new one."""
        stamp = self._stamp()
        if stamp == self._seen:
            return stamp, ""
        try:
            return stamp, read_keys(self.path)
        except FileNotFoundError:
            return stamp, f"{self.path} is gone"
        except InvalidKeys as error:
            return stamp, str(error)

    def _stamp(self) -> _Stamp | None:
        """Changes whenever the file does: it is replaced, never written into. None while it is not there."""
        try:
            found = os.stat(self.path)
        except OSError:
            return None
        return found.st_mtime_ns, found.st_size, found.st_ino


def _path(config: Config) -> Path:
    return Path(config.keys_file or DEFAULT_KEYS_FILE)


def _not_there(path: Path) -> InvalidConfig:
    return InvalidConfig(f"keys_file: {path} is not there; make a key with `kvtether keys create`")


def refuse_strangers(config: Config, auth: Authenticator) -> None:
    """Raises `InvalidConfig` where a listener would serve more than this machine to everybody."""
    if not auth.open or config.keyless_network:
        return
    for listener in (config.data, config.admin):
        if not is_loopback(listener.host):
            raise InvalidConfig(
                f"{listener.host}: without API keys only loopback addresses are served; make a key with "
                "`kvtether keys create`, configure api_keys, bind 127.0.0.1, or set keyless_network"
            )


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches the address."""
    return host == "localhost" or (is_address(host) and ip_address(host).is_loopback)


def is_address(host: str) -> bool:
    """Whether it is an IP address, not a name."""
    try:
        ip_address(host)
    except ValueError:
        return False
    return True
