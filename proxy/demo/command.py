"""The command: plays every column, shows the table while it grows, writes the page."""

import asyncio
from collections.abc import Sequence
from pathlib import Path

import msgspec
from rich.console import Console, Group
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from engine_bridge.sim.hardware import H100_8B
from engine_bridge.sim.traces.selection import Caps
from proxy.demo.backends import CpuStack, Simulated
from proxy.demo.picture import Setting, page
from proxy.demo.results import Outcome, Step
from proxy.demo.run import COLUMNS, Backend, play
from proxy.demo.table import difference, side_by_side
from proxy.demo.workload import demo_workload

SIMULATED_CAPS = Caps(
    num_sessions=8,
    num_session_calls=20,
    num_calls=160,
    num_list_tokens=40_000,
    num_new_tokens=100_000_000,
    num_answer_tokens=48,
)
"""Small enough for two runs in about a minute on two cores."""

SIMULATED_GAP_SECONDS = 90.0
MEASURED_GAP_SECONDS = 2.0

MEASURED_CAPS = Caps(
    num_sessions=4,
    num_session_calls=12,
    num_calls=48,
    num_list_tokens=16_000,
    num_new_tokens=2_000_000,
    num_answer_tokens=16,
)
"""What a model on a CPU computes in about a minute."""

SPEED = 40.0
HBM_SHARE = 0.25
L1_SHARE = 0.5
CONCURRENT = 4
"""Sessions side by side: fewer than there are, so that new ones begin while others rest."""

CAVEATS = (
    "Tools and people take as long as recorded, however fast an answer comes.",
    "Edits, one-offs and ends are declared, as an agent that knows them would; a recorded session counts as "
    "ended with its last call.",
    "The size of the tiers against the working set is a choice; with more room the columns come closer.",
    "Freeing the dead alone adds little to the hits of an LRU cache.",
)
SIMULATED_CAVEATS = (
    "No model runs: times come from a cost model of the named machine, hits and evictions from its tiers.",
)


class DemoPlan(msgspec.Struct, frozen=True, kw_only=True):
    """What is played on what, and where the page goes. Without a `trace` a workload is made from `seed`."""

    backend: Backend
    caps: Caps
    longest_gap_seconds: float
    html: Path
    trace: Path | None = None
    seed: int = 1
    num_concurrent: int = CONCURRENT


def usual_plan(trace: Path | None, html: Path, seed: int, *, on_cpu: bool) -> DemoPlan:
    """The embedded engine, or with `on_cpu` the real ones."""
    backend: Backend = (
        CpuStack() if on_cpu else Simulated(H100_8B, speed=SPEED, hbm_share=HBM_SHARE, l1_share=L1_SHARE)
    )
    return DemoPlan(
        backend=backend,
        caps=MEASURED_CAPS if on_cpu else SIMULATED_CAPS,
        longest_gap_seconds=MEASURED_GAP_SECONDS if on_cpu else SIMULATED_GAP_SECONDS,
        html=html,
        trace=trace,
        seed=seed,
    )


async def demo(console: Console, plan: DemoPlan) -> Sequence[Outcome]:
    """Play both columns, print the table, write the page.

    Raises `MalformedTrace`, `OSError`, `BridgeError`.
    """
    backend = plan.backend
    badge = "SIMULATED" if backend.simulated else "MEASURED"
    workload = demo_workload(plan.trace, plan.caps, plan.longest_gap_seconds, plan.seed)
    hardware = backend.hardware(workload.working_tokens)
    console.print(f"{workload.told}\n{hardware}", highlight=False, soft_wrap=True)
    outcomes: list[Outcome] = []
    steps: Sequence[Step] = ()
    bars = Progress(
        TextColumn("{task.description:<24}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("calls"),
        TimeElapsedColumn(),
        console=console,
    )
    with Live(console=console, refresh_per_second=4) as live:
        for column in COLUMNS:
            task = bars.add_task(column.title, total=len(workload.calls))

            def told(outcome: Outcome, num_calls: int, task: TaskID = task) -> None:
                bars.update(task, completed=len(outcome.calls) + outcome.num_failed, total=num_calls)
                live.update(Group(bars, side_by_side([*outcomes, outcome], badge)))

            outcome, followed = await play(column, backend, workload, plan.num_concurrent, told)
            outcomes.append(outcome)
            steps = followed or steps
    setting = Setting(
        simulated=backend.simulated,
        workload=workload.told,
        hardware=hardware,
        command=_command(plan),
        caveats=(*SIMULATED_CAVEATS, *CAVEATS) if backend.simulated else CAVEATS,
    )
    await asyncio.to_thread(plan.html.write_text, page(setting, outcomes, steps), encoding="utf-8")
    changed = difference(outcomes[0], outcomes[-1])
    console.print(
        f"\n{badge}: dead share of the cache {changed['dead_points']:+.1f} points, "
        f"found in the cache {changed['hit_points']:+.1f} points, "
        f"tokens to compute {changed['computed_share'] * 100:+.1f} %.",
        highlight=False,
    )
    for number, step in enumerate(steps, start=1):
        console.print(
            f"  {number}. {step.title} {step.alive} chunks alive, {step.dead} dead, {step.gone} gone.",
            highlight=False,
        )
    console.print(f"The picture: {plan.html}", highlight=False, soft_wrap=True)
    return outcomes


def _command(plan: DemoPlan) -> str:
    source = f"--seed {plan.seed}" if plan.trace is None else f"--trace {plan.trace.name}"
    return f"kvtether demo {source}" + ("" if plan.backend.simulated else " --engine vllm-cpu")
