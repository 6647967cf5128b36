"""How control begins: engine and cache are asked until both told what must be known, and proved it."""

import asyncio
import os
from collections.abc import Sequence
from contextlib import suppress

import structlog

from engine_bridge.mapping.model_profile import ModelProfile
from lifecycle.ports import CacheControl, SelfTest
from proxy.config import Config
from proxy.models import (
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
    """What the engine and the cache told: which models are mapped and how, and whether the cache may be
    touched.

    `prepared` is set when the engine was reached, the self-test has run, and models are mapped or never can
    be. `cache` must be set before `run`: its driver needs our tokenizer.
    """

    def __init__(self, config: Config, modes: Modes) -> None:
        self.prepared = asyncio.Event()
        self.models = {m.name: not_reached(m.name, self.prepared) for m in config.models}
        self.self_test = SelfTest(ok=False, problems=("the self-test has not run yet",))
        self.cache: CacheControl | None = None
        self._config = config
        self._modes = modes
        self._profiles: dict[str, ModelProfile] = {}

    async def run(self) -> None:
        """Ask engine and cache until both told what we must know, then prove it; again while it fails."""
        pause = ASK_AGAIN_SECONDS
        while True:
            with suppress(EngineUnreached):
                if await self._prepare() and not self._modes.observe_only:
                    return
                pause = min(2 * pause, MAX_ASK_AGAIN_SECONDS)
            await asyncio.sleep(pause)

    async def _prepare(self) -> bool:
        """Ask everybody once; whether the cache is proven, or there is none. Raises `EngineUnreached`."""
        assert self.cache is not None
        key = os.environ.get(self._config.upstream.api_key_env, "")
        url, authorization = self._config.upstream.url, f"Bearer {key}" if key else ""
        engine = await ask_engine(url, authorization)
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
        await map_models(self.models, self._profiles, engine, chunk_tokens, workers, url, authorization)
        self._modes.observe_only = {m.name for m in self.models.values() if m.service and m.reason}
        self.prepared.set()
        return self.self_test.ok or not controls

    def tokenize(self, text: str) -> Sequence[int] | None:
        """Our side of the parity check, by the first model; None without a tokenizer of our own."""
        profile = next(iter(self._profiles.values()), None)
        return plain_ids(profile, text) if profile is not None else None

    async def close(self) -> None:
        """End the render processes."""
        for model in self.models.values():
            if model.service is not None:
                await model.service.close()
