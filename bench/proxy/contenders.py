"""The proxies of the comparison: started, found ready, pinned to a core, and what they use of the machine.

Every peer runs as its own documentation starts it, with one worker process, logging errors only, and without
retries where it can be told so: a retry would hide a failed call.
"""

import asyncio
import contextlib
import multiprocessing
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import NamedTuple

import uvloop

from bench.proxy.engine import MODEL
from bench.proxy.load import API_KEY, Agents, Bodies, CallFailed, connect
from lifecycle.vocabulary import Mode
from proxy.app import serving
from proxy.collector import spare_collector
from proxy.config import Config, Listener, ModelConfig, UpstreamConfig
from proxy.log_output import configure_logging
from proxy.malloc_arenas import bound_arenas

PEERS_DIR = Path(".peers")
PEER_BIN = PEERS_DIR / "venv" / "bin"
MODEL_DIR = Path(".engine/model")

START_SECONDS = 150.0
OURS = ("bypass", "observe", "enforce")
PYTHON_PEERS = ("LiteLLM",)


class Contender(NamedTuple):
    """A proxy that is up. `pid` is 0 for no proxy at all."""

    name: str
    port: int
    pid: int

    def cpu_seconds(self) -> float:
        """CPU time of the process and those that it started."""
        return sum(_cpu_seconds(pid) for pid in _family(self.pid)) if self.pid else 0.0

    def memory_mib(self) -> float:
        """Resident memory of the process and those that it started; shared pages count once a process."""
        return sum(_resident_kib(pid) for pid in _family(self.pid)) / 1024 if self.pid else 0.0


def _peer_commands(engine_port: int, directory: Path) -> dict[str, Callable[[int, int], list[str]]]:
    """How each peer is started, given its port and one for its metrics."""
    engine = f"http://127.0.0.1:{engine_port}"
    config = directory / "litellm.yaml"
    config.write_text(
        f"model_list:\n  - model_name: {MODEL}\n    litellm_params:\n      model: openai/{MODEL}\n"
        f"      api_base: {engine}/v1\n      api_key: {API_KEY}\n"
        "litellm_settings:\n  num_retries: 0\n  telemetry: false\n"
    )

    def router(*command: str, quiet: str) -> Callable[[int, int], list[str]]:
        return lambda port, metrics: [
            *command,
            *("--worker-urls", engine, "--host", "127.0.0.1", "--port", str(port)),
            *("--policy", "round_robin", "--disable-retries", "--disable-circuit-breaker"),
            *("--prometheus-host", "127.0.0.1", "--prometheus-port", str(metrics), "--log-level", quiet),
        ]

    return {
        "vllm-router": router(str(PEER_BIN / "vllm-router"), quiet="error"),
        "sglang-router": router(str(PEER_BIN / "python"), "-m", "sglang_router.launch_router", quiet="error"),
        "SMG": router(str(PEER_BIN / "smg"), "launch", quiet="error"),
        "LiteLLM": lambda port, metrics: [
            *(str(PEER_BIN / "litellm"), "--config", str(config), "--host", "127.0.0.1"),
            *("--port", str(port), "--num_workers", "1"),
        ],
    }


PEERS = ("vllm-router", "sglang-router", "SMG", "LiteLLM")


class CannotRun(Exception):
    """A contender is not to be had on this machine, with its own last words."""


class Starting(NamedTuple):
    """A process on its way up. `ready` waits for its port, and raises `CannotRun`."""

    pid: int
    ready: Callable[[], int]


@contextlib.contextmanager
def starting(
    name: str, engine_port: int, directory: Path, core: int | None
) -> Iterator[Callable[[], Contender]]:
    """A contender by name until the block ends; what is yielded waits until it is up. Raises `CannotRun`."""
    if name == "direct":
        yield lambda: Contender(name, engine_port, 0)
    elif name in OURS:
        with spawned(_serve_ours, core, engine_port, name, str(directory)) as ours:
            yield lambda: Contender(f"ours, {name}", ours.ready(), ours.pid)
    else:
        with _peer(name, engine_port, directory, core) as peer:
            yield lambda: Contender(name, peer.ready(), peer.pid)


@contextlib.contextmanager
def spawned(target: Callable[..., None], core: int | None, *arguments: object) -> Iterator[Starting]:
    """A process of ours that sends its port when it is ready."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=target, args=(theirs, *arguments))
    process.start()
    theirs.close()

    def ready() -> int:
        if not ours.poll(START_SECONDS):
            raise CannotRun("it did not come up")
        port: int = ours.recv()
        assert process.pid is not None
        pin(process.pid, core)
        return port

    try:
        assert process.pid is not None
        yield Starting(process.pid, ready)
    finally:
        process.terminate()
        process.join(20)
        if process.is_alive():
            process.kill()
            process.join()


def _serve_ours(ready: Connection, engine_port: int, mode: str, directory: str) -> None:
    models = (ModelConfig(path=str(MODEL_DIR), name=MODEL),) if MODEL_DIR.exists() else ()
    config = Config(
        data=Listener(port=0),
        admin=Listener(port=0),
        upstream=UpstreamConfig(url=f"http://127.0.0.1:{engine_port}"),
        models=models,
        mode=Mode(mode),
        log_url=f"sqlite:///{directory}/{mode}.db",
    )

    # As in production: a line a call, into a file.
    os.dup2(os.open(Path(directory, f"{mode}.log"), os.O_CREAT | os.O_WRONLY), sys.stderr.fileno())
    configure_logging("info", "json")
    bound_arenas()

    async def run() -> None:
        stop = asyncio.Event()
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
        async with serving(config) as up:
            spare_collector()
            await up.runtime.prepared.wait()
            ready.send(int(up.data_url.rsplit(":", 1)[1]))
            await stop.wait()

    uvloop.run(run())


@contextlib.contextmanager
def _peer(name: str, engine_port: int, directory: Path, core: int | None) -> Iterator[Starting]:
    port, metrics_port = _free_port(), _free_port()
    command = _peer_commands(engine_port, directory)[name](port, metrics_port)
    if not Path(command[0]).exists():
        raise CannotRun(f"{command[0]} is not there; `make peers` installs it")
    said = directory / f"{name}.log"
    environment = {
        **os.environ,
        "LITELLM_LOG": "ERROR",
        "LITELLM_LOCAL_MODEL_COST_MAP": "True",
        "LITELLM_MASTER_KEY": API_KEY,
    }
    with said.open("wb") as out:
        process = subprocess.Popen(
            command, stdout=out, stderr=out, stdin=subprocess.DEVNULL, env=environment, start_new_session=True
        )

    def ready() -> int:
        until = time.monotonic() + START_SECONDS
        while not asyncio.run(_answers(port)):
            if process.poll() is not None or time.monotonic() > until:
                raise CannotRun(f"{' '.join(command)}: {said.read_text(errors='replace')[-800:]}")
            time.sleep(0.3)
        pin(process.pid, core)
        return port

    try:
        yield Starting(process.pid, ready)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


async def _answers(port: int) -> bool:
    """Whether it forwards calls: several may land on workers that are not known yet."""
    calls = Agents().calls(Bodies(512))
    try:
        line = await connect(port)
        await line.call(next(calls))
        line.close()
    except (OSError, CallFailed):
        return False
    return True


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def pin(pid: int, core: int | None) -> None:
    """Keep a process, what it started and whatever it starts from now on, on one core."""
    for each in _family(pid) if core is not None else ():
        for thread in Path(f"/proc/{each}/task").iterdir():
            with contextlib.suppress(OSError):
                os.sched_setaffinity(int(thread.name), {core})


def _family(pid: int) -> list[int]:
    found = [pid]
    for each in found:
        for thread in Path(f"/proc/{each}/task").glob("*/children"):
            with contextlib.suppress(OSError):
                found += [int(child) for child in thread.read_text().split()]
    return found


def _cpu_seconds(pid: int) -> float:
    """All threads of a process, those that ended included, by its CPU clock (clock_getcpuclockid(3))."""
    try:
        return time.clock_gettime((~pid << 3) | 2)
    except OSError:
        return 0.0


def _resident_kib(pid: int) -> int:
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) for line in lines if line.startswith("VmRSS:")), 0)
