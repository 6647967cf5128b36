"""The proxy of the soak, in enforce, in a process of its own that can be asked what it holds."""

import asyncio
import gc
import os
import signal
from collections.abc import Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import uvloop

from lifecycle.core.ids import Namespace
from lifecycle.ports import Presence
from lifecycle.vocabulary import Mode
from proxy.app import Serving, serving
from proxy.config import Config, Listener, ModelConfig, UpstreamConfig
from proxy.log_output import configure_logging
from tests.lifecycle.fake_cache import BOTH, FakeCache

CHUNK_TOKENS = 64
RETENTION_HOURS = 0.02
"""Long enough for the ledger's reader, short enough that what is kept by design does not look like a leak."""


class SoakCache(FakeCache):
    """A cache whose engine stores every chunk right after it was asked for and not found."""

    async def locate(self, namespace: Namespace, keys: Sequence[bytes]) -> Sequence[Presence]:
        found = await super().locate(namespace, keys)
        self.located.clear()
        for key in keys:
            self.chunks.setdefault(key, BOTH)
        return found


def serve(ready: Connection, engine_url: str, log_url: str, model: str, said: str) -> None:
    """Serve until SIGTERM, logging to the file `said`.

    Sends both URLs; after that it answers every message with what it holds.
    """
    os.dup2(os.open(said, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600), 2)
    configure_logging("info", "json")
    config = Config(
        data=Listener(port=0),
        admin=Listener(port=0),
        upstream=UpstreamConfig(url=engine_url),
        models=(ModelConfig(path=model, name="toy"),),
        mode=Mode.ENFORCE,
        log_url=log_url,
        retention_hours=RETENTION_HOURS,
        keep_recurring_seconds=0.0,
    )
    cache = SoakCache(chunk_size=CHUNK_TOKENS)

    async def run() -> None:
        loop = asyncio.get_running_loop()
        stop = asyncio.Event()
        loop.add_signal_handler(signal.SIGTERM, stop.set)
        async with serving(config, cache) as up:
            await up.runtime.prepared.wait()

            def answer() -> None:
                ready.recv()
                cache.asked.clear()
                cache.tokens.clear()
                ready.send(_held(up, cache))

            loop.add_reader(ready.fileno(), answer)
            ready.send((up.data_url, up.admin_url))
            await stop.wait()
            loop.remove_reader(ready.fileno())

    uvloop.run(run())


def _held(up: Serving, cache: FakeCache) -> dict[str, Any]:
    runtime = up.runtime
    states = list(runtime.tracker.contexts.states.values())
    gc.collect()
    return {
        "open contexts": sum(state.open for state in states),
        "names": [
            f"{state.key.context_id}: attempts {dict(state.attempts)}, in flight {len(state.flights)}"
            for state in states
            if state.open
        ][:5],
        "contexts in the books": len(states),
        "pins": sum(len(state.pins) for state in states),
        "holds in the cache": len(cache.holds),
        "calls under way": sum(runtime.limits.calls().values()),
        "observations that wait": int(bool(runtime.tracker.degraded)),
        "tasks": len(asyncio.all_tasks()),
        "files and sockets": len(os.listdir("/proc/self/fd")),
        "memory MiB": _resident_mib(),
        "live chunks in the cache": len(cache.chunks),
    }


def _resident_mib() -> float:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) / 1024 for line in lines if line.startswith("VmRSS:"))
