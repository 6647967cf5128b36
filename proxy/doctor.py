"""What stands between this deployment and control of its cache, one finding a line, each with its fix."""

import asyncio
import os

import msgspec

from engine_bridge.cache_events import EventSubscriber
from lifecycle.errors import LifecycleError
from lifecycle.store.opening import MEMORY_LOG, open_log
from proxy.cache_driver import cache_driver
from proxy.config import Config
from proxy.models import EngineUnreached, MappedModel, ask_engine, load_profile, plain_ids

LISTEN_SECONDS = 5.0
"""The engine reports a block in the step that fills it; this is much longer."""


class Finding(msgspec.Struct, frozen=True):
    """One subject, whether it is in order, and what to do if not."""

    subject: str
    ok: bool
    text: str


async def examine(config: Config) -> list[Finding]:
    """Look at everything once. Sends one short probe call through the engine, and deletes nothing."""
    findings = [await _log(config)]
    key = os.environ.get(config.upstream.api_key_env, "")
    try:
        engine = await ask_engine(config.upstream.url, f"Bearer {key}" if key else "")
    except EngineUnreached as error:
        return [
            *findings,
            Finding("upstream", False, f"{error}; check upstream.url and that the engine runs"),
        ]
    served = ", ".join(engine.models) or "no model"
    findings.append(Finding("upstream", True, f"version {engine.version or 'unknown'}, serves {served}"))
    if not config.models:
        findings.append(
            Finding(
                "model", False, "none configured: pass --model-path with the engine's tokenizer and template"
            )
        )
    profile = None
    for model in config.models:
        loaded = await asyncio.to_thread(load_profile, model, engine)
        if isinstance(loaded, MappedModel):
            findings.append(Finding(f"model {loaded.name}", False, loaded.reason))
        else:
            profile = profile or loaded
            known = loaded.name in engine.models
            text = (
                f"mapped, fingerprint {loaded.fingerprint}" if known else f"the engine serves {served} only"
            )
            findings.append(Finding(f"model {loaded.name}", known, text))
    heard = _listen(config.cache.events_endpoint)
    cache = cache_driver(config, (lambda text: plain_ids(profile, text)) if profile else None)
    try:
        tested = await cache.self_test()
        level = cache.capabilities.level
        findings.append(Finding("level", level > 0, f"{level} ({cache.capabilities.driver})"))
        findings += [Finding("cache", False, problem) for problem in tested.problems]
        if tested.ok:
            findings.append(
                Finding(
                    "cache", True, f"keys, tokens and versions proven; chunks of {tested.chunk_size} tokens"
                )
            )
        if level:
            findings.append(await _events(config.cache.events_endpoint, heard, tested.ok))
    finally:
        if heard is not None:
            heard.cancel()
        await cache.close()
    return findings


async def _log(config: Config) -> Finding:
    if config.log_url == MEMORY_LOG:
        return Finding("event log", True, "in memory: what is known is lost with the process")
    try:
        opened = await open_log(config.log_url)
    except LifecycleError as error:
        return Finding("event log", False, str(error))
    try:
        return Finding("event log", True, f"{opened.place}, {await opened.event_log.head()} events")
    finally:
        await opened.event_log.close()


def _listen(endpoint: str) -> asyncio.Task[None] | None:
    """Wait for a first batch of events; subscribed before the self-test sends its probe call."""

    async def first_batch() -> None:
        async for _ in EventSubscriber(endpoint).batches():
            return

    return asyncio.ensure_future(first_batch()) if endpoint else None


async def _events(endpoint: str, heard: asyncio.Task[None] | None, probed: bool) -> Finding:
    if heard is None:
        return Finding(
            "KV events",
            False,
            "none are read, so what calls generate stays in the cache: start the engine with "
            "--kv-events-config and set cache.events_endpoint",
        )
    if not probed:
        return Finding("KV events", False, f"{endpoint} was not tried: the self-test comes first")
    done, _ = await asyncio.wait([heard], timeout=LISTEN_SECONDS)
    if not done:
        return Finding(
            "KV events",
            False,
            f"{endpoint} said nothing while the engine computed a probe call: check the address, and that "
            "the engine binds it (a wildcard or ipc endpoint in --kv-events-config)",
        )
    error = heard.exception()
    if error is not None:
        return Finding("KV events", False, f"{endpoint}: {error}")
    return Finding("KV events", True, f"heard from {endpoint}")
