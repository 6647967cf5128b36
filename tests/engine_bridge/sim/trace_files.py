"""Trace files for tests: the recorded ones where they lie, and made-up ones everywhere."""

import os
from collections.abc import Iterable
from pathlib import Path

import msgspec
from hypothesis import strategies as st

from engine_bridge.sim.traces.generated import Workload, generated_records
from engine_bridge.sim.traces.reader import Header, Record

VARIABLE = "KVTETHER_TRACES"
FOLDER = Path(os.environ.get(VARIABLE) or Path(__file__).resolve().parents[4] / "shared" / "data" / "traces")
"""Recorded traces are data, not code: they lie beside the repository or where the variable says."""

HEADER = Header(src="tests", commit="0", license="Apache-2.0", timing="none")


def recorded() -> list[Path]:
    """The recorded traces. A folder that was named and has none is an error."""
    found = sorted(FOLDER.glob("*.jsonl.gz"))
    if os.environ.get(VARIABLE) and not found:
        raise FileNotFoundError(f"{VARIABLE} is {FOLDER}, and no trace lies there")
    return found


def lines_of(records: Iterable[Record]) -> list[bytes]:
    """A trace's lines, header first."""
    encode = msgspec.json.Encoder().encode
    return [encode({"header": HEADER}), *map(encode, records)]


def written(path: Path, lines: Iterable[bytes]) -> Path:
    path.write_bytes(b"".join(line + b"\n" for line in lines))
    return path


def workload_lines(workload: Workload) -> list[bytes]:
    return lines_of(generated_records(workload))


def workloads(max_sessions: int = 4) -> st.SearchStrategy[Workload]:
    """Small workloads in which everything happens often."""
    return st.builds(
        Workload,
        seed=st.integers(0, 10_000),
        num_sessions=st.integers(1, max_sessions),
        num_turns=st.integers(2, 30),
        num_kinds=st.integers(1, 3),
        tools_tokens=st.integers(1, 60),
        system_tokens=st.integers(2, 40),
        task_tokens=st.integers(1, 30),
        result_tokens=st.integers(1, 60),
        answer_tokens=st.integers(1, 20),
        compaction_tokens=st.integers(100, 2000),
        rewrite_share=st.floats(0, 0.5),
        fork_share=st.floats(0, 0.3),
        spawn_share=st.floats(0, 0.3),
    )
