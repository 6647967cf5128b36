"""Traces are read whole, exactly and line by line; a line that cannot be is named."""

import gzip
import tempfile
import tracemalloc
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings

from engine_bridge.errors import MalformedTrace
from engine_bridge.sim.traces.calls import Call, ChangeKind, shared_prefix
from engine_bridge.sim.traces.generated import Workload, generated, generated_records
from engine_bridge.sim.traces.reader import TraceFile
from tests.engine_bridge.sim.trace_files import HEADER, lines_of, recorded, workload_lines, workloads, written

BUSY = Workload(num_sessions=3, compaction_tokens=5000, fork_share=0.2, rewrite_share=0.2)


def assert_true_to_its_lines(calls: Iterable[Call], raw: Iterable[bytes]) -> int:
    """Decoded calls against the lines, by a decoder of the test's own. Answers how many there were."""
    session = -1
    ends: list[list[str]] = []
    number = 0
    for call, line in zip(calls, raw, strict=True):
        record = msgspec.json.decode(line)
        if record["s"] != session:
            session, ends = record["s"], []
        kept = ends[record["base"]][: record["keep"]] if record["base"] >= 0 else []
        ids = kept + [each[0] for each in record["new"]]
        assert [message.id for message in call.messages] == ids
        assert sum(message.num_tokens for message in call.messages) == record["in"]
        assert (call.session, call.index, call.context) == (record["s"], record["i"], record["c"])
        assert call.closes == (record.get("post") == [["close"]])
        assert [change.kind for change in call.before] == [event[0] for event in record["pre"]]
        ends.append([*ids, *([record["out"][0]] if record.get("out") else [])])
        number += 1
    return number


@pytest.mark.parametrize(
    "path",
    recorded() or [None],
    ids=lambda path: path.stem if path else "NO-RECORDED-TRACE-HERE-a-made-up-one",
)
def test_every_recorded_trace_reads_through(path: Path | None, tmp_path: Path) -> None:
    path = path or written(tmp_path / "made-up.jsonl", workload_lines(BUSY))
    data = path.read_bytes()
    lines = (gzip.decompress(data) if path.suffix == ".gz" else data).splitlines()
    assert assert_true_to_its_lines(TraceFile(path), lines[1:]) == len(lines) - 1
    assert TraceFile(path).header().license


@given(workloads())
@settings(max_examples=20)
def test_what_is_written_is_read(workload: Workload) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = written(Path(folder) / "t.jsonl", workload_lines(workload))
        assert TraceFile(path).header() == HEADER
        assert list(TraceFile(path)) == list(generated(workload))
        assert list(TraceFile(path)) == list(TraceFile(path)), "each iteration starts anew"


def test_answers_come_back_as_the_answers_of_their_calls(tmp_path: Path) -> None:
    calls = list(TraceFile(written(tmp_path / "t.jsonl", workload_lines(BUSY))))
    answers = {(call.session, call.index): call.answer for call in calls}
    seen = 0
    for call in calls:
        for message in call.messages:
            if message.answer_of >= 0:
                assert answers[call.session, message.answer_of] == message
                assert message.answer_of < call.index
                seen += 1
    assert seen > len(calls)


def test_lifecycle_waits_and_gaps_are_told(tmp_path: Path) -> None:
    calls = list(TraceFile(written(tmp_path / "t.jsonl", workload_lines(BUSY))))
    kinds = {change.kind for call in calls for change in call.before}
    assert kinds == set(ChangeKind) - {ChangeKind.REMOVE}
    for session in range(BUSY.num_sessions):
        mine = [call for call in calls if call.session == session]
        ended: dict[int, Call] = {}
        for call in mine:
            before = ended.get(call.context)
            assert (call.gap_seconds is None) == (before is None)
            if before is not None and call.gap_seconds is not None:
                end = before.at_seconds + before.service_seconds
                assert call.at_seconds == pytest.approx(end + call.gap_seconds)
                assert call.gap_kind == before.waits_for
            else:
                forks = [change for change in call.before if change.kind is ChangeKind.FORK]
                for fork in forks:
                    parent = ended[call.parent]
                    assert shared_prefix(parent.list_after, call.messages) >= fork.num_messages
            ended[call.context] = call
        assert {call.context for call in mine if call.closes} == set(ended)


def _with(**changes: Any) -> Callable[[dict[str, Any]], dict[str, Any]]:
    return lambda record: {**record, **changes}


def _without(name: str) -> Callable[[dict[str, Any]], dict[str, Any]]:
    return lambda record: {key: value for key, value in record.items() if key != name}


@pytest.mark.parametrize(
    "spoil",
    [
        lambda record: {**record, "in": record["in"] + 1},
        lambda record: {**record, "keep": record["keep"] + 50},
        lambda record: {**record, "base": record["i"]},
        lambda record: {**record, "i": record["i"] + 1},
        lambda record: {**record, "t": -1.0},
        lambda record: {**record, "new": [["x", "q", 1]]},
        lambda record: {**record, "new": [["x", "u", -1], ["y", "u", record["new"][0][2] + 1]]},
        _with(base=-1),
        _with(base=-2),
        _with(keep=-1),
        _with(pre=[]),
        _with(pre=[["create"]]),
        _with(pre=[["append", 2]]),
        _with(pre=[["melt", 1]]),
        _with(c=77),
        _with(s=1, i=0, base=-1, keep=0),
        _with(post=[["open"]]),
        _with(colour="red"),
        _without("in"),
        _without("t"),
    ],
)
def test_a_line_that_cannot_be_is_named(spoil: Any, tmp_path: Path) -> None:
    lines = workload_lines(
        Workload(num_sessions=1, num_turns=6, fork_share=0, spawn_share=0, rewrite_share=0)
    )
    record = spoil(msgspec.json.decode(lines[3]))
    lines[3] = msgspec.json.encode(record)
    path = written(tmp_path / "spoilt.jsonl", lines)
    reading = iter(TraceFile(path))
    assert next(reading).index == 0
    assert next(reading).index == 1, "what stands before the line is read"
    with pytest.raises(MalformedTrace) as raised:
        next(reading)
    assert raised.value.line == 4
    assert str(path) in str(raised.value)
    assert "line 4" in str(raised.value)


def test_a_context_that_was_closed_makes_no_call_and_sessions_ascend(tmp_path: Path) -> None:
    records = list(generated_records(Workload(num_sessions=2, num_turns=4, fork_share=0, spawn_share=0)))
    closed = msgspec.structs.replace(records[1], post=(("close",),))
    path = written(tmp_path / "closed.jsonl", lines_of([records[0], closed, *records[2:]]))
    with pytest.raises(MalformedTrace, match="closed"):
        list(TraceFile(path))
    path = written(tmp_path / "mixed.jsonl", lines_of([records[0], records[4], records[1]]))
    with pytest.raises(MalformedTrace, match="behind session"):
        list(TraceFile(path))


@pytest.mark.parametrize(
    "first",
    [
        b"",
        b"{}",
        b'{"header": {}}',
        msgspec.json.encode({"header": {**msgspec.to_builtins(HEADER), "fmt": 2}}),
    ],
)
def test_a_file_without_a_header_of_ours_is_refused(first: bytes, tmp_path: Path) -> None:
    path = written(tmp_path / "t.jsonl", [first])
    with pytest.raises(MalformedTrace, match="line 1"):
        TraceFile(path).header()
    with pytest.raises(MalformedTrace, match="line 1"):
        list(TraceFile(path))


def test_an_archive_that_breaks_off_is_no_short_trace(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl.gz"
    whole = gzip.compress(b"\n".join(workload_lines(BUSY)))
    path.write_bytes(whole)
    assert len(list(TraceFile(path))) > 50
    path.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(MalformedTrace, match=r"t\.jsonl\.gz, line \d+"):
        list(TraceFile(path))


def test_a_file_is_read_in_the_memory_of_its_longest_session(tmp_path: Path) -> None:
    one = list(generated_records(Workload(num_sessions=1, num_turns=5)))
    many = (msgspec.structs.replace(record, s=each) for each in range(2000) for record in one)
    path = written(tmp_path / "long.jsonl", lines_of(many))
    calls = iter(TraceFile(path))
    first = next(calls)
    tracemalloc.start()
    assert first.session == 0
    assert sum(1 for _ in calls) == 2000 * len(one) - 1
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert most < path.stat().st_size / 10
