"""A child process with a log file: starts in a group of its own, is polled for health, is stopped whole."""

import asyncio
import contextlib
import os
import signal
import socket
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

import httpx

TAIL_BYTES = 3000
POLL_SECONDS = 0.2
STOP_SECONDS = 20.0
DYING_POLL_SECONDS = 0.01
DYING_SECONDS = 10.0
"""Longest wait for what was ended by SIGKILL: only the kernel can keep it then."""

SHARED_MEMORY = Path("/dev/shm")
SEGMENT_PREFIX = "lmcache_kv_"


class StackError(RuntimeError):
    """A process of the stack died or did not become ready; the message carries the end of its log."""


def free_ports(count: int) -> list[int]:
    """Loopback TCP ports nobody listens on now. All are held at once, so they differ."""
    sockets = [socket.socket() for _ in range(count)]
    try:
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]
    finally:
        for each in sockets:
            each.close()


def session_members(session: int) -> list[int]:
    """Process ids of a session that still run; empty where there is no /proc to tell."""
    members = []
    for entry in Path("/proc").glob("[0-9]*/stat"):
        try:
            # The name in brackets may hold anything; behind it come state, parent, group and session.
            fields = entry.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if int(fields[3]) == session and fields[0] not in "ZX":
            members.append(int(entry.parent.name))
    return members


async def _until_none_runs(session: int) -> None:
    """The leader is reaped before its children have died, and who starts it again must not meet them."""
    for _ in range(int(DYING_SECONDS / DYING_POLL_SECONDS)):
        if not session_members(session):
            return
        await asyncio.sleep(DYING_POLL_SECONDS)


def _unlink_segments(pids: Sequence[int]) -> None:
    for pid in pids:
        for segment in SHARED_MEMORY.glob(f"{SEGMENT_PREFIX}{pid}_*"):
            segment.unlink(missing_ok=True)


class Process:
    """One server of the stack. `health_url` answers 200 once it is ready."""

    def __init__(
        self, name: str, command: Sequence[str], environment: Mapping[str, str], log: Path, health_url: str
    ) -> None:
        self.name = name
        self.log = log
        self._command = list(command)
        self._environment = dict(environment)
        self._health_url = health_url
        self._child: subprocess.Popen[bytes] | None = None

    @property
    def pid(self) -> int | None:
        return None if self._child is None else self._child.pid

    def is_alive(self) -> bool:
        return self._child is not None and self._child.poll() is None

    def start(self) -> None:
        """Start the child as the leader of a new process group; its output is appended to the log."""
        with self.log.open("ab") as log:
            self._child = subprocess.Popen(
                self._command,
                env={**os.environ, **self._environment},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                cwd=self.log.parent,
                start_new_session=True,
            )

    async def wait_ready(self, seconds: float) -> None:
        """Poll the health endpoint. Raises `StackError` when the child dies or the time is over."""
        deadline = asyncio.get_running_loop().time() + seconds
        async with httpx.AsyncClient(timeout=5.0, trust_env=False) as client:
            while True:
                if not self.is_alive():
                    code = None if self._child is None else self._child.returncode
                    raise StackError(f"{self.name} ended with code {code}; its log ends:\n{self.tail()}")
                try:
                    if (await client.get(self._health_url)).status_code == 200:
                        return
                except httpx.HTTPError:
                    pass  # nobody listens yet
                if asyncio.get_running_loop().time() > deadline:
                    raise StackError(
                        f"{self.name} is not ready after {seconds:.0f} s; its log ends:\n{self.tail()}"
                    )
                await asyncio.sleep(POLL_SECONDS)

    async def stop(self) -> None:
        """End the whole group: politely, then by force. Twice changes nothing.

        Shared memory that LMCache's connector named after one of its processes is given back too: nobody
        unlinks it when the engine is ended by a signal, and it is as large as the engine's KV cache.
        """
        child, self._child = self._child, None
        if child is None:
            return
        members = session_members(child.pid)
        try:
            await self._end(child)
        finally:
            _unlink_segments(members)

    async def kill(self) -> None:
        """End the whole group as a crash would: at once, with nobody asked."""
        child, self._child = self._child, None
        if child is None:
            return
        members = session_members(child.pid)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)
        await asyncio.to_thread(child.wait)
        await _until_none_runs(child.pid)
        _unlink_segments(members)

    async def _end(self, child: "subprocess.Popen[bytes]") -> None:
        for signal_number in (signal.SIGTERM, signal.SIGKILL):
            try:
                os.killpg(child.pid, signal_number)
            except ProcessLookupError:
                break
            try:
                await asyncio.to_thread(child.wait, STOP_SECONDS)
            except subprocess.TimeoutExpired:
                continue
            # The leader ended; what it left of its group gets no second chance.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(child.pid, signal.SIGKILL)
            await _until_none_runs(child.pid)
            return

    def tail(self) -> str:
        """The end of the log, for people."""
        if not self.log.exists():
            return "(no log)"
        with self.log.open("rb") as log:
            log.seek(0, os.SEEK_END)
            log.seek(max(0, log.tell() - TAIL_BYTES))
            return log.read().decode(errors="replace")
