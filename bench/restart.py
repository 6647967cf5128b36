"""Restart time of the books, from a snapshot and from the whole log; what a snapshot costs while calls go on.

    python -m bench.restart [--contexts 10000] [--tokens 100000] [--calls 5] [--repeats 3] [--directory DIR]

Contexts have about a hundred messages behind one system prompt of 4,096 tokens that all share, in chunks of
256 tokens, every chunk shown by the cache. They grew over some calls, whose events lie in a SQLite log. A
restart is the time from opening the log until the books are as they were, which their digests prove. A pause
is the longest time that a task which sleeps for a millisecond at a time was kept waiting beyond it. A cell is
the median, then the smallest and the largest.
"""

import argparse
import asyncio
import gc
import random
import statistics
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

from bench.index import CHUNK, NAMESPACE, SYSTEM_TOKENS, Agent, message_sizes, resident_bytes, shown
from lifecycle.core.events import ChunksConfirmed
from lifecycle.core.ids import KEY_BYTES, context_stream
from lifecycle.core.observations import CloseRequested
from lifecycle.log_keeper import LogKeeper
from lifecycle.store.snapshots import SqlSnapshots
from lifecycle.store.sql import SqlEventLog
from lifecycle.tracker import Tracker
from proxy.system import SystemClock

MESSAGES = 100
CHANGED_SHARE = 100
"""One context in so many is spoken to between two snapshots."""

MIB = 2**20


async def fill(log: SqlEventLog, num_contexts: int, num_tokens: int, num_calls: int, seed: int) -> int:
    """Record contexts after their calls; answers how many events that took."""
    rng = random.Random(seed)
    system = rng.randbytes(SYSTEM_TOKENS // CHUNK * KEY_BYTES)
    namespace_version = 0

    async def record(number: int) -> None:
        agent = Agent(rng, f"context-{number}", system)
        for _ in range(num_calls):
            agent.grow(message_sizes(rng, MESSAGES // num_calls, (num_tokens - SYSTEM_TOKENS) // num_calls))
            agent.call(1)
        events = [event for event, _, after in agent.steps if after is not None]
        await log.append(context_stream(agent.state.uid), events, 0)
        reports.append(shown(agent.state))

    reports: list[ChunksConfirmed] = []
    for start in range(0, num_contexts, 50):
        reports.clear()
        await asyncio.gather(*map(record, range(start, min(start + 50, num_contexts))))
        recorded = await log.append(NAMESPACE.stream(), reports, namespace_version)
        namespace_version = recorded[-1].version
    return await log.head()


async def touch(tracker: Tracker, num_contexts: int) -> None:
    """Let a few contexts end, as calls would between two snapshots."""
    for number in range(0, num_contexts, CHANGED_SHARE):
        await tracker.observe(f"context-{number}", CloseRequested(at_ns=10**18 + 10**11, reason="bench"))


async def paused(work: Callable[[], Awaitable[None]]) -> tuple[float, float]:
    """Seconds that the work took, and the longest pause of the event loop meanwhile, in milliseconds."""
    worst, done = 0.0, False

    async def watch() -> None:
        nonlocal worst
        while not done:
            began = time.perf_counter()
            await asyncio.sleep(0.001)
            worst = max(worst, time.perf_counter() - began - 0.001)

    watching = asyncio.ensure_future(watch())
    await asyncio.sleep(0.01)
    worst = 0.0
    began = time.perf_counter()
    await work()
    took = time.perf_counter() - began
    done = True
    await watching
    return took, worst * 1e3


def cell(values: list[float], digits: int = 1) -> str:
    """Median, smallest and largest."""
    middle, low, high = statistics.median(values), min(values), max(values)
    return f"{middle:,.{digits}f} ({low:,.{digits}f}-{high:,.{digits}f})"


async def started(url: str, with_snapshots: bool) -> tuple[float, SqlEventLog, LogKeeper]:
    """Seconds from opening the log to complete books."""
    gc.collect()
    began = time.perf_counter()
    log = await SqlEventLog.open(url)
    keeper = LogKeeper(Tracker(log, SystemClock()), log)
    if with_snapshots:
        await keeper.start(SqlSnapshots(log.engine))
    else:
        await keeper.tracker.start()
    return time.perf_counter() - began, log, keeper


async def run(options: argparse.Namespace, directory: Path) -> None:
    """Print the table."""
    path = directory / "events.db"
    url = f"sqlite:///{path}"
    log = await SqlEventLog.open(url)
    num_events = await fill(log, options.contexts, options.tokens, options.calls, options.seed)
    await log.close()
    print(f"contexts                            {options.contexts:>10,}")
    print(f"events                              {num_events:>10,}")
    print(f"log                                 {path.stat().st_size / MIB:>10,.0f} MiB")

    whole: list[float] = []
    for _ in range(options.repeats):
        took, log, keeper = await started(url, with_snapshots=False)
        whole.append(took)
        await log.close()
        del keeper
    print(f"start from the whole log, s         {cell(whole):>24}")

    _, log, keeper = await started(url, with_snapshots=True)
    tracker, before = keeper.tracker, resident_bytes()
    took, pause = await paused(keeper.snapshot)
    print(f"first snapshot                      {keeper.size_bytes / MIB:>10,.0f} MiB")
    print(f"written beside calls in             {took:>10,.1f} s")
    print(f"longest pause of the event loop     {pause:>10,.1f} ms")
    print(f"books at rest                       {keeper.rest_seconds * 1e3:>10,.0f} ms")
    print(f"memory beyond the books             {(resident_bytes() - before) / MIB:>10,.0f} MiB")
    await touch(tracker, options.contexts)
    took, pause = await paused(keeper.snapshot)
    print(f"next snapshot, 1 context in {CHANGED_SHARE}     {keeper.size_bytes / MIB:>10,.0f} MiB")
    print(f"written beside calls in             {took:>10,.1f} s")
    print(f"longest pause of the event loop     {pause:>10,.1f} ms")
    digest = tracker.contexts.index.digest()
    await log.close()
    del keeper, tracker

    restarts: list[float] = []
    for _ in range(options.repeats):
        took, log, keeper = await started(url, with_snapshots=True)
        restarts.append(took)
        if keeper.tracker.contexts.index.digest() != digest:
            raise RuntimeError("the restart made other books")
        await log.close()
        del keeper
    print(f"start from the snapshot, s          {cell(restarts):>24}")
    print(
        f"times as fast as the whole log      {statistics.median(whole) / statistics.median(restarts):>10.1f}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--contexts", type=int, default=10_000)
    parser.add_argument("--tokens", type=int, default=100_000, help="of each context")
    parser.add_argument("--calls", type=int, default=5, help="of each context")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--directory", type=Path, help="where the log lies; default: a temporary one")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.directory) as directory:
        asyncio.run(run(options, Path(directory)))


if __name__ == "__main__":
    main()
