"""The whole proxy over real sockets, in front of an engine and a cache that are toys, as a test tool."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from lifecycle.core.events import Event, RecordedEvent
from lifecycle.core.ids import ContextKey
from lifecycle.core.state import ContextState
from lifecycle.ports import CacheControl
from lifecycle.store.opening import open_log
from lifecycle.vocabulary import Mode
from proxy.app import Serving, serving
from proxy.config import CacheConfig, Config, Listener, ModelConfig, UpstreamConfig
from proxy.following import LogOpener
from proxy.runtime import Runtime
from tests.lifecycle.fake_cache import FakeCache
from tests.proxy.scripted_upstream import Script, ScriptedUpstream
from tests.proxy.toy_model import CHUNK, NAME, ToyEngine, write_model

SECONDS = 20.0
"""Bound of every wait."""

CHAT = "/v1/chat/completions"
Message = dict[str, str]


def user(text: str) -> Message:
    return {"role": "user", "content": text}


def system(text: str) -> Message:
    return {"role": "system", "content": text}


def assistant(text: str) -> Message:
    return {"role": "assistant", "content": text}


def lifecycle(**fields: object) -> dict[str, str]:
    """The header: strings quoted, booleans and numbers bare."""
    parts = []
    for name, value in fields.items():
        if value is True:
            parts.append(name)
        else:
            parts.append(f'{name}="{value}"' if isinstance(value, str) else f"{name}={value}")
    return {"x-kv-lifecycle": ", ".join(parts)}


@dataclass
class Whole:
    """A proxy that is up, its engine, and clients of both listeners."""

    up: Serving
    engine: ScriptedUpstream
    toy: ToyEngine
    cache: FakeCache
    data: httpx.AsyncClient
    admin: httpx.AsyncClient

    @property
    def runtime(self) -> Runtime:
        return self.up.runtime

    async def chat(
        self, messages: list[Message], headers: Mapping[str, str] | None = None, **fields: object
    ) -> httpx.Response:
        """One chat call, and its end recorded."""
        body = {"model": NAME, "messages": messages, **fields}
        answer = await self.data.post(CHAT, content=json.dumps(body), headers=headers)
        await self.runtime.mailboxes.settled()
        return answer

    async def ops(self, *ops: Mapping[str, object], source: str = "s") -> list[dict[str, Any]]:
        answer = await self.data.post("/kv/v1/ops", json={"source": source, "ops": list(ops)})
        assert answer.status_code == 200, answer.text
        results: list[dict[str, Any]] = answer.json()["results"]
        return results

    async def ops_as(self, tenant: str, *ops: Mapping[str, object]) -> None:
        """Operations under the tenant's key, all of them applied."""
        headers = {"authorization": f"Bearer secret-{tenant}"}
        body = {"source": "s", "ops": list(ops)}
        answer = await self.data.post("/kv/v1/ops", json=body, headers=headers)
        assert {r["status"] for r in answer.json()["results"]} == {"applied"}, answer.text

    def context(self, name: str, tenant: str = "default") -> ContextState:
        state = self.runtime.tracker.contexts.latest(ContextKey(tenant, name))
        assert state is not None, f"no context {name}"
        return state

    async def until(self, holds: Callable[[], bool]) -> None:
        """Wait for something to become true, by events as they are recorded."""
        heard = asyncio.Event()

        def listen(batch: object) -> None:
            heard.set()

        self.runtime.tracker.listeners.append(listen)
        try:
            async with asyncio.timeout(SECONDS):
                while not holds():
                    heard.clear()
                    await heard.wait()
        finally:
            self.runtime.tracker.listeners.remove(listen)

    def patience(self) -> asyncio.Timeout:
        """The bound of a wait for what no event tells."""
        return asyncio.timeout(SECONDS)

    async def events(self, *kinds: type[Event]) -> list[Any]:
        """What the log holds of these kinds, in order."""
        return [r.event for r in await self.recorded() if isinstance(r.event, kinds)]

    async def recorded(self) -> list[RecordedEvent]:
        return [r async for r in self.runtime.event_log.read_all()]


def port_of(it: Whole) -> int:
    return int(it.up.data_url.rpartition(":")[2])


def sent(it: Whole) -> dict[str, Any]:
    """The last body that the engine got."""
    body: dict[str, Any] = json.loads(it.toy.bodies[-1])
    return body


def configured(tmp_path: Path, url: str, mode: Mode = Mode.ENFORCE, **changes: Any) -> Config:
    """A configuration on free ports, with the toy model and a log in memory."""
    fields: dict[str, Any] = {
        "data": Listener(port=0),
        "admin": Listener(port=0),
        "upstream": UpstreamConfig(url=url),
        "models": (ModelConfig(path=str(write_model(tmp_path / "model")), name=NAME),),
        "cache": CacheConfig(chunk_size=CHUNK),
        "mode": mode,
        "log_url": "memory:",
        "plan_wait_seconds": 1.0,
        "keep_recurring_seconds": 0.0,
        **changes,
    }
    return Config(**fields)


@asynccontextmanager
async def whole_proxy(
    tmp_path: Path,
    mode: Mode = Mode.ENFORCE,
    *,
    script: Script | None = None,
    cache: FakeCache | None = None,
    control: CacheControl | None = None,
    ready: bool = True,
    opener: LogOpener = open_log,
    socket: Path | None = None,
    **changes: Any,
) -> AsyncIterator[Whole]:
    """Everything up. `script` stands in for the toy engine's own; `control` for the cache's door; the engine
    listens on `socket`, if there is one."""
    cache = cache or FakeCache(chunk_size=CHUNK)
    toy = ToyEngine(cache)
    async with ScriptedUpstream(script or toy.script, socket) as engine:
        config = configured(tmp_path, engine.url, mode, **changes)
        async with serving(config, control or cache, opener) as up:
            toy.report = up.runtime.blocks.take
            up.runtime.blocks.live = True
            async with (
                httpx.AsyncClient(base_url=up.data_url, timeout=SECONDS) as data,
                httpx.AsyncClient(base_url=up.admin_url, timeout=SECONDS) as admin,
            ):
                it = Whole(up, engine, toy, cache, data, admin)
                if ready:
                    async with asyncio.timeout(SECONDS):
                        await up.runtime.prepared.wait()
                yield it
