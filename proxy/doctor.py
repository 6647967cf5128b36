"""What stands between this deployment and control of its cache, one finding a line, each with its fix."""

import asyncio
from collections.abc import Mapping, Sequence

import msgspec

from engine_bridge.cache_events import EventSubscriber
from engine_bridge.engine_address import EngineAddress
from engine_bridge.mapping.model_profile import ModelProfile
from lifecycle.errors import LifecycleError
from lifecycle.store.opening import MEMORY_LOG, open_log
from proxy.cache_driver import cache_driver, engine_addresses
from proxy.config import BackendConfig, Config
from proxy.event_reading import no_events
from proxy.models import EngineIdentity, EngineUnreached, MappedModel, ask_engine, load_profile, plain_ids

LISTEN_SECONDS = 5.0
"""The engine reports a block in the step that fills it; this is much longer."""


class Finding(msgspec.Struct, frozen=True):
    """One subject, whether it is in order, and what to do if not."""

    subject: str
    ok: bool
    text: str


async def examine(config: Config) -> list[Finding]:
    """Look at everything once. Sends short probe calls through the engines, and deletes nothing."""
    findings = [await _log(config)]
    reached: dict[EngineAddress, EngineIdentity] = {}
    for address in engine_addresses(config):
        subject = f"upstream {address.name}".rstrip()
        try:
            engine = reached[address] = await ask_engine(address)
        except EngineUnreached as error:
            where = "the url in upstreams" if address.name else "upstream.url"
            findings.append(Finding(subject, False, f"{error}; check {where} and that the engine runs"))
        else:
            said = f"version {engine.version or 'unknown'}, serves {_names(engine.models)}"
            findings.append(Finding(subject, True, said))
    if not reached:
        return findings
    if len({engine.version for engine in reached.values()}) > 1:
        text = "engines run different versions, whose tokens may differ: run one version"
        findings.append(Finding("versions", False, text))
    if not config.models:
        findings.append(
            Finding(
                "model", False, "none configured: pass --model-path with the engine's tokenizer and template"
            )
        )
    profile = None
    for model in config.models:
        loaded = await asyncio.to_thread(load_profile, model, next(iter(reached.values())))
        if isinstance(loaded, MappedModel):
            findings.append(Finding(f"model {loaded.name}", False, loaded.reason))
        else:
            profile = profile or loaded
            findings.append(_served(loaded, reached))
    heard = [(b, _listen(b.events_endpoint)) for b in config.backends]
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
            findings += [await _events(backend, listening, tested.ok) for backend, listening in heard]
    finally:
        for _, listening in heard:
            if listening is not None:
                listening.cancel()
        await cache.close()
    return findings


def _served(profile: ModelProfile, engines: Mapping[EngineAddress, EngineIdentity]) -> Finding:
    """Whether somebody serves a model, and who does not: its calls go to the others."""
    name, subject = profile.name, f"model {profile.name}"
    without = [a.name for a, engine in engines.items() if name not in engine.models]
    if len(without) == len(engines):
        served = sorted({model for engine in engines.values() for model in engine.models})
        return Finding(subject, False, f"the engine serves {_names(served)} only")
    not_there = f"; not served by {', '.join(without)}" if without else ""
    return Finding(subject, True, f"mapped, fingerprint {profile.fingerprint}{not_there}")


def _names(models: Sequence[str]) -> str:
    return ", ".join(models) or "no model"


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


async def _events(backend: BackendConfig, heard: asyncio.Task[None] | None, probed: bool) -> Finding:
    endpoint, subject = backend.events_endpoint, f"KV events {backend.name}".rstrip()
    if heard is None:
        return Finding(subject, False, no_events([backend.name]))
    if not probed:
        return Finding(subject, False, f"{endpoint} was not tried: the self-test comes first")
    done, _ = await asyncio.wait([heard], timeout=LISTEN_SECONDS)
    if not done:
        return Finding(
            subject,
            False,
            f"{endpoint} said nothing while the engine computed a probe call: check the address, and that "
            "the engine binds it (a wildcard or ipc endpoint in --kv-events-config)",
        )
    error = heard.exception()
    if error is not None:
        return Finding(subject, False, f"{endpoint}: {error}")
    return Finding(subject, True, f"heard from {endpoint}")
