"""Load with everything that goes wrong, and a verdict.

    python -m bench.soak [--minutes 30] [--log redis|sqlite] [--seed 1]

Half the time on a Redis log, half on a SQLite log. Two dozen agents keep calling a proxy in enforce; some
hang up, reset or read slowly, and the engine breaks one answer in 25 off. Meanwhile the engine is killed and
started again, Redis is killed and started again, and the SQLite file is held locked by another process. At
the end the agents stop, and these must be true:

- every answer, whole or broken off, is what the engine sent, byte for byte, and every request what the client
  sent, but for the members that are ours;
- every call whose answer a client read to the end is in the event log, arrived and ended once as completed,
  and no call in the log is without its end;
- no context is open, nothing is pinned, no call is under way, nothing waits for the log;
- tasks, files and sockets are as few as before the load;
- memory does not grow: its slope from the tenth minute on, when everything that is kept has its full size.
"""

import argparse
import asyncio
import contextlib
import multiprocessing
import os
import random
import signal
import sqlite3
import sys
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, NamedTuple

from bench.soak.agents import Fleet, Ledger
from bench.soak.engine import run_engine
from bench.soak.victim import serve
from lifecycle.core.events import CallArrived, CallEnded, DirectiveSettled, UntrackedForwarded
from lifecycle.errors import LogUnavailable
from lifecycle.ports import EventLog
from lifecycle.store.opening import open_log
from lifecycle.vocabulary import CallEnd
from tests.lifecycle.store.redis_process import RedisProcess
from tests.proxy.toy_model import write_model

LANES = 24
PAUSE_SECONDS = 0.15
SAMPLE_SECONDS = 5.0
READ_LOG_SECONDS = 10.0
TROUBLE_SECONDS = (12.0, 25.0)
"""Shortest and longest time between two troubles."""

ENGINE_AWAY_SECONDS = 1.5
REDIS_AWAY_SECONDS = 3.0
SQLITE_LOCKED_SECONDS = 8.0
"""Longer than the proxy waits for a lock."""

IDLE_SECONDS = 90.0
"""How long the proxy has to come to rest: pins and doubts run out by the clock."""

SLOPE_MIB_A_MINUTE = 2.0
"""Growth that is not called a leak: the noise of an allocator over minutes."""

SPARE_FILES = 16
"""A pool's connections to the log, opened when they are needed for the first time, and kept."""

STEADY_SECONDS = 600.0
"""What is kept for a while fills up until then: what was freed is remembered for ten minutes."""

JUDGED_SECONDS = 240.0
"""From less than that nobody can tell a leak from noise."""

_SPAWN = multiprocessing.get_context("spawn")


class Child:
    """A process and the pipe to it."""

    def __init__(self, target: Callable[..., None], *arguments: object) -> None:
        self.pipe, theirs = _SPAWN.Pipe()
        self.process: BaseProcess = _SPAWN.Process(target=target, args=(theirs, *arguments))
        self.process.start()
        theirs.close()

    async def hear(self, seconds: float = 120.0) -> Any:
        """What it says next."""
        return await asyncio.to_thread(_receive, self.pipe, seconds)

    async def ask(self) -> dict[str, Any]:
        """What it holds."""
        self.pipe.send("held")
        held: dict[str, Any] = await self.hear()
        return held

    def end(self, *, kill: bool = False) -> None:
        """End it and wait."""
        (self.process.kill if kill else self.process.terminate)()
        self.process.join(60)
        if self.process.is_alive():
            self.process.kill()
            self.process.join()


def _receive(pipe: Connection, seconds: float) -> Any:
    if not pipe.poll(seconds):
        raise TimeoutError("a process does not answer")
    return pipe.recv()


class LogReader:
    """Reads the proxy's log behind it, as it is written: it will be trimmed."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._log: EventLog | None = None
        self.position = 0
        self.num_missed = 0
        self.arrived: Counter[str] = Counter()
        self.ended: dict[str, list[CallEnd]] = {}
        self.settled: Counter[str] = Counter()
        self.untracked: Counter[str] = Counter()

    async def read(self) -> bool:
        """Take in what is new; False while the log is away."""
        try:
            if self._log is None:
                self._log = (await open_log(self._url)).event_log
            if await self._log.first_position() > self.position + 1:
                self.num_missed += 1
            async for recorded in self._log.read_all(self.position):
                self.position = recorded.position
                match recorded.event:
                    case CallArrived(call_id=call):
                        self.arrived[call] += 1
                    case CallEnded(call_id=call, end=end):
                        self.ended.setdefault(call, []).append(end)
                    case DirectiveSettled(result=result):
                        self.settled[result.outcome] += 1
                    case UntrackedForwarded(reason=reason):
                        self.untracked[reason] += 1
                    case _:
                        pass
        except LogUnavailable:
            return False
        return True

    async def close(self) -> None:
        if self._log is not None:
            with suppress(LogUnavailable):
                await self._log.close()


class World(NamedTuple):
    """What can be troubled."""

    directory: Path
    redis: RedisProcess | None
    engine: list[Child]
    engine_port: int

    async def trouble(self, chance: random.Random) -> str:
        """Do one thing that goes wrong, and undo it."""
        if chance.random() < 0.5:
            self.engine[0].end(kill=True)
            await asyncio.sleep(ENGINE_AWAY_SECONDS)
            self.engine[0] = Child(run_engine, self.engine_port)
            await self.engine[0].hear()
            return "engine killed and started"
        if self.redis is not None:
            self.redis.kill()
            await asyncio.sleep(REDIS_AWAY_SECONDS)
            await asyncio.to_thread(self.redis.start)
            return "Redis killed and started"
        with contextlib.closing(sqlite3.connect(self.directory / "log.db", isolation_level=None)) as other:
            other.execute("BEGIN IMMEDIATE")
            await asyncio.sleep(SQLITE_LOCKED_SECONDS)
            other.execute("ROLLBACK")
        return "SQLite locked and let go"


@asynccontextmanager
async def world(kind: str, directory: Path) -> AsyncIterator[tuple[World, Child, str, str]]:
    """Log, engine and proxy; with the proxy's data URL and the log's."""
    with contextlib.ExitStack() as stack:
        redis = None
        if kind == "redis":
            redis = await asyncio.to_thread(RedisProcess(directory / "redis").start)
            stack.callback(redis.kill)
        log_url = redis.url if redis is not None else f"sqlite:///{directory}/log.db"
        model = write_model(directory / "model")
        engine = Child(run_engine, 0)
        port = await engine.hear()
        made = World(directory, redis, [engine], port)
        stack.callback(lambda: made.engine[0].end(kill=True))
        proxy = Child(serve, f"http://127.0.0.1:{port}", log_url, str(model), str(directory / "said"))
        stack.callback(proxy.end)
        data_url, _ = await proxy.hear()
        yield made, proxy, data_url, log_url


async def soak(kind: str, seconds: float, seed: int) -> list[str]:
    """One part of the soak; answers what was wrong with it."""
    chance = random.Random(seed)
    ledger, troubles = Ledger(), Counter[str]()
    memory: list[tuple[float, float]] = []
    with tempfile.TemporaryDirectory() as folder:
        async with world(kind, Path(folder)) as (made, proxy, data_url, log_url):
            port = int(data_url.rsplit(":", 1)[1])
            reader = LogReader(log_url)
            fleet = Fleet(port, ledger, kind, seed)
            before = await proxy.ask()
            began = time.monotonic()

            async def make_trouble() -> None:
                while True:
                    await asyncio.sleep(chance.uniform(*TROUBLE_SECONDS))
                    troubles[await made.trouble(chance)] += 1

            async def watch() -> None:
                while True:
                    await asyncio.sleep(SAMPLE_SECONDS)
                    held = await proxy.ask()
                    memory.append((time.monotonic() - began, held["memory MiB"]))

            async def follow() -> None:
                while True:
                    await reader.read()
                    await asyncio.sleep(READ_LOG_SECONDS)

            async with asyncio.TaskGroup() as group:
                load = group.create_task(fleet.run(LANES, PAUSE_SECONDS))
                others = [group.create_task(work()) for work in (make_trouble, watch, follow)]
                await asyncio.sleep(seconds * 0.9)
                others[0].cancel()
                await asyncio.wait(others[:1])
                await _whole(made)
                await asyncio.sleep(seconds * 0.1)
                fleet.stopping.set()
                await load
                await fleet.close_again((await proxy.ask())["names"])
                after = await _at_rest(proxy, before)
                for other in others[1:]:
                    other.cancel()
            for _ in range(30):
                if await reader.read():
                    break
                await asyncio.sleep(1)
            await reader.close()
        ledger.surprises.update(_tracebacks(Path(folder) / "said"))
    return _judge(kind, ledger, reader, before, after, memory, troubles)


async def _whole(made: World) -> None:
    """A trouble may have been cut off half-way: everything is up again for the end."""
    if not made.engine[0].process.is_alive():
        made.engine[0] = Child(run_engine, made.engine_port)
        await made.engine[0].hear()
    if made.redis is not None:
        made.redis.kill()
        await asyncio.to_thread(made.redis.start)


async def _at_rest(proxy: Child, before: dict[str, Any]) -> dict[str, Any]:
    until = time.monotonic() + IDLE_SECONDS
    while True:
        held = await proxy.ask()
        if not _left(before, held) or time.monotonic() > until:
            return held
        await asyncio.sleep(1)


def _left(before: dict[str, Any], held: dict[str, Any]) -> list[str]:
    """What is left that should be gone."""
    none = ("open contexts", "pins", "holds in the cache", "calls under way", "observations that wait")
    left = [f"{name}: {held[name]}" for name in none if held[name]]
    for name, spare in (("tasks", 2), ("files and sockets", SPARE_FILES)):
        if held[name] > before[name] + spare:
            left.append(f"{name}: {held[name]}, {before[name]} before")
    return left


def _judge(
    kind: str,
    ledger: Ledger,
    reader: LogReader,
    before: dict[str, Any],
    after: dict[str, Any],
    memory: list[tuple[float, float]],
    troubles: Counter[str],
) -> list[str]:
    faults = [f"left behind: {what}" for what in _left(before, after)]
    faults += [f"wrong bytes: {what}" for what in ledger.wrong]
    faults += [f"surprise: {what}, {count} times" for what, count in ledger.surprises.items()]
    unknown = [call for call in ledger.completed if reader.ended.get(call) != [CallEnd.COMPLETED]]
    unknown += [call for call in ledger.completed if reader.arrived[call] != 1]
    if unknown:
        told = [(call, reader.arrived[call], reader.ended.get(call)) for call in unknown[:5]]
        faults.append(f"lost or doubled events: {len(unknown)} calls, such as {told}")
    if reader.num_missed:
        faults.append("the log was trimmed before it was read: what it held is not known")
    endless = [call for call in reader.arrived if len(reader.ended.get(call, ())) != reader.arrived[call]]
    if endless:
        faults.append(f"calls without an end: {len(endless)}, such as {endless[:5]}")
    steady = [sample for sample in memory if sample[0] > STEADY_SECONDS]
    judged = bool(steady) and steady[-1][0] - steady[0][0] >= JUDGED_SECONDS
    slope = _slope(steady)
    if judged and slope > SLOPE_MIB_A_MINUTE:
        faults.append(f"memory grows by {slope:.1f} MiB a minute")
    print(f"\n## {kind}\n")
    for name, count in sorted({**ledger.counts, **troubles}.items()):
        print(f"- {name}: {count:,}")
    print(f"- completed calls that the log was searched for: {len(ledger.completed):,}")
    print(f"- events read: {reader.position:,}; calls in the log: {len(reader.arrived):,}")
    print(f"- directives by outcome: {dict(reader.settled)}; untracked: {dict(reader.untracked)}")
    shown = ", ".join(f"{value:.0f}" for _, value in memory[:: max(1, len(memory) // 12)])
    told = f"{slope:+.2f} a minute from {STEADY_SECONDS:.0f} s on" if judged else "too short to judge"
    print(f"- memory MiB over time: {shown}; {told}")
    for name in (name for name in before if name != "names"):
        print(f"- {name}: {before[name]:,.0f} before, {after[name]:,.0f} at rest")
    if after["open contexts"]:
        print(f"- still open: {after['names'][:5]}")
    for fault in faults:
        print(f"- FAULT: {fault}")
    return faults


def _tracebacks(said: Path) -> Counter[str]:
    """What the proxy logged of its own faults, by the exception that ended each."""
    found = Counter[str]()
    inside = False
    for line in said.read_text(errors="replace").splitlines():
        if line.startswith("Traceback"):
            inside = True
        elif inside and line and not line[0].isspace():
            found[f"the proxy logged {line[:200]}"] += 1
            inside = False
    return found


def _slope(samples: list[tuple[float, float]]) -> float:
    """MiB a minute, by least squares."""
    if len(samples) < 3:
        return 0.0
    mean_x = sum(x for x, _ in samples) / len(samples)
    mean_y = sum(y for _, y in samples) / len(samples)
    over = sum((x - mean_x) * (y - mean_y) for x, y in samples)
    return over / sum((x - mean_x) ** 2 for x, _ in samples) * 60


def main() -> None:
    """Run and say whether it held."""
    parser = argparse.ArgumentParser(prog="python -m bench.soak")
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--log", choices=("redis", "sqlite"), help="only this one")
    parser.add_argument("--seed", type=int, default=1)
    wanted = parser.parse_args()
    kinds = (wanted.log,) if wanted.log else ("redis", "sqlite")
    load = os.getloadavg()[0]
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit("stopped"))
    faults: list[str] = []
    for kind in kinds:
        faults += asyncio.run(soak(kind, wanted.minutes * 60 / len(kinds), wanted.seed))
    print(f"\nload average {load:.1f} before, {os.getloadavg()[0]:.1f} after")
    print(f"VERDICT: {len(faults)} faults" if faults else "VERDICT: it held")
    sys.exit(bool(faults))


if __name__ == "__main__":
    main()
