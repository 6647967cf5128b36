"""The servers that the suites talk to: engine, proxies, LiteLLM. Everything on free loopback ports."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import msgspec

from engine_bridge.stack.engine_stack import LOOPBACK, EngineStack, StackOptions
from engine_bridge.stack.processes import Process, free_ports
from proxy.app import serving
from proxy.config import Config, Listener, ModelConfig, UpstreamConfig
from proxy.local import local_config
from suites.environment import SuitesEnvironment

TEMPLATE = {"enable_thinking": False}
OPTIONS = StackOptions(
    max_model_len=8192,
    extra_vllm=(
        # Greedy and short, or no two answers were alike and none ended.
        "--override-generation-config",
        json.dumps({"max_new_tokens": 40, "temperature": 0.0}),
        "--default-chat-template-kwargs",
        json.dumps(TEMPLATE),
        # A model of random weights would fill its JSON with spaces.
        "--structured-outputs-config",
        json.dumps({"backend": "xgrammar", "disable_any_whitespace": True}),
    ),
)
LITELLM_SECONDS = 180.0
LITELLM_VARIABLES = {
    "LITELLM_LOCAL_MODEL_COST_MAP": "True",
    "LITELLM_LOG": "ERROR",
    # It listens on loopback only and ends with the run; clients keep the key that they have.
    "LITELLM_DANGEROUSLY_PERMIT_WEAK_OR_UNSET_MASTER_KEY": "true",
    "NO_PROXY": LOOPBACK,
}
THROUGH = "through"
"""LiteLLM's name for the model on the way through the proxy; by its own name it is asked directly."""


@dataclass(frozen=True, kw_only=True)
class World:
    """Base URLs without `/v1`, each the beginning of one way to the same engine."""

    model: str
    engine: str
    proxy: str
    litellm: str
    proxy_before_litellm: str


def enforcing(stack: EngineStack, run_dir: Path, upstream: str, port: int) -> Config:
    """A proxy in enforce, with a log of its own, before the engine or before what stands before it."""
    run_dir.mkdir(parents=True, exist_ok=True)
    model = ModelConfig(path=stack.model_path, name=stack.options.model_name, chat_template_kwargs=TEMPLATE)
    return msgspec.structs.replace(
        local_config(stack, run_dir),
        data=Listener(port=port),
        admin=Listener(port=0),
        upstream=UpstreamConfig(url=upstream),
        models=(model,),
    )


def litellm_config(model: str, engine: str, proxy: str) -> str:
    """The configuration file of LiteLLM's proxy, which may be JSON: one model, two ways."""
    ways = {model: engine, THROUGH: proxy}
    listed = [
        {
            "model_name": name,
            "litellm_params": {"model": f"hosted_vllm/{model}", "api_base": f"{url}/v1", "api_key": "any"},
        }
        for name, url in ways.items()
    ]
    settings = {"num_retries": 0, "request_timeout": 60, "drop_params": False}
    router = {"num_retries": 0, "disable_cooldowns": True}
    return json.dumps({"model_list": listed, "litellm_settings": settings, "router_settings": router})


@asynccontextmanager
async def running_world(environment: SuitesEnvironment, run_dir: Path) -> AsyncIterator[World]:
    """Everything started and ready. Raises `StackError` when one of them does not start."""
    async with AsyncExitStack() as opened:
        stack = await opened.enter_async_context(EngineStack(options=OPTIONS))
        litellm_port, proxy_port = free_ports(2)
        proxy, litellm = f"http://{LOOPBACK}:{proxy_port}", f"http://{LOOPBACK}:{litellm_port}"
        config = enforcing(stack, run_dir / "proxy", stack.upstream_url, proxy_port)
        await _proxy(opened, config)
        written = run_dir / "litellm.yaml"
        written.write_text(litellm_config(stack.options.model_name, stack.upstream_url, proxy))
        process = Process(
            "litellm",
            [
                *(str(environment.command("litellm")), "--config", str(written.absolute())),
                *("--host", LOOPBACK, "--port", str(litellm_port), "--telemetry", "False"),
            ],
            LITELLM_VARIABLES,
            (run_dir / "litellm.log").absolute(),
            f"{litellm}/health/liveliness",
        )
        process.start()
        opened.push_async_callback(process.stop)
        await process.wait_ready(LITELLM_SECONDS)
        before = await _proxy(opened, enforcing(stack, run_dir / "proxy-before-litellm", litellm, 0))
        yield World(
            model=stack.options.model_name,
            engine=stack.upstream_url,
            proxy=proxy,
            litellm=litellm,
            proxy_before_litellm=before,
        )


async def _proxy(opened: AsyncExitStack, config: Config) -> str:
    up = await opened.enter_async_context(serving(config))
    async with asyncio.timeout(60):
        await up.runtime.prepared.wait()
    return up.data_url
