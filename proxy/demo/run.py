"""Runs the demo: the same calls once before a cache left to its own order, once before one that is told."""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import Protocol

import msgspec

from engine_bridge.sim.replay import CallOutcome, Pace, ReplayOptions, replay
from engine_bridge.sim.requests import FinishedOutput, Output
from engine_bridge.sim.runner import EngineRunner
from engine_bridge.sim.traces.texts import Texts, counted_by
from lifecycle.core.ids import Namespace
from lifecycle.vocabulary import Mode
from proxy.app import Serving
from proxy.demo.compaction import CompactedAgent
from proxy.demo.results import CallResult, Outcome, Step
from proxy.demo.watch import Watch
from proxy.demo.workload import DemoWorkload

SAMPLE_SECONDS = 0.25
"""Wall-clock seconds between two looks at the cache."""

SETTLE_LOOKS = 40
"""Looks at the cache after the last call, at most, until nothing dead is left that is being freed."""

NANOSECONDS = 1e9


class Column(msgspec.Struct, frozen=True):
    """One column."""

    title: str
    what: str
    mode: Mode


COLUMNS: Sequence[Column] = (
    Column(
        "LRU",
        "the cache's own order; the proxy follows the agents and sends nothing (observe)",
        Mode.OBSERVE,
    ),
    Column(
        "LRU + reclaim + bypass",
        "the same cache; dead chunks are freed, one-offs kept out of the store (enforce)",
        Mode.ENFORCE,
    ),
)


class Deployed(msgspec.Struct, frozen=True, kw_only=True):
    """Engine, cache and proxy that are up for one column.

    `seconds` is the run's own time, by which the agents wait. `runner` is the simulated engine, which knows
    its own times; None where they are measured at the client.
    """

    up: Serving
    model_path: str
    model_name: str
    seconds: Callable[[], float]
    pace: Pace
    runner: EngineRunner | None = None


class Backend(Protocol):
    """Something that can be deployed anew for every column."""

    @property
    def simulated(self) -> bool: ...

    def hardware(self, working_tokens: int) -> str:
        """In words: the machine and its tiers, for a workload of that size."""
        ...

    def deployed(self, mode: Mode, working_tokens: int) -> AbstractAsyncContextManager[Deployed]: ...


class Progress(Protocol):
    """Is told how far a run has come."""

    def __call__(self, outcome: Outcome, num_calls: int) -> None: ...


async def play(
    column: Column, backend: Backend, workload: DemoWorkload, num_concurrent: int, progress: Progress
) -> tuple[Outcome, Sequence[Step]]:
    """One column from start to end; in enforce a compaction is followed behind it."""
    async with backend.deployed(column.mode, workload.working_tokens) as deployed:
        await deployed.up.runtime.prepared.wait()
        watch = Watch(deployed.up.runtime, Namespace(deployed.model_name), deployed.seconds)

        def outcome() -> Outcome:
            return Outcome(
                title=column.title,
                what=column.what,
                samples=tuple(watch.samples),
                calls=tuple(watch.calls),
                num_failed=watch.num_failed,
                num_reclaimed_chunks=watch.num_reclaimed_chunks,
                num_regretted_tokens=watch.num_regretted_tokens,
                num_bypassed_calls=watch.num_bypassed_calls,
            )

        async with _looking(watch, lambda: progress(outcome(), len(workload.calls))):
            await _replay(deployed, workload, num_concurrent, watch)
        for _ in range(SETTLE_LOOKS if column.mode is Mode.ENFORCE else 1):
            await watch.sample()
            if not watch.samples[-1].dead_tokens:
                break
            await asyncio.sleep(SAMPLE_SECONDS)
        watch.end()
        done = outcome()
        progress(done, len(workload.calls))
        if column.mode is not Mode.ENFORCE:
            return done, ()
        return done, await CompactedAgent(deployed.up, deployed.model_name, watch).steps()


async def _replay(deployed: Deployed, workload: DemoWorkload, num_concurrent: int, watch: Watch) -> None:
    options = ReplayOptions(
        base_url=f"{deployed.up.data_url}/v1",
        model=deployed.model_name,
        name="demo",
        num_concurrent_sessions=num_concurrent,
        time_scale=1.0,
        max_answer_tokens=max(call.num_generated for call in workload.calls),
    )
    texts = Texts(counted_by(Path(deployed.model_path) / "tokenizer.json"), salt="demo")

    def heard(told: CallOutcome) -> None:
        if told.error:
            watch.num_failed += 1
        elif deployed.runner is None:
            watch.calls.append(
                CallResult(
                    at_seconds=deployed.seconds() - told.seconds,
                    ttft_seconds=told.ttft_seconds,
                    prompt_tokens=told.prompt_tokens,
                    cached_tokens=told.cached_tokens,
                    output_tokens=told.answer_tokens,
                )
            )

    def came_out(output: Output) -> None:
        if isinstance(output, FinishedOutput):
            watch.calls.append(_call_of(output, deployed.seconds()))

    if deployed.runner is not None:
        deployed.runner.listeners.append(came_out)
    try:
        await replay(workload.calls, texts, options, heard, deployed.pace)
    finally:
        if deployed.runner is not None:
            deployed.runner.listeners.remove(came_out)


def _call_of(output: FinishedOutput, now_seconds: float) -> CallResult:
    """By the engine's own times: to its first token a request queues, loads and is computed."""
    times, usage = output.timings, output.usage
    whole = times.queue_ns + times.load_ns + times.prefill_ns + times.decode_ns
    return CallResult(
        at_seconds=now_seconds - whole / NANOSECONDS,
        ttft_seconds=(times.queue_ns + times.load_ns + times.prefill_ns) / NANOSECONDS,
        prompt_tokens=usage.prompt_tokens,
        cached_tokens=usage.cached_tokens,
        output_tokens=usage.completion_tokens,
    )


@asynccontextmanager
async def _looking(watch: Watch, told: Callable[[], None]) -> AsyncIterator[None]:
    """Look at the cache again and again until the block ends."""

    async def look() -> None:
        while True:
            await watch.sample()
            told()
            await asyncio.sleep(SAMPLE_SECONDS)

    async with asyncio.TaskGroup() as group:
        looking = group.create_task(look())
        try:
            yield
        finally:
            looking.cancel()
