"""Proxies in processes of their own on one log, ended by signals, behind one address, as a test tool."""

import asyncio
import logging
import os
import signal
from contextlib import suppress
from functools import partial
from multiprocessing.connection import Connection
from typing import Any

import httpx
import structlog

from lifecycle.store.opening import OpenLog, open_log
from lifecycle.tracker import Tracker
from proxy.app import serving
from proxy.config import Config
from tests.proxy.crash_process import FORKS, SECONDS, FarCache, FarDriver, Steps

LOOK_SECONDS = 0.05


def run(config: Config, cache_port: int, pipe: Connection, lease_seconds: float) -> None:
    """The process: serves until SIGTERM, then drains as the command does, and ends with status 0."""
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.ERROR))
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    asyncio.run(_run(config, cache_port, pipe, lease_seconds))


async def _run(config: Config, cache_port: int, pipe: Connection, lease_seconds: float) -> None:
    async def opener(url: str) -> OpenLog:
        opened = await open_log(url)
        if not url.startswith("redis:"):
            return opened
        join: Any = partial(opened.join, lease_seconds=lease_seconds)
        return opened._replace(join=join)

    told = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, told.set)
    tracker: list[Tracker] = []
    driver = FarDriver(FarCache(cache_port, Steps(pipe)), lambda: tracker[0].contexts.position)
    async with serving(config, driver, opener) as up:
        tracker.append(up.runtime.tracker)
        await up.runtime.prepared.wait()
        pipe.send((up.data_url, up.admin_url))
        await told.wait()
        await up.drain(at_once=False)


class ProxyProcess:
    """One process, from its start to its end."""

    def __init__(self, config: Config, cache_port: int, lease_seconds: float) -> None:
        self.pipe, theirs = FORKS.Pipe()
        self.process = FORKS.Process(target=run, args=(config, cache_port, theirs, lease_seconds))
        self.process.start()
        theirs.close()
        self.data_url = self.admin_url = ""

    async def up(self) -> None:
        """Until it serves."""
        ready = await asyncio.to_thread(self.pipe.poll, SECONDS)
        assert ready, "the proxy does not start"
        self.data_url, self.admin_url = self.pipe.recv()

    async def ended(self, number: signal.Signals) -> int | None:
        """Its status, after a signal."""
        assert self.process.pid is not None
        with suppress(ProcessLookupError):
            os.kill(self.process.pid, number)
        await asyncio.to_thread(self.process.join, SECONDS)
        self.pipe.close()
        return self.process.exitcode

    async def ready(self, http: httpx.AsyncClient) -> dict[str, Any]:
        return await readiness(self.admin_url, http)


async def readiness(admin_url: str, http: httpx.AsyncClient) -> dict[str, Any]:
    """What `/readyz` says; empty if the proxy is not ready."""
    try:
        answer = await http.get(f"{admin_url}/readyz")
    except httpx.TransportError:
        return {}
    return dict(answer.json()) if answer.status_code == 200 else {}


class Balancer:
    """One address for several proxies: connections go in turns to those that said last that they are ready.

    A proxy that does not take a connection is passed over. Bytes are not looked at.
    """

    def __init__(self) -> None:
        self.proxies: list[ProxyProcess] = []
        self.ready: list[ProxyProcess] = []
        self.http = httpx.AsyncClient(timeout=SECONDS)
        self._turn = 0
        self._tasks: set[asyncio.Task[None]] = set()
        self.url = ""

    async def __aenter__(self) -> "Balancer":
        self._server = await asyncio.start_server(self._take, "127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"
        self._looking = asyncio.ensure_future(self._look())
        return self

    async def __aexit__(self, *_exc: object) -> None:
        self._looking.cancel()
        self._server.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(self._looking, *self._tasks, return_exceptions=True)
        await self.http.aclose()

    async def _look(self) -> None:
        while True:
            proxies = list(self.proxies)
            said = await asyncio.gather(*(p.ready(self.http) for p in proxies))
            self.ready = [p for p, told in zip(proxies, said, strict=True) if told]
            await asyncio.sleep(LOOK_SECONDS)

    async def _take(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        for _ in range(100):
            for _ in range(len(self.ready)):
                self._turn += 1
                chosen = self.ready[self._turn % len(self.ready)]
                host, port = chosen.data_url.removeprefix("http://").split(":")
                try:
                    there = await asyncio.open_connection(host, int(port))
                except OSError:
                    continue
                for source, sink in ((reader, there[1]), (there[0], writer)):
                    task = asyncio.ensure_future(_pass_on(source, sink))
                    self._tasks.add(task)
                    task.add_done_callback(self._tasks.discard)
                return
            await asyncio.sleep(LOOK_SECONDS)
        writer.close()


async def _pass_on(source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
    try:
        with suppress(ConnectionError):
            while data := await source.read(1 << 16):
                sink.write(data)
                await sink.drain()
    finally:
        sink.close()
    with suppress(ConnectionError):
        await sink.wait_closed()
