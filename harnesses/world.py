"""The scripted model with the proxy before it, in enforce and in this process, and what it recorded."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

from engine_bridge.drivers.sim import SimCache
from harnesses.engine import MODEL_NAME
from harnesses.model_server import ModelServer, scripted_model
from lifecycle.core.events import RecordedEvent
from lifecycle.core.ids import Namespace
from lifecycle.core.observations import Tick
from lifecycle.vocabulary import Mode
from proxy.app import Serving, serving
from proxy.config import AdminListener, CacheConfig, Config, Listener, ModelConfig, UpstreamConfig

READY_SECONDS = 60.0
SETTLE_SECONDS = 20.0
POLL_SECONDS = 0.1
QUIET_POLLS = 8
"""The cache has come to rest if so many looks in a row see no directive under way and no chunk leave."""

OWNED = {"VERIFIED", "OURS"}


class World:
    """A proxy that is up before the model. `heard` are its events, in order."""

    def __init__(self, up: Serving, model: ModelServer) -> None:
        self.up = up
        self.model = model
        self.heard: list[RecordedEvent] = []
        up.runtime.tracker.listeners.append(self._hear)

    def _hear(self, batch: Sequence[RecordedEvent]) -> None:
        self.heard += batch

    @property
    def namespace(self) -> Namespace:
        return self.up.runtime.tracking.namespace(MODEL_NAME, "")

    async def settle(self) -> bool:
        """Until nothing more is freed; whether that came within the time."""
        index = self.up.runtime.tracker.contexts.index
        quiet, before = 0, -1
        for _ in range(int(SETTLE_SECONDS / POLL_SECONDS)):
            left = len(self.model.engine.left())
            quiet = quiet + 1 if left == before and not index.open_directives() else 0
            if quiet == QUIET_POLLS:
                return True
            before = left
            await asyncio.sleep(POLL_SECONDS)
        return False

    async def let_pass(self, seconds: float) -> None:
        """Let every context see that so much time has passed in which nothing came."""
        tracker = self.up.runtime.tracker
        at_ns = tracker.clock.now_ns() + int(seconds * 1e9)
        for uid in [uid for uid, state in tracker.contexts.states.items() if state.open]:
            await tracker.observe(uid, Tick(at_ns=at_ns))

    def unreferenced(self) -> set[bytes]:
        """Chunks that lie in the cache, are proven to be ours, and that no context refers to."""
        index = self.up.runtime.tracker.contexts.index
        found = set()
        for key in self.model.engine.left():
            described = index.describe(self.namespace, key)
            if described is not None and not described.references and set(described.flags) >= OWNED:
                found.add(key)
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
            yield World(up, model)
