"""The whole proxy in front of several toy engines that share one toy cache, as a test tool."""

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from lifecycle.vocabulary import Mode
from proxy.app import Serving, serving
from proxy.config import BackendConfig, UpstreamConfig
from proxy.runtime import Runtime
from tests.e2e.polling import polled
from tests.lifecycle.fake_cache import FakeCache
from tests.proxy.scripted_upstream import Exchange, ScriptedUpstream
from tests.proxy.toy_model import CHUNK, NAME, ToyEngine
from tests.proxy.whole_proxy import SECONDS, Message, Whole, configured


class Engine(ScriptedUpstream):
    """A toy engine that may be stopped as a crash would, started again on its port, and told to be ill."""

    def __init__(self, name: str, cache: FakeCache) -> None:
        super().__init__(self.answer)
        self.name = name
        self.toy = ToyEngine(cache)
        self.health = 200
        self.fails = False
        self.models = [NAME]
        self._port = 0

    async def answer(self, exchange: Exchange) -> None:
        path = exchange.target.partition(b"?")[0]
        if path == b"/health":
            await exchange.read_body()
            await exchange.respond(self.health)
        elif path == b"/v1/models":
            await exchange.read_body()
            entries = [{"id": name, "owned_by": self.name} for name in self.models]
            await exchange.respond_json({"object": "list", "data": entries})
        elif self.fails and exchange.method == "POST":
            await exchange.read_body()
            await exchange.respond(500, b"{}")
        else:
            await self.toy.script(exchange)

    async def kill(self) -> None:
        """End it with everything under way on it."""
        self._port = self.port
        await self.__aexit__(None, None, None)

    async def revive(self) -> None:
        """Start it again where it was; its memory is empty."""
        self.toy.blocks.clear()
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", self._port, limit=2**20)

    def calls(self) -> list[Exchange]:
        """The inference that came here."""
        return [each for each in self.exchanges if each.method == "POST" and each.target != b"/tokenize"]


@dataclass
class Several(Whole):
    """A proxy before several engines. `engine` and `toy` are the first one's."""

    engines: Mapping[str, Engine]

    def backend(self, name: str) -> Any:
        return self.runtime.backends.find(name)

    async def served(self, messages: list[Message], headers: Mapping[str, str] | None = None) -> str:
        """Which engine answered a chat call."""
        answer = await self.chat(messages, headers)
        assert answer.status_code == 200, answer.text
        return answer.headers["x-kv-backend"]

    async def until_seen(self, holds: Callable[[], bool]) -> None:
        """Wait for something of which no event tells."""

        async def held() -> bool:
            return holds()

        await polled(held, 0.01)


@asynccontextmanager
async def several_engines(
    tmp_path: Path,
    names: Sequence[str] = ("a", "b"),
    mode: Mode = Mode.ENFORCE,
    *,
    cache: FakeCache | None = None,
    mapped: bool = False,
    upstreams: Sequence[dict[str, Any]] = (),
    **changes: Any,
) -> AsyncIterator[Several]:
    """Everything up, and every engine known to be well. Models have tokens only if `mapped`."""
    cache = cache or FakeCache(chunk_size=CHUNK)
    async with AsyncExitStack() as stack:
        engines = {name: await stack.enter_async_context(Engine(name, cache)) for name in names}
        told = upstreams or [{} for _ in names]
        backends = tuple(
            BackendConfig(name=name, url=engine.url, **more)
            for (name, engine), more in zip(engines.items(), told, strict=True)
        )
        if not mapped:
            changes["models"] = ()
        config = configured(tmp_path, "", mode, upstream=UpstreamConfig(), upstreams=backends, **changes)
        up: Serving = await stack.enter_async_context(serving(config, cache))
        runtime: Runtime = up.runtime
        for engine in engines.values():
            engine.toy.report = runtime.blocks.take
        runtime.blocks.live = True
        clients = [httpx.AsyncClient(base_url=url, timeout=SECONDS) for url in (up.data_url, up.admin_url)]
        data, admin = [await stack.enter_async_context(client) for client in clients]
        first = engines[names[0]]
        it = Several(up, first, first.toy, cache, data, admin, engines)
        await it.until_seen(lambda: runtime.prepared.is_set())
        if len(names) > 1:
            await it.until_seen(lambda: all(b.models is not None for b in runtime.backends.all))
        yield it
