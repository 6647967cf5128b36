"""Append latency and throughput of the durable event logs, beside each other: SQLite with group commit, and
Redis Streams.

    python -m bench.event_log [--repeats 5] [--seconds 1.5] [--directory DIR]

Every append records one turn of an agent: a call that arrived with two new messages, and its mapping of four
chunks. At concurrency n, n streams each wait for their append before the next one. Each repeat runs on a
fresh log after a warm-up, SQLite and Redis in turn; a cell is the median over the repeats, then the smallest
and the largest, and the ratio compares the two of each repeat. The Redis server is started on this machine,
on loopback, and syncs its file before it answers.
"""

import argparse
import asyncio
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from lifecycle.core.events import CallArrived, CallMapped, Event, PrefillDone
from lifecycle.core.observations import MessageFact
from lifecycle.store.codec import encode
from lifecycle.store.opening import open_log
from lifecycle.vocabulary import MappingKind
from tests.lifecycle.store.redis_process import RedisProcess

CONCURRENCY = (1, 16, 64)
WARM_UP_APPENDS = 20
FSYNCS = 200

MESSAGES = (MessageFact(b"\x01" * 16, "assistant"), MessageFact(b"\x02" * 16, "tool"))
TURN: tuple[Event, ...] = (
    CallArrived(at_ns=1_764_000_000_000_000_000, call_id="call-0000000000000000", attempt=1, kept=40,
                head=b"\x03" * 16, messages=MESSAGES),
    CallMapped(at_ns=1_764_000_000_000_000_000, call_id="call-0000000000000000", attempt=1,
               kind=MappingKind.EXACT, num_tokens=20_000, tools_end=4_000, chunk_size=256, first_changed=41,
               ends=(19_700, 19_990), first_chunk=74, keys=bytes(range(128))),
    PrefillDone(at_ns=1_764_000_000_000_000_000, call_id="call-0000000000000000", attempt=1),
)  # fmt: skip


async def measure(url: str, concurrency: int, seconds: float) -> tuple[float, float, float]:
    """Latency p50 and p99 in milliseconds, and appends a second."""
    log, *_ = await open_log(url)
    latencies: list[float] = []

    async def turns(name: str, until: float, most: int | None = None) -> None:
        version = 0
        while time.perf_counter() < until and (most is None or version < most * len(TURN)):
            began = time.perf_counter()
            await log.append(name, TURN, version)
            latencies.append(time.perf_counter() - began)
            version += len(TURN)

    await turns("warm-up", time.perf_counter() + seconds, most=WARM_UP_APPENDS)
    latencies.clear()
    began = time.perf_counter()
    await asyncio.gather(*(turns(f"ctx/{n}", began + seconds) for n in range(concurrency)))
    took = time.perf_counter() - began
    await log.close()
    latencies.sort()
    p50, p99 = (latencies[int(len(latencies) * share)] * 1e3 for share in (0.5, 0.99))
    return p50, p99, len(latencies) / took


def fsync_ms(directory: Path) -> float:
    """Median time of one 4 KiB write and fsync: what no durable append can beat."""
    with tempfile.NamedTemporaryFile(dir=directory) as file:
        times = []
        for _ in range(FSYNCS):
            began = time.perf_counter()
            file.write(b"x" * 4096)
            file.flush()
            os.fsync(file.fileno())
            times.append(time.perf_counter() - began)
    return statistics.median(times) * 1e3


def cell(values: list[float], digits: int) -> str:
    """Median, smallest and largest."""
    return f"{statistics.median(values):.{digits}f} ({min(values):.{digits}f}-{max(values):.{digits}f})"


@contextmanager
def logs(directory: Path) -> Iterator[dict[str, Callable[[str], str]]]:
    """By kind of log, what gives the URL of a fresh one for each name."""
    server = RedisProcess(directory / "redis").start()
    try:
        yield {
            "SQLite": lambda name: f"sqlite:///{directory}/{name}.db",
            "Redis": lambda name: f"{server.url}?prefix={name}",
        }
    finally:
        server.kill()


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=1.5, help="length of one repeat at one concurrency")
    parser.add_argument("--directory", type=Path, default=None, help="where the files go; decides the disk")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.directory) as directory, logs(Path(directory)) as kinds:
        print(f"one append: {len(TURN)} events, {sum(len(encode(e)) for e in TURN)} bytes encoded")
        print(f"write and fsync of 4 KiB here: {fsync_ms(Path(directory)):.2f} ms (median of {FSYNCS})\n")
        print("| appends at once | log | p50 ms | p99 ms | appends/s | p50, times SQLite's |")
        print("|---|---|---|---|---|---|")
        for concurrency in CONCURRENCY:
            results: dict[str, list[tuple[float, float, float]]] = {kind: [] for kind in kinds}
            for n in range(options.repeats):
                for kind, url_of in kinds.items():
                    url = url_of(f"{concurrency}-{n}")
                    results[kind].append(asyncio.run(measure(url, concurrency, options.seconds)))
            reference = [p50 for p50, _, _ in results["SQLite"]]
            for kind, measured in results.items():
                p50s, p99s, rates = (list(column) for column in zip(*measured, strict=True))
                ratios = [p50 / other for p50, other in zip(p50s, reference, strict=True)]
                cells = [cell(p50s, 2), cell(p99s, 2), cell(rates, 0), cell(ratios, 2)]
                print(f"| {concurrency} | {kind} | {' | '.join(cells)} |")


if __name__ == "__main__":
    main()
