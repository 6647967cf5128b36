"""The proxy of the soak, in enforce, in a process of its own that can be asked what it holds."""

import asyncio
import gc
import os
import signal
import time
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import uvloop

from lifecycle.core.directives import Directive, DirectiveResult
from lifecycle.core.ids import Namespace, split_keys
from lifecycle.ports import Presence
from lifecycle.vocabulary import Mode
from proxy.app import Serving, serving
from proxy.config import Config, HarmConfig, Listener, ModelConfig, UpstreamConfig
from proxy.log_output import configure_logging
from proxy.malloc_arenas import bound_arenas
from tests.lifecycle.fake_cache import BOTH
from tests.proxy.holding_cache import HoldingCache

CHUNK_TOKENS = 1024
"""Large ones: the toy computes prompts faster than any engine, and what dies must be freed before its context
is forgotten."""

RETENTION_HOURS = 0.02
"""Long enough for the ledger's reader, short enough that what is kept by design does not look like a leak."""


FORGOTTEN_SECONDS = 150.0
"""What was freed is asked for again for two minutes."""


class SoakCache(HoldingCache):
    """A cache whose engine stores every chunk right after it was asked for the first time and not found."""

    def __init__(self) -> None:
        super().__init__({}, CHUNK_TOKENS)
        self._freed: dict[bytes, float] = {}

    async def locate(self, namespace: Namespace, keys: Sequence[bytes]) -> Sequence[Presence]:
        found = await super().locate(namespace, keys)
        self.located.clear()
        for key in keys:
            if key not in self._freed:
                self.chunks.setdefault(key, BOTH)
        return found

    async def execute(
        self,
        directive: Directive,
        still_dead: Callable[[bytes], bool],
        token_ids: Callable[[], Sequence[int] | None],
    ) -> DirectiveResult:
        result = await super().execute(directive, still_dead, token_ids)
        now = time.monotonic()
        self._freed |= dict.fromkeys(split_keys(result.gone), now)
        while self._freed and next(iter(self._freed.values())) < now - FORGOTTEN_SECONDS:
            del self._freed[next(iter(self._freed))]
        return result


def serve(ready: Connection, engine_url: str, log_url: str, model: str, said: str) -> None:
    """Serve until SIGTERM, logging to the file `said`.

    Sends both URLs; after that it answers every message with what it holds.
    """
    os.dup2(os.open(said, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600), 2)
    configure_logging("info", "json")
    bound_arenas()
    config = Config(
        data=Listener(port=0),
        admin=Listener(port=0),
        upstream=UpstreamConfig(url=engine_url),
        models=(ModelConfig(path=model, name="toy"),),
        mode=Mode.ENFORCE,
        harm=HarmConfig(share=1.0),  # clients that hang up need again what that freed
        log_url=log_url,
        retention_hours=RETENTION_HOURS,
        keep_recurring_seconds=0.0,
    )
    cache = SoakCache()

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


def _held(up: Serving, cache: SoakCache) -> dict[str, Any]:
    runtime = up.runtime
    states = list(runtime.tracker.contexts.states.values())
    gc.collect()
    return {
        "open contexts": sum(state.open for state in states),
        "names": [state.key.context_id for state in states if state.open],
        "contexts in the books": len(states),
        "pins": sum(len(state.pins) for state in states),
        "holds in the cache": len(cache.far),
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
