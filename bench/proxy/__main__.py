"""Ours and its peers, side by side in one run: `python -m bench.proxy [--quick] [--only NAME ...]`.

Every proxy stands before the same scripted engine and gets the same calls in turns: each cell of a table is
measured for one proxy after the other, in another order each round. Proxies share one core, engine and load
the other, so CPU time and latency of a proxy are its own. *Added* is a proxy's percentile less that of the
same calls without a proxy, of the same round. A rate a core is calls by the proxy's CPU time, which neither
the load nor a busy machine changes much.

`make peers` installs the peers. One that is not there or does not start is named with its own words.
"""

import argparse
import asyncio
import contextlib
import os
import resource
import signal
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import uvloop

from bench.proxy.contenders import MODEL_DIR, OURS, PEERS, CannotRun, Contender, pin, spawned, starting
from bench.proxy.engine import NUM_EVENTS, run_engine
from bench.proxy.load import Agents, Bodies, CallFailed, Line, Slot, connect, run_load, run_streams

KB = 1024
SIZES = {"1 KB": KB, "64 KB": 64 * KB, "1 MB": KB * KB}
RATES = {"1 KB": 100.0, "64 KB": 40.0, "1 MB": 5.0}
"""Calls a second of the latency cells: what the slowest of the proxies can bear."""

IDLE_WATCH_SECONDS = 2.0
IDLE_STEP = 100
"""Streams that are opened at once."""

REFERENCE = "vllm-router"


class Plan(NamedTuple):
    """How much is measured. Seconds are of one turn of one proxy; `max_seconds` of all, once all are up."""

    rounds: int
    connections: tuple[int, ...]
    sizes: tuple[str, ...]
    paced_seconds: dict[str, float]
    full_seconds: float
    num_streams: int
    memory_calls: int
    memory_seconds: float
    num_idle: int
    max_seconds: float


FULL = Plan(
    rounds=2,
    connections=(1, 16, 128),
    sizes=("1 KB", "64 KB", "1 MB"),
    paced_seconds={"1 KB": 2.0, "64 KB": 1.0, "1 MB": 1.0},
    full_seconds=0.5,
    num_streams=16,
    memory_calls=100_000,
    memory_seconds=100.0,
    num_idle=2000,
    max_seconds=1320.0,
)
QUICK = Plan(
    rounds=2,
    connections=(1, 16),
    sizes=("1 KB",),
    paced_seconds={"1 KB": 2.0},
    full_seconds=0.5,
    num_streams=16,
    memory_calls=10_000,
    memory_seconds=2.0,
    num_idle=500,
    max_seconds=140.0,
)


class Seen:
    """Figures by cell and proxy, one a round."""

    def __init__(self) -> None:
        self._values: dict[tuple[str, str], list[float]] = defaultdict(list)
        self.num_calls: dict[tuple[str, str], int] = defaultdict(int)
        self.failures: dict[str, list[str]] = defaultdict(list)

    def add(self, cell: str, name: str, value: float) -> None:
        self._values[cell, name].append(value)

    def values(self, cell: str, name: str) -> list[float]:
        return self._values.get((cell, name), [])

    def count(self, cell: str, contender: Contender, slot: Slot) -> None:
        self.num_calls[cell, contender.name] += slot.num_calls
        if slot.num_failed:
            self.failures[contender.name].append(f"{cell}: {slot.num_failed} failed: {slot.first_failure}")


class Bench:
    """One run of a plan."""

    def __init__(self, plan: Plan, contenders: Sequence[Contender], deadline: float) -> None:
        self._plan = plan
        self._contenders = contenders
        self._agents = Agents()
        self._deadline = deadline
        self.seen = Seen()
        self.cut_short = False

    async def run(self) -> None:
        """Everything of the plan, as far as the time goes."""
        sizes = {name: Bodies(SIZES[name]) for name in self._plan.sizes}
        streams = Bodies(KB, streamed=True)
        for contender in self._contenders:
            await run_load(contender.port, sizes["1 KB"], self._agents, 4, 1.5)
        for number in range(self._plan.rounds):
            for size in self._plan.sizes:
                for connections in self._plan.connections:
                    await self._paced(number, size, sizes[size], connections)
                    await self._full(number, size, sizes[size], connections)
            await self._streams(number, streams)
        await self._memory(sizes["1 KB"])
        await self._idle(Bodies(KB, streamed=True, held=True), sizes["1 KB"])

    def _turns(self, number: int) -> list[Contender]:
        """Everybody's turn, another first each round; nobody's once the time is over."""
        if time.monotonic() > self._deadline:
            self.cut_short = True
            return []
        shift = number * 3 % len(self._contenders)
        return [*self._contenders[shift:], *self._contenders[:shift]]

    async def _paced(self, number: int, size: str, bodies: Bodies, connections: int) -> None:
        cell = f"{size}, {connections}"
        for contender in self._turns(number):
            seconds = self._plan.paced_seconds[size]
            slot = await run_load(contender.port, bodies, self._agents, connections, seconds, RATES[size])
            self.seen.count(f"paced {cell}", contender, slot)
            for percent in (50, 95, 99):
                if slot.seconds:
                    self.seen.add(f"p{percent} {cell}", contender.name, _percentile(slot.seconds, percent))

    async def _full(self, number: int, size: str, bodies: Bodies, connections: int) -> None:
        cell = f"{size}, {connections}"
        for contender in self._turns(number):
            before = contender.cpu_seconds()
            slot = await run_load(contender.port, bodies, self._agents, connections, self._plan.full_seconds)
            used = contender.cpu_seconds() - before
            self.seen.count(f"full {cell}", contender, slot)
            num_answered = slot.num_calls - slot.num_failed
            if num_answered:
                self.seen.add(f"rate {cell}", contender.name, num_answered / slot.wall_seconds)
                self.seen.add(f"cpu {cell}", contender.name, used / num_answered * 1e3)

    async def _streams(self, number: int, bodies: Bodies) -> None:
        for contender in self._turns(number):
            before = contender.cpu_seconds()
            slot = await run_streams(contender.port, bodies, self._agents, self._plan.num_streams)
            used = contender.cpu_seconds() - before
            self.seen.count("streams", contender, slot)
            for percent in (50, 95, 99):
                if slot.seconds:
                    self.seen.add(f"p{percent} streams", contender.name, _percentile(slot.seconds, percent))
            self.seen.add("cpu streams", contender.name, used / self._plan.num_streams * 1e3)

    async def _memory(self, bodies: Bodies) -> None:
        for contender in self._turns(0):
            if not contender.pid:
                continue
            before = contender.memory_mib()
            slot = await run_load(
                contender.port,
                bodies,
                self._agents,
                64,
                self._plan.memory_seconds,
                max_calls=self._plan.memory_calls,
            )
            self.seen.count("memory", contender, slot)
            self.seen.add("memory before", contender.name, before)
            self.seen.add("memory after", contender.name, contender.memory_mib())

    async def _idle(self, held: Bodies, bodies: Bodies) -> None:
        for contender in self._turns(0):
            before, lines = contender.memory_mib(), list[Line]()
            calls = self._agents.calls(held)
            try:
                while len(lines) < self._plan.num_idle:
                    step = [await connect(contender.port) for _ in range(IDLE_STEP)]
                    lines += step
                    await asyncio.gather(*(line.hold(next(calls)) for line in step))
                cpu, memory = contender.cpu_seconds(), contender.memory_mib()
                await asyncio.sleep(IDLE_WATCH_SECONDS)
                idle_share = (contender.cpu_seconds() - cpu) / IDLE_WATCH_SECONDS
                slot = await run_load(contender.port, bodies, self._agents, 1, 1.0, RATES["1 KB"])
                self.seen.count("idle", contender, slot)
                self.seen.add("idle p50", contender.name, _percentile(slot.seconds, 50))
                self.seen.add("idle cpu", contender.name, idle_share * 100)
                self.seen.add("idle memory", contender.name, (memory - before) * KB / len(lines))
            except (TimeoutError, OSError, CallFailed, IndexError) as error:
                self.seen.failures[contender.name].append(
                    f"idle streams: {type(error).__name__} with {len(lines)} of {self._plan.num_idle} open"
                )
            finally:
                for line in lines:
                    line.close()
                await asyncio.sleep(0.5)


def _percentile(values: Sequence[float], percent: int) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, len(ordered) * percent // 100)] * 1e3


class Report:
    """The tables."""

    def __init__(self, plan: Plan, names: Sequence[str], seen: Seen) -> None:
        self._plan = plan
        self._names = names
        self._seen = seen

    def print(self) -> None:
        for size in self._plan.sizes:
            for connections in self._plan.connections:
                self._calls(size, connections)
        self._streams()
        self._memory()
        self._idle()
        for name, failures in self._seen.failures.items():
            print(f"\n{name}: " + "\n".join(dict.fromkeys(failures)))

    def _calls(self, size: str, connections: int) -> None:
        cell = f"{size}, {connections}"
        print(f"\n### Bodies of {size}, {connections} connections\n")
        self._header(
            f"added p50 ms at {RATES[size]:g}/s", "added p95", "added p99", "CPU ms a call",
            f"times {REFERENCE}'s", "calls/s a core", "calls/s", "calls",
        )  # fmt: skip
        for name in self._names:
            cpu = self._seen.values(f"cpu {cell}", name)
            calls = sum(self._seen.num_calls[f"{kind} {cell}", name] for kind in ("paced", "full"))
            self._row(
                name,
                *(self._added(f"p{percent} {cell}", name) for percent in (50, 95, 99)),
                _spread(cpu, 3),
                self._ratio(f"cpu {cell}", name),
                f"{1e3 / statistics.median(cpu):,.0f}" if cpu and any(cpu) else "",
                _spread(self._seen.values(f"rate {cell}", name), 0),
                f"{calls:,}",
            )

    def _streams(self) -> None:
        print(
            f"\n### Streams: {self._plan.num_streams} at a time, {NUM_EVENTS} events each, one every 2 ms\n"
        )
        self._header(
            "added p50 ms an event", "added p95", "added p99", "CPU ms a stream", f"times {REFERENCE}'s"
        )
        for name in self._names:
            self._row(
                name,
                *(self._added(f"p{percent} streams", name) for percent in (50, 95, 99)),
                _spread(self._seen.values("cpu streams", name), 1),
                self._ratio("cpu streams", name),
            )

    def _memory(self) -> None:
        print("\n### Memory\n")
        self._header("MiB before", "MiB after", "calls between", "KiB a call")
        for name in self._names:
            before, after = (self._seen.values(f"memory {when}", name) for when in ("before", "after"))
            calls = self._seen.num_calls["memory", name]
            if before and after and calls:
                grown = (after[0] - before[0]) * KB / calls
                self._row(name, f"{before[0]:.0f}", f"{after[0]:.0f}", f"{calls:,}", f"{grown:.2f}")

    def _idle(self) -> None:
        print(f"\n### {self._plan.num_idle:,} idle streams\n")
        self._header("KiB a stream", "% of a core", "p50 ms of a 1 KB call beside them", "calls")
        for name in self._names:
            cells = [self._seen.values(f"idle {what}", name) for what in ("memory", "cpu", "p50")]
            if all(cells):
                texts = [f"{cell[0]:.{digits}f}" for cell, digits in zip(cells, (1, 1, 2), strict=True)]
                self._row(name, *texts, str(self._seen.num_calls["idle", name]))

    def _header(self, *titles: str) -> None:
        print("| proxy | " + " | ".join(titles) + " |")
        print("|---" * (len(titles) + 1) + "|")

    def _row(self, name: str, *cells: str) -> None:
        print(f"| {name} | " + " | ".join(cells) + " |")

    def _added(self, cell: str, name: str) -> str:
        """What is added to the same round's direct calls; of these themselves, the whole."""
        values, direct = self._seen.values(cell, name), self._seen.values(cell, "direct")
        if name == "direct":
            return f"({_spread(values, 2)})"
        return _spread([mine - theirs for mine, theirs in zip(values, direct, strict=False)], 2)

    def _ratio(self, cell: str, name: str) -> str:
        """Times the reference's, round by round: a busy machine slows both."""
        pairs = zip(self._seen.values(cell, name), self._seen.values(cell, REFERENCE), strict=False)
        return _spread([mine / theirs for mine, theirs in pairs if theirs and mine], 1)


def _spread(values: Sequence[float], digits: int) -> str:
    if not values:
        return ""
    shown: Callable[[float], str] = lambda value: f"{value:,.{digits}f}"  # noqa: E731
    middle = shown(statistics.median(values))
    return middle if len(values) == 1 else f"{middle} ({shown(min(values))}–{shown(max(values))})"


def main() -> None:
    """Run and print."""
    parser = argparse.ArgumentParser(prog="python -m bench.proxy")
    parser.add_argument("--quick", action="store_true", help="3 minutes instead of 23: 1 KB only")
    parser.add_argument("--only", nargs="+", metavar="NAME", choices=(*OURS, *PEERS), help="these proxies")
    wanted = parser.parse_args()
    plan = QUICK if wanted.quick else FULL
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit("stopped"))
    names = ["direct", *(wanted.only or (*OURS, *PEERS))]
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (limits[1], limits[1]))
    cores = sorted(os.sched_getaffinity(0))
    ours, theirs = (cores[0], cores[1]) if len(cores) > 1 else (None, None)
    pin(os.getpid(), theirs)
    loads = [os.getloadavg()[0]]
    with contextlib.ExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        engine_port = stack.enter_context(spawned(run_engine, theirs)).ready()
        on_their_way: dict[str, Callable[[], Contender]] = {}
        contenders = []
        for name in names:
            try:
                on_their_way[name] = stack.enter_context(starting(name, engine_port, directory, ours))
            except CannotRun as reason:
                print(f"{name} does not run here: {reason}")
        for name, ready in on_their_way.items():
            try:
                contenders.append(ready())
            except CannotRun as reason:
                print(f"{name} does not run here: {reason}")
        bench = Bench(plan, contenders, time.monotonic() + plan.max_seconds)
        try:
            uvloop.run(bench.run())
        except KeyboardInterrupt:
            bench.cut_short = True
        loads.append(os.getloadavg()[0])
    print(f"{len(cores)} cores, load average {loads[0]:.1f} before and {loads[1]:.1f} after;", end=" ")
    print(f"{plan.rounds} rounds: median (smallest-largest); mapping {'on' if MODEL_DIR.exists() else 'off'}")
    if bench.cut_short:
        print("The time was over before everything was measured.")
    Report(plan, [c.name for c in contenders], bench.seen).print()
    sys.stdout.flush()


if __name__ == "__main__":
    main()
