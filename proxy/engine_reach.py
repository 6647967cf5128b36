"""How control begins: engines and cache are asked until both told what must be known, and proved it.

Of several engines one that is away does not stand in the way of the others. It is proven when it is back.
"""

import asyncio
from collections.abc import Sequence
from contextlib import suppress

import structlog

from engine_bridge.mapping.backlog import MappingBacklog
from engine_bridge.mapping.model_profile import ModelProfile
from lifecycle.ports import CacheControl, SelfTest
from proxy.backends import Backend, Backends
from proxy.config import Config
from proxy.models import (
    EngineIdentity,
    EngineUnreached,
    MappedModel,
    ask_engine,
    load_profile,
    map_models,
    not_reached,
    plain_ids,
)
from proxy.modes import Modes

log = structlog.get_logger(__name__)

DEFAULT_CHUNK_TOKENS = 256

ASK_AGAIN_SECONDS = 3.0
"""Pause between attempts to reach the engine and to pass the self-test: both may start after us."""

MAX_ASK_AGAIN_SECONDS = 60.0
"""Longest pause: each self-test that fails makes the next one rarer, for it costs the engine two calls."""


class EngineReach:
    """What engines and cache told: which models are mapped and how, and whether the cache may be touched.

    `prepared` is set when an engine was reached, the self-test has run, and models are mapped or never can
    be. `cache` must be set before `run`: its driver needs our tokenizer.
    """

    def __init__(self, config: Config, backends: Backends, modes: Modes) -> None:
        self.prepared = asyncio.Event()
        self.models = {m.name: not_reached(m.name, self.prepared) for m in config.models}
        self.self_test = SelfTest(ok=False, problems=("the self-test has not run yet",))
        self.cache: CacheControl | None = None
        self.warnings: tuple[str, ...] = ()
        self.mapping_backlog = MappingBacklog()
        self._config = config
        self._backends = backends
        self._changed = asyncio.Event()
        backends.found.append(lambda backend: self._changed.set())
        self._modes = modes
        self._profiles: dict[str, ModelProfile] = {}

    async def run(self) -> None:
        """Ask engines and cache until both told what we must know, then prove it; again while it fails.

        It ends with the proof, unless there are several engines: one that comes back is proven, too.
        """
        pause = ASK_AGAIN_SECONDS
        while True:
            self._changed.clear()
            proven = False
            with suppress(EngineUnreached):
                proven = await self._prepare() and not self._modes.observe_only
                pause = ASK_AGAIN_SECONDS if proven else min(2 * pause, MAX_ASK_AGAIN_SECONDS)
            if proven and not self._backends.several:
                return
            with suppress(TimeoutError):
                async with asyncio.timeout(None if proven else pause):
                    await self._changed.wait()

    async def _prepare(self) -> bool:
        """Ask everybody once; whether the cache is proven, or there is none. Raises `EngineUnreached`."""
        assert self.cache is not None
        reached, away = await self._ask_engines()
        engine = next(iter(reached.values()))
        served = {backend.address: identity.models for backend, identity in reached.items()}
        if not self._profiles:
            for model in self._config.models:
                loaded = await asyncio.to_thread(load_profile, model, engine)
                self.models.pop(model.name, None)
                if isinstance(loaded, MappedModel):
                    self.models[loaded.name] = loaded
                else:
                    self._profiles[loaded.name] = loaded
                    self.models[loaded.name] = not_reached(loaded.name, self.prepared, loaded.fingerprint)
        self.self_test = await self.cache.self_test()
        for problem in self.self_test.problems:
            log.warning("self-test", problem=problem)
        controls = bool(self.cache.capabilities.level)
        chunk_tokens = self._config.cache.chunk_size or self.self_test.chunk_size
        if not chunk_tokens and controls:
            return False
        chunk_tokens = chunk_tokens or DEFAULT_CHUNK_TOKENS
        workers = self._config.mapping_workers
        await map_models(
            self.models, self._profiles, engine, chunk_tokens, workers, self.mapping_backlog, served
        )
        self._modes.observe_only = {m.name for m in self.models.values() if m.service and m.reason}
        self.prepared.set()
        return (self.self_test.ok or not controls) and all(backend.down for backend in away)

    async def _ask_engines(self) -> tuple[dict[Backend, EngineIdentity], list[Backend]]:
        """Those that answered, and those that did not. Raises `EngineUnreached` if none did."""
        reached: dict[Backend, EngineIdentity] = {}
        away: dict[Backend, EngineUnreached] = {}
        for backend in self._backends.all:
            try:
                reached[backend] = await ask_engine(backend.address)
            except EngineUnreached as error:
                away[backend] = error
        if not reached:
            raise next(iter(away.values()))
        first = next(iter(reached))
        warnings = [f"engine {b.name} is not proven: {error}" for b, error in away.items()]
        for backend, identity in reached.items():
            if identity.version != reached[first].version:
                warnings.append(
                    f"engine {backend.name} runs version {identity.version}, {first.name} runs "
                    f"{reached[first].version}: run one version, for their tokens may differ"
                )
        self.warnings = tuple(warnings)
        return reached, list(away)

    def tokenize(self, text: str) -> Sequence[int] | None:
        """Our side of the parity check, by the first model; None without a tokenizer of our own."""
        profile = next(iter(self._profiles.values()), None)
        return plain_ids(profile, text) if profile is not None else None

    async def close(self) -> None:
        """End the render processes."""
        for model in self.models.values():
            if model.service is not None:
                await model.service.close()
