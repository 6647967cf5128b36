"""What is written: a line an event, JSON for programs, with the request's id, and no flood of one warning."""

import json
import logging
import sys
from collections.abc import Iterator

import pytest
import structlog
from hypothesis import given
from hypothesis import strategies as st

from proxy.log_output import BURST, MAX_EVENTS, WINDOW_SECONDS, RepeatLimit, configure_logging, set_level
from proxy.request_record import RequestRecord, run_for


@pytest.fixture(autouse=True)
def as_before() -> Iterator[None]:
    """Logging is the process's own."""
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield
    structlog.reset_defaults()
    root.handlers[:], root.level = handlers, level


def told(capsys: pytest.CaptureFixture[str]) -> list[dict[str, object]]:
    return [json.loads(line) for line in capsys.readouterr().err.splitlines()]


def test_a_line_is_an_object_with_the_requests_id(capsys: pytest.CaptureFixture[str]) -> None:
    configure_logging("info", "json")
    log = structlog.get_logger("x")
    run_for(RequestRecord("r1"))
    try:
        log.info("it happened", number=1, path=object)
        log.debug("not told")
    finally:
        run_for(None)
    log.warning("a line\nbreak")
    first, second = told(capsys)
    assert list(first)[:3] == ["timestamp", "level", "event"]
    assert (first["event"], first["level"], first["request_id"]) == ("it happened", "info", "r1")
    assert "request_id" not in second
    assert second["event"] == "a line\nbreak"


def test_libraries_and_tracebacks_come_out_alike(capsys: pytest.CaptureFixture[str]) -> None:
    configure_logging("info", "json")
    logging.getLogger("some.library").warning("about %s", "it")
    logging.getLogger("some.library").info("chatter")
    try:
        raise RuntimeError("why")
    except RuntimeError:
        structlog.get_logger().exception("it failed")
        logging.getLogger("another").exception("so did this")
    library, ours, theirs = told(capsys)
    assert (library["event"], library["logger"], library["level"]) == ("about it", "some.library", "warning")
    assert "RuntimeError: why" in str(ours["exception"])
    assert "RuntimeError: why" in str(theirs["exception"])


@pytest.mark.parametrize("form", ["json", "console"])
def test_a_traceback_tells_nothing_of_what_its_frames_held(
    form: str, capsys: pytest.CaptureFixture[str]
) -> None:
    configure_logging("info", form)

    def fails(prompt: str) -> None:
        headers = {"authorization": f"Bearer {prompt}"}
        raise RuntimeError(f"{len(headers)} header")

    marker = "".join(["what the ", "client said"])
    try:
        fails(marker)
    except RuntimeError:
        structlog.get_logger().exception("it failed")
        logging.getLogger("a.library").exception("so did this")
    lines = capsys.readouterr().err
    assert lines.count("RuntimeError: 1 header") == 2
    assert marker not in lines


def test_a_terminal_reads_lines_for_people(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    configure_logging("info", "console")
    structlog.get_logger().info("it happened", number=1)
    assert "it happened" in (line := capsys.readouterr().err)
    assert "number=1" in line
    assert not line.startswith("{")
    configure_logging("info", "auto")
    assert not sys.stderr.isatty()
    structlog.get_logger().info("it happened")
    assert told(capsys)[0]["event"] == "it happened"


def test_the_level_can_be_changed_while_it_runs(capsys: pytest.CaptureFixture[str]) -> None:
    configure_logging("warning", "json")
    log = structlog.get_logger("module's own, as old as the process")
    log.info("before")
    set_level("debug")
    log.debug("after")
    assert [line["event"] for line in told(capsys)] == ["after"]


def passed(limit: RepeatLimit, event: str, level: str = "warning") -> dict[str, object] | None:
    try:
        return dict(limit(None, "", {"event": event, "level": level}))
    except structlog.DropEvent:
        return None


def test_a_warning_that_repeats_is_told_a_few_times_and_counted() -> None:
    now = 0.0
    limit = RepeatLimit(lambda: now)
    assert sum(passed(limit, "again") is not None for _ in range(100)) == BURST
    assert passed(limit, "another") is not None
    assert sum(passed(limit, "again", "info") is not None for _ in range(100)) == 100
    now = WINDOW_SECONDS
    assert passed(limit, "again") == {"event": "again", "level": "warning", "left_out": 100 - BURST}
    assert passed(limit, "again") == {"event": "again", "level": "warning"}


@given(st.lists(st.tuples(st.integers(0, 3), st.floats(0, 4)), max_size=200))
def test_every_warning_is_told_or_counted(happened: list[tuple[int, float]]) -> None:
    now = 0.0
    limit = RepeatLimit(lambda: now)
    told_or_counted = 0
    for kind, later in happened:
        now += later
        line = passed(limit, str(kind))
        if line is not None:
            told_or_counted += 1 + int(str(line.get("left_out", 0)))
    now += WINDOW_SECONDS
    for kind in {kind for kind, _ in happened}:
        line = passed(limit, str(kind))
        assert line is not None
        told_or_counted += int(str(line.get("left_out", 0)))
    assert told_or_counted == len(happened)


def test_it_remembers_a_bounded_number_of_warnings() -> None:
    limit = RepeatLimit(lambda: 0.0)
    for number in range(3 * MAX_EVENTS):
        assert passed(limit, str(number)) is not None
    assert len(limit._seen) <= MAX_EVENTS


def test_whatever_stands_in_a_field_a_line_is_written(capsys: pytest.CaptureFixture[str]) -> None:
    configure_logging("info", "json")
    structlog.get_logger().info("it happened", model="\ud800", odd={"a": {1}}, raw=b"\xff")
    (line,) = told(capsys)
    assert line["event"] == "it happened"
