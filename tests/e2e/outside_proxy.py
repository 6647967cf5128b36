"""A proxy in a process of its own, before the stack, as a test tool."""

import json
import sys
from itertools import count
from pathlib import Path
from typing import Any

import httpx
import msgspec
import openai

from engine_bridge.stack.processes import Process, free_ports
from lifecycle.core.events import ChunksConfirmed
from lifecycle.core.ids import split_keys
from lifecycle.store.opening import open_log
from proxy.config import Listener
from tests.e2e.agent import Agent, config_for, prose
from tests.e2e.engine_cache import Cache
from tests.e2e.polling import SECONDS, polled
from tests.e2e.talking_agents import Talk, on_disk


class Outside:
    """A proxy in a process of its own, before the stack; stands in for a `World` where agents talk."""

    def __init__(self, cache: Cache, folder: Path, **changes: Any) -> None:
        self.cache = cache
        self.folder = folder
        ports = free_ports(2)
        config = config_for(cache.stack, folder, **changes)
        self.log_url = config.log_url
        self.config = msgspec.structs.replace(
            config, data=Listener(port=ports[0]), admin=Listener(port=ports[1])
        )
        self.data_url, self.admin_url = (f"http://127.0.0.1:{port}" for port in ports)
        file = folder / "kvtether.yaml"
        file.write_text(json.dumps(msgspec.to_builtins(self.config)))
        command = [sys.executable, "-c", "from proxy.cli import main; main()", "serve", "--config", str(file)]
        environment = {"PYTHONPATH": str(Path(__file__).parents[2])}
        self.process = Process(
            "proxy", command, environment, folder / "proxy.log", f"{self.admin_url}/readyz"
        )
        self.http = httpx.AsyncClient(timeout=120.0, trust_env=False)
        self.client = openai.AsyncOpenAI(
            base_url=f"{self.data_url}/v1",
            api_key="any",
            max_retries=0,
            http_client=openai.DefaultAsyncHttpxClient(trust_env=False),
        )
        self._ids = count(1)

    def agent(self, name: str) -> Agent:
        system = {"role": "system", "content": prose(70)}
        return Agent(self, f"outside:{name}-{next(self._ids)}", [system], [])  # type: ignore[arg-type]

    def explained(self, keys: list[bytes]) -> str:
        return f"log in {self.log_url}"

    async def start(self) -> None:
        self.process.start()
        await self.process.wait_ready(SECONDS)

        async def ready() -> bool:
            return (await self.http.get(f"{self.admin_url}/readyz")).json()["problems"] == []

        await polled(ready)

    async def close(self) -> None:
        await self.process.stop()
        await self.client.close()
        await self.http.aclose()


async def nothing_proven_is_left(outside: Outside, talk: Talk) -> bool:
    """Whether all that was proven to be ours is gone. What was computed when a proxy died may never be,
    and what is not proven is not touched."""
    event_log = (await open_log(outside.log_url)).event_log
    stored = [
        r.event.keys
        async for r in event_log.read_all()
        if isinstance(r.event, ChunksConfirmed) and r.event.stored
    ]
    await event_log.close()
    proven = list({key for keys in stored for key in split_keys(keys)} & set(talk.keys))
    shown = await outside.cache.where(proven)
    return len(proven) > 0 and not any(shown) and not on_disk(outside.cache.stack, proven)
