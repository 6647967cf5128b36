"""Recorded lives lead to the same events and the same states for ever."""

import json
from pathlib import Path

import pytest

from tests.lifecycle.core.golden_traces import SCRIPTS, TRACES, file_of, lived, told


@pytest.mark.parametrize("trace", sorted(TRACES.glob("*.jsonl")), ids=lambda p: p.stem)
def test_a_recorded_life_is_decided_as_it_was(trace: Path) -> None:
    lines = [json.loads(text) for text in trace.read_text().splitlines()]
    assert lines
    for number, (line, (events, state_digest)) in enumerate(zip(lines, lived(lines), strict=True), 1):
        assert events == line["events"], f"line {number}: {line['type']}"
        assert state_digest == line["digest"], f"line {number}: {line['type']}"


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda s: s.__name__)
def test_the_files_are_what_the_scripts_tell(script) -> None:  # type: ignore[no-untyped-def]
    recorded = [json.loads(text) for text in file_of(script).read_text().splitlines()]
    assert recorded == list(told(script()))
