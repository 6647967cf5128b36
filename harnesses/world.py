"""The scripted model with the proxy before it, in enforce and in this process, and what it recorded."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import httpx

from engine_bridge.drivers.sim import SimCache
from harnesses.checks import Leftovers
from harnesses.conversation import CHAT
from harnesses.engine import MODEL_NAME
from harnesses.model_server import ModelServer, scripted_model
from lifecycle.core.events import CallMapped, RecordedEvent
from lifecycle.core.ids import Namespace
from lifecycle.core.observations import Tick
from lifecycle.vocabulary import LIFECYCLE_HEADER, Mode
from proxy.app import Serving, serving
from proxy.config import AdminListener, CacheConfig, Config, Listener, ModelConfig, UpstreamConfig

READY_SECONDS = 60.0
SETTLE_SECONDS = 20.0
POLL_SECONDS = 0.1
RETRY_SECONDS = 40.0
QUIET_POLLS = 8
"""All is at rest if so many looks in a row see no directive under way, no event come, and no chunk leave."""

OWNED = {"VERIFIED", "OURS"}


class World:
    """A proxy that is up before the model. `heard` are its events, in order."""

    def __init__(self, up: Serving, model: ModelServer) -> None:
        self.up = up
        self.model = model
        self.heard: list[RecordedEvent] = []
        self._news = asyncio.Event()
        up.runtime.tracker.listeners.append(self._hear)

    def _hear(self, batch: Sequence[RecordedEvent]) -> None:
        self.heard += batch
        self._news.set()

    @property
    def namespace(self) -> Namespace:
        return self.up.runtime.tracking.namespace(MODEL_NAME, "")

    async def warm_up(self) -> None:
        """Have one call mapped, whose process for renders takes seconds to start, and forget it: what is
        measured is a proxy that has been up for a while."""
        body = {"model": MODEL_NAME, "messages": [{"role": "user", "content": "Hello"}]}
        headers = {LIFECYCLE_HEADER: 'ctx="warm-up", close'}
        async with httpx.AsyncClient(trust_env=False, timeout=READY_SECONDS) as http:
            (await http.post(f"{self.up.data_url}{CHAT}", json=body, headers=headers)).raise_for_status()
        async with asyncio.timeout(READY_SECONDS):
            while not any(isinstance(each.event, CallMapped) for each in self.heard):
                self._news.clear()
                await self._news.wait()
        await self.settle()
        self.heard.clear()
        self.model.exchanges.clear()

    async def settle(self) -> bool:
        """Until nothing more happens; whether that came within the time."""
        index = self.up.runtime.tracker.contexts.index
        quiet, before = 0, (-1, -1)
        for _ in range(int(SETTLE_SECONDS / POLL_SECONDS)):
            now = len(self.model.engine.left()), len(self.heard)
            quiet = quiet + 1 if now == before and not index.open_directives() else 0
            if quiet == QUIET_POLLS:
                return True
            before = now
            await asyncio.sleep(POLL_SECONDS)
        return False

    async def retried(self) -> None:
        """Until no chunk is left that nothing refers to, or one that was left alone for a while, because the
        last directive about it came to nothing, has been asked for again."""
        for _ in range(int(RETRY_SECONDS / POLL_SECONDS)):
            if not self.leftovers().unreferenced:
                break
            await asyncio.sleep(POLL_SECONDS)

    async def let_pass(self, seconds: float) -> None:
        """Let every context see that so much time has passed in which nothing came."""
        tracker = self.up.runtime.tracker
        at_ns = tracker.clock.now_ns() + int(seconds * 1e9)
        for uid in [uid for uid, state in tracker.contexts.states.items() if state.open]:
            await tracker.observe(uid, Tick(at_ns=at_ns))

    def leftovers(self) -> Leftovers:
        """What lies in the cache, by what the proxy's books say of it."""
        index = self.up.runtime.tracker.contexts.index
        found = Leftovers(set(), set(), set())
        for key in self.model.engine.left():
            described = index.describe(self.namespace, key)
            if described is not None and described.references:
                found.referred.add(key)
            elif described is not None and set(described.flags) >= OWNED:
                found.unreferenced.add(key)
            else:
                found.unproven.add(key)
        return found


@asynccontextmanager
async def proxied_model(folder: Path, record: Path | None = None) -> AsyncIterator[World]:
    """Model and proxy, ready to control the cache. What is dead is freed at once: nothing dead is kept for
    agents that may begin alike."""
    async with scripted_model(record) as model:
        engine = model.engine
        config = Config(
            data=Listener(port=0),
            admin=AdminListener(port=0),
            upstream=UpstreamConfig(url=model.url),
            models=(ModelConfig(path=str(engine.model_path), name=MODEL_NAME),),
            cache=CacheConfig(
                events_endpoint=engine.events.endpoint, replay_endpoint=engine.events.replay_endpoint
            ),
            mode=Mode.ENFORCE,
            log_url=f"sqlite:///{folder / 'kvtether.db'}",
            plan_wait_seconds=1.0,
            keep_recurring_seconds=0.0,
        )
        async with serving(config, SimCache(engine.runner, MODEL_NAME)) as up:
            async with asyncio.timeout(READY_SECONDS):
                await up.runtime.prepared.wait()
            if not up.runtime.self_test.ok:
                raise RuntimeError(f"the proxy cannot control the cache: {up.runtime.problems}")
            world = World(up, model)
            await world.warm_up()
            yield world
