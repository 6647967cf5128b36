"""A replay judges each request by the truth that was recorded with it, with and without headers."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from harnesses.accuracy import half_of, replay, report, runs_in
from harnesses.truth import Relation

TOOLS = [{"type": "function", "function": {"name": "shell"}}]
TASK = {"role": "user", "content": "Find out why the nightly build fails in its linker."}
ANSWER = {"role": "assistant", "content": "It fails."}


class Writer:
    """Writes a run, a request a line, each answered at once."""

    def __init__(self, folder: Path, harness: str) -> None:
        folder.joinpath(harness).mkdir(parents=True, exist_ok=True)
        self.path = folder / harness / "0001.jsonl"
        self.lines: list[dict[str, Any]] = []

    def asked(
        self,
        ctx: str,
        relation: Relation,
        messages: list[dict[str, Any]],
        headers: Mapping[str, str] | None = None,
        **fields: Any,
    ) -> None:
        number = len(self.lines)
        self.lines.append(
            {
                "number": number,
                "at": float(number),
                "answered_at": number + 0.5,
                "path": "/v1/chat/completions",
                "headers": list((headers or {}).items()),
                "body": {"model": "m", "messages": messages, **fields},
                "answer": {"id": f"a{number}", **ANSWER},
                "ctx": ctx,
                "relation": relation,
            }
        )
        self.path.write_text("".join(json.dumps(line) + "\n" for line in self.lines))


def written(folder: Path) -> Writer:
    """An agent, its title, and a second agent that begins with the same words in a session of its own."""
    run = Writer(folder, "some-harness")
    run.asked("one", Relation.NEW, [TASK], {"x-session-id": "1"}, tools=TOOLS)
    title = [{"role": "user", "content": f"Title: {TASK['content']}"}]
    run.asked("title", Relation.ONE_OFF, title, {"x-session-id": "1"})
    run.asked("two", Relation.NEW, [TASK], {"x-session-id": "2"}, tools=TOOLS)
    more = [TASK, ANSWER, {"role": "user", "content": "And?"}]
    run.asked("one", Relation.APPEND, more, {"x-session-id": "1"}, tools=TOOLS)
    return run


def test_what_only_headers_tell_is_right_with_headers_only(tmp_path: Path) -> None:
    path = written(tmp_path).path
    alone = replay(path, with_headers=False)
    assert [each.guess for each in alone] == [
        Relation.NEW,
        Relation.ONE_OFF,
        Relation.FORK,
        Relation.APPEND,
    ]
    assert [each.right_context for each in alone[:3]] == [True, True, True]
    named = replay(path, with_headers=True)
    assert [each.guess for each in named] == [each.truth for each in named]
    assert all(each.right_context for each in named)
    assert all(each.why for each in named)


def test_what_is_given_to_another_agent_is_wrong(tmp_path: Path) -> None:
    run = Writer(tmp_path, "some-harness")
    run.asked("one", Relation.NEW, [TASK], {"x-session-id": "same"})
    run.asked("two", Relation.NEW, [{"role": "user", "content": "Else."}], {"x-session-id": "same"})
    first, second = replay(run.path, with_headers=True)
    assert first.right_context
    assert not second.right_context


def test_a_harness_is_tuned_on_or_scored_and_the_report_says_which(tmp_path: Path) -> None:
    written(tmp_path)
    Writer(tmp_path, "langchain").asked("one", Relation.NEW, [TASK])
    assert (half_of("langchain"), half_of("some-harness")) == ("tuning", "scoring")
    assert set(runs_in(tmp_path, "scoring")) == {"some-harness"}
    assert set(runs_in(tmp_path, "")) == {"langchain", "some-harness"}
    lines = list(report(tmp_path, "scoring", wrong=True))
    assert any(line.startswith("| some-harness | scoring | 1 | 4 |") for line in lines)
    assert any("new taken for fork" in line for line in lines)


def test_what_cannot_be_read_is_no_request(tmp_path: Path) -> None:
    run = written(tmp_path)
    run.lines[1]["path"] = "/v1/models"
    run.lines[2]["body"] = {"messages": "none"}
    run.path.write_text("".join(json.dumps(line) + "\n" for line in run.lines))
    assert [each.number for each in replay(run.path, with_headers=True)] == [0, 3]
