"""Starts a coordinator, LMCache servers and vLLM on free loopback ports, waits until they serve, stops them.

The flags are those of a test bench: everything is private to this machine and this user. For production
flags see the compose file.
"""

import asyncio
import json
import shutil
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

from engine_bridge.stack.environment import EngineEnvironment
from engine_bridge.stack.processes import Process, free_ports

LOOPBACK = "127.0.0.1"
PORTS_PER_NODE = 4


@dataclass(frozen=True, kw_only=True)
class StackOptions:
    """What a deployment may differ in. Sizes in tokens unless said otherwise.

    `num_nodes` engines have an LMCache server each, under one coordinator; each takes some 4 GB.
    `chunk_size` is LMCache's unit and a multiple of `block_size`, vLLM's page, which on a CPU is itself a
    multiple of 32. `hash_seed` seeds Python's hash in every process. `extra_*` flags go last, so they win.
    """

    num_nodes: int = 1
    chunk_size: int = 64
    block_size: int = 32
    max_model_len: int = 65536
    model_name: str = "tiny"
    save_decode_cache: bool = True
    full_event_hashes: bool = True
    l1_size_gb: float = 0.25
    kv_cache_gb: int = 1
    event_flush_seconds: float = 0.1
    hash_seed: int = 0
    ready_seconds: float = 240.0
    extra_coordinator: tuple[str, ...] = ()
    extra_lmcache: tuple[str, ...] = ()
    extra_vllm: tuple[str, ...] = ()


class StackNode:
    """An engine and its LMCache server. The first is called `vllm` and `lmcache`, the second `vllm-1` and
    `lmcache-1`, and so on."""

    def __init__(self, number: int, ports: Sequence[int], run_dir: Path) -> None:
        suffix = f"-{number}" if number else ""
        self.vllm, self.lmcache = f"vllm{suffix}", f"lmcache{suffix}"
        self.instance_id = f"lmcache-{number}"
        self.vllm_port, self.http_port, self.mq_port, self.prometheus_port = ports
        self.l2_dir = run_dir / f"l2{suffix}"
        self.events_endpoint = f"ipc://{run_dir}/events{suffix}.sock"
        self.replay_endpoint = f"ipc://{run_dir}/replay{suffix}.sock"

    @property
    def upstream_url(self) -> str:
        """vLLM's HTTP surface, without a trailing slash."""
        return f"http://{LOOPBACK}:{self.vllm_port}"

    @property
    def lmcache_url(self) -> str:
        """The LMCache server's HTTP API."""
        return f"http://{LOOPBACK}:{self.http_port}"


class EngineStack:
    """All servers. `async with` starts and stops them; each can be restarted alone on its old port."""

    def __init__(
        self,
        environment: EngineEnvironment | None = None,
        options: StackOptions | None = None,
        run_dir: Path | None = None,
    ) -> None:
        self.environment = environment or EngineEnvironment()
        self.options = options or StackOptions()
        self._owns_run_dir = run_dir is None
        self.run_dir = run_dir or Path(tempfile.mkdtemp(prefix="kvtether-stack-"))
        self.nodes: list[StackNode] = []
        self._coordinator_port = 0
        self._processes: dict[str, Process] = {}

    @property
    def upstream_url(self) -> str:
        """The first vLLM's HTTP surface, without a trailing slash."""
        return self.nodes[0].upstream_url

    @property
    def coordinator_url(self) -> str:
        return f"http://{LOOPBACK}:{self._coordinator_port}"

    @property
    def lmcache_url(self) -> str:
        """The first LMCache server's HTTP API."""
        return self.nodes[0].lmcache_url

    @property
    def model_path(self) -> str:
        """vLLM's `--model` value: the model name that stands in cache keys."""
        return str(self.environment.model)

    @property
    def events_endpoint(self) -> str:
        """The first vLLM's event stream; connect a subscriber to it."""
        return self.nodes[0].events_endpoint

    @property
    def replay_endpoint(self) -> str:
        """Answers a start sequence number with the batches the first vLLM still remembers."""
        return self.nodes[0].replay_endpoint

    @property
    def l2_dir(self) -> Path:
        """Where the first file adapter keeps its objects."""
        return self.nodes[0].l2_dir

    def log(self, name: str) -> Path:
        """Log file of `coordinator`, `lmcache`, `vllm` and their like."""
        return self.run_dir / f"{name}.log"

    async def start(self) -> None:
        """Start everything and wait until it serves. Raises `EngineMissing`, `StackError`."""
        self.environment.require()
        if len(str(self.run_dir)) > 80:
            raise ValueError(f"{self.run_dir} is too long a path for a socket")
        self._coordinator_port, *ports = free_ports(1 + PORTS_PER_NODE * self.options.num_nodes)
        self.nodes = [
            StackNode(n, ports[n * PORTS_PER_NODE : (n + 1) * PORTS_PER_NODE], self.run_dir)
            for n in range(self.options.num_nodes)
        ]
        self._processes = {"coordinator": self._coordinator()}
        for node in self.nodes:
            node.l2_dir.mkdir(parents=True, exist_ok=True)
            self._processes[node.lmcache] = self._lmcache(node)
        self._processes |= {node.vllm: self._vllm(node) for node in self.nodes}
        try:
            for names in (
                ["coordinator"],
                [node.lmcache for node in self.nodes],
                [node.vllm for node in self.nodes],
            ):
                for name in names:
                    self._processes[name].start()
                for name in names:
                    await self._ready(name)
        except BaseException:
            await self._stop_processes()
            raise

    async def stop(self) -> None:
        """Stop what runs and remove the run directory, unless it was given."""
        await self._stop_processes()
        if self._owns_run_dir:
            shutil.rmtree(self.run_dir, ignore_errors=True)

    async def _stop_processes(self) -> None:
        """vLLM first: it talks to the others on its way out."""
        for process in reversed(self._processes.values()):
            await process.stop()

    async def restart(self, name: str) -> None:
        """Stop and start one server on the same port; its memory is lost, files stay."""
        await self._processes[name].stop()
        self._processes[name].start()
        await self._ready(name)

    async def kill(self, name: str) -> None:
        """End one server as a crash would; `revive` starts it again."""
        await self._processes[name].kill()

    async def revive(self, name: str) -> None:
        """Start a killed server on its old port, with the files it left."""
        self._processes[name].start()
        await self._ready(name)

    def pids(self) -> dict[str, int | None]:
        """Process ids by server, None for one that does not run."""
        return {name: process.pid for name, process in self._processes.items()}

    async def watch(self) -> None:
        """Return only when one of the servers died: raises `StackError` with the end of its log."""
        while True:
            for name, process in self._processes.items():
                if not process.is_alive():
                    await self._ready(name)
            await asyncio.sleep(1.0)

    async def __aenter__(self) -> "EngineStack":
        await self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.stop()

    async def _ready(self, name: str) -> None:
        await self._processes[name].wait_ready(self.options.ready_seconds)

    def _variables(self) -> dict[str, str]:
        return {
            "PYTHONHASHSEED": str(self.options.hash_seed),
            "HF_HUB_OFFLINE": "1",
            "LMCACHE_DISABLE_BANNER": "1",
            "LMCACHE_TRACK_USAGE": "false",
            "VLLM_NO_USAGE_STATS": "1",
            "NO_PROXY": LOOPBACK,
        }

    def _coordinator(self) -> Process:
        command = [str(self.environment.command("lmcache")), "coordinator"]
        command += ["--host", LOOPBACK, "--port", str(self._coordinator_port)]
        command += ["--chunk-size", str(self.options.chunk_size)]
        command += ["--metadata-path", str(self.run_dir / "coordinator.json")]
        command += self.options.extra_coordinator
        url = f"{self.coordinator_url}/healthz"
        return Process("coordinator", command, self._variables(), self.log("coordinator"), url)

    def _lmcache(self, node: StackNode) -> Process:
        options = self.options
        adapter = {"type": "fs", "base_path": str(node.l2_dir)}
        command = [str(self.environment.command("lmcache")), "server", "--instance-id", node.instance_id]
        command += ["--host", LOOPBACK, "--port", str(node.mq_port)]
        command += ["--http-host", LOOPBACK, "--http-port", str(node.http_port)]
        command += ["--prometheus-port", str(node.prometheus_port), "--chunk-size", str(options.chunk_size)]
        command += ["--supported-transfer-mode", "auto"]
        command += ["--l1-size-gb", str(options.l1_size_gb), "--no-l1-use-lazy"]
        command += ["--eviction-policy", "LRU", "--l2-adapter", json.dumps(adapter)]
        command += ["--coordinator-url", self.coordinator_url, "--coordinator-advertise-ip", LOOPBACK]
        command += ["--coordinator-event-reporting"]
        command += ["--coordinator-event-flush-interval", str(options.event_flush_seconds)]
        command += options.extra_lmcache
        url = f"{node.lmcache_url}/healthcheck"
        return Process(node.lmcache, command, self._variables(), self.log(node.lmcache), url)

    def _vllm(self, node: StackNode) -> Process:
        options = self.options
        # The short timeout and heartbeat matter: with the defaults a restart of LMCache ends vLLM.
        connector = {
            "lmcache.mp.host": f"tcp://{LOOPBACK}",
            "lmcache.mp.port": node.mq_port,
            "lmcache.mp.mq_timeout": 10,
            "lmcache.mp.heartbeat_interval": 2,
            "lmcache.mp.mp_transfer_mode": "lmcache_driven",
            "lmcache.mp.save_decode_cache": options.save_decode_cache,
        }
        transfer = {
            "kv_connector": "LMCacheMPConnector",
            "kv_role": "kv_both",
            "kv_connector_extra_config": connector,
        }
        events = {
            "enable_kv_cache_events": True,
            "publisher": "zmq",
            "endpoint": node.events_endpoint,
            "replay_endpoint": node.replay_endpoint,
            "topic": "kv",
        }
        command = [str(self.environment.command("vllm")), "serve", self.model_path]
        command += ["--served-model-name", options.model_name, "--host", LOOPBACK]
        command += ["--port", str(node.vllm_port), "--enforce-eager", "--dtype", "bfloat16"]
        command += ["--block-size", str(options.block_size), "--max-model-len", str(options.max_model_len)]
        command += ["--max-num-seqs", "8", "--enable-prefix-caching", "--enable-prompt-tokens-details"]
        command += [
            "--enable-auto-tool-choice",
            "--tool-call-parser",
            "hermes",
            "--reasoning-parser",
            "qwen3",
        ]
        command += ["--kv-transfer-config", json.dumps(transfer), "--kv-events-config", json.dumps(events)]
        command += options.extra_vllm
        variables = self._variables() | {
            "VLLM_CPU_KVCACHE_SPACE": str(options.kv_cache_gb),
            "VLLM_SERVER_DEV_MODE": "1",
            "VLLM_ENABLE_RESPONSES_API_STORE": "1",
            "VLLM_HOST_IP": LOOPBACK,
            # Whole keys in events instead of their low 64 bits.
            "VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES": str(int(not options.full_event_hashes)),
        }
        return Process(node.vllm, command, variables, self.log(node.vllm), f"{node.upstream_url}/health")
