"""The proxy before an engine of its own, both in this process: `kvtether serve --embedded`."""

import asyncio
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec
import structlog
from rich.console import Console

from engine_bridge.drivers.sim import SimCache
from engine_bridge.sim.embedded import EmbeddedEngine, EmbeddedOptions
from engine_bridge.sim.hardware import EngineConfig
from engine_bridge.sim.replies import Script, load_script
from proxy.app import Serving, reload_on_hangup, serving
from proxy.config import Config, ModelConfig
from proxy.config_source import ConfigSource

CHUNK_TOKENS = 64
L2_BYTES = 500_000_000_000

console = Console()
log = structlog.get_logger(__name__)


def embedded_options(model_path: str | None = None) -> EmbeddedOptions:
    """The engine that `serve --embedded` starts: an 8B model on one large card, with L1 and L2 below.

    Chunks are smaller than LMCache's default, so that conversations as short as a first try have some.
    """
    options = EmbeddedOptions(engine=EngineConfig(chunk_tokens=CHUNK_TOKENS, l2_bytes=L2_BYTES))
    return msgspec.structs.replace(options, model_path=model_path) if model_path else options


def embedded_config(config: Config, engine: EmbeddedEngine) -> Config:
    """The configuration with this engine for its upstream, model and events."""
    options = engine.options
    return msgspec.structs.replace(
        config,
        upstream=msgspec.structs.replace(config.upstream, url=engine.url),
        upstreams=(),
        models=(ModelConfig(path=options.model_path, name=options.model_name),),
        cache=msgspec.structs.replace(
            config.cache,
            events_endpoint=engine.events.endpoint,
            replay_endpoint=engine.events.replay_endpoint,
            chunk_size=0,
        ),
    )


@asynccontextmanager
async def serving_before(
    config: Config, engine: EmbeddedEngine, source: ConfigSource | None = None
) -> AsyncIterator[Serving]:
    """Serve before an engine that runs, and control its cache."""
    own = source and ConfigSource(lambda: embedded_config(source.load(), engine), source.file)
    control = SimCache(engine.runner, engine.options.model_name, l2_pins=config.cache.l2_pins)
    async with serving(embedded_config(config, engine), control, source=own) as up:
        yield up


async def serve_embedded(
    config: Config,
    model_path: str | None = None,
    script: Path | None = None,
    source: ConfigSource | None = None,
) -> None:
    """Start engine and proxy, say where they are, and stop both on SIGINT or SIGTERM.

    Raises `InvalidConfig`, `InvalidScript`, and what loading the model raises.
    """
    said: Script | None = load_script(script) if script else None
    stop = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    engine = EmbeddedEngine(embedded_options(model_path), script=said)
    async with engine, serving_before(config, engine, source) as up:
        reload_on_hangup(up)
        name, answers = engine.options.model_name, "from the script" if said else "pseudo-text"
        _say("\n[bold]SIMULATED ENGINE[/]    there is no model behind this: answers are " + answers)
        _say("                    and times are estimates; tokens, cache keys and hits are real")
        _say(f"\nPoint an agent at   base_url={up.data_url}/v1   model={name}   api_key=any")
        _say(f"Admin and metrics   {up.admin_url}/readyz   {up.admin_url}/metrics")
        _say(f"Watch events        kvtether tail --admin {up.admin_url}")
        _say(f"Mode                {config.mode}: the engine is this proxy's own. Ctrl-C stops both.\n")
        log.info("serving", data=up.data_url, admin=up.admin_url, upstream=engine.url, mode=config.mode)
        await stop.wait()


def _say(text: str) -> None:
    console.print(text, highlight=False, soft_wrap=True)
