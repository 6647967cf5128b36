"""What the scripted model says, by rule and not by order: from the conversation and the tools on offer alone.

A task stands in a user's text as `[[task NAME#ID key=value …]]`. The model walks its steps, each a wish (run
a command, read a file, ask a subagent, …) for which it takes a tool that the harness offers; a wish that no
tool serves is skipped. How far it has come it reads from the conversation: each of its texts and commands
carries the task again with `done=N`, and the turns behind the last of these count one each. So it goes on
rightly after an edit, a window that slid, or a summary, which it writes with the same mark.
"""

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from harnesses.conversation import Asked, Said, Tool
from harnesses.tool_choice import arguments_for, tool_for

MARK = re.compile(r"\[\[task (?P<name>[a-z]+)#(?P<id>[\w.:-]+)(?P<rest>(?: [a-z]+=[^\s\]]+)*)\]\]")

SCENARIOS: Mapping[str, Sequence[str]] = {
    "full": ("shell", "read", "subagent", "shell", "read", "shell"),
    "tools": ("shell", "read", "shell"),
    "sub": ("shell", "read"),
    "crowd": ("shell", "subagent*3", "read"),
    "talk": (),
}
"""The steps of each task before its final answer. `shell*3` makes three calls in one turn."""

_SUMMARY_ASKED = re.compile(
    r"summar(y|i[sz]e)|compact(ion|ed)?\b|hand-?off|condense|CONTEXT CHECKPOINT|extract.{0,40}context", re.I
)
_SUMMARY_ASKED_AMID_TOOLS = re.compile(
    r"CONTEXT CHECKPOINT|detailed summary of (the|our|this) conversation|summari[sz]e (the|our|this) "
    r"conversation|create a (detailed |concise )?summary|provide a (detailed |concise )?summary",
    re.I,
)
_TITLE_ASKED = re.compile(r"\btitles?\b|\btopic\b|conversation name", re.I)

PROSE = (
    "The quick survey of the working tree found nothing out of place, the figures agree with the notes, and "
    "what was asked for is at hand. "
)


class Task(msgspec.Struct, frozen=True):
    """A task and how much of it is done. `options` are its keys: `file`, `prose` (sentences a step says)."""

    name: str
    task_id: str
    done: int
    options: Mapping[str, str]

    def mark(self, done: int) -> str:
        """The mark that tells a later request how far it has come."""
        options = "".join(f" {key}={value}" for key, value in self.options.items())
        return f"[[task {self.name}#{self.task_id}{options} done={done}]]"


class Call(msgspec.Struct, frozen=True):
    """A tool that the model calls: with arguments, or with free text where the tool takes that."""

    tool: Tool
    arguments: dict[str, Any]
    text: str = ""


class Reply(msgspec.Struct, frozen=True):
    """What the model says. `kind` is step, final, summary, title, or probe for what belongs to no task.

    `task_id` is empty where the conversation bears no mark.
    """

    kind: str
    text: str
    calls: tuple[Call, ...] = ()
    task_id: str = ""
    done: int = 0


def reply_to(asked: Asked) -> Reply:
    """What the model says to a request."""
    task = task_of(asked.said)
    named = task.task_id if task else ""
    wanted = None if asked.last.role == "tool" and asked.tools else _one_off(asked)
    if wanted == "summary":
        mark = task.mark(task.done) if task else ""
        text = f"{mark} What was done so far: {PROSE * 3}".strip()
        tagged = "<summary>" in asked.last_user or "<summary>" in asked.system
        return Reply("summary", f"<summary>\n{text}\n</summary>" if tagged else text, (), named)
    if wanted == "title":
        return Reply("title", _shaped(asked, "A look around"), (), named)
    if task is None:
        return Reply("probe", _shaped(asked, "Yes."))
    steps = [
        (wish, tool)
        for wish in _steps(task)
        if (tool := tool_for(wish.partition("*")[0], asked.tools)) is not None
    ]
    if task.done < len(steps):
        return _step(task, *steps[task.done])
    return _final(task, asked)


def task_of(said: Sequence[Said]) -> Task | None:
    """The task that the user asked for last, and how far the conversation shows it to have come."""
    placed = [(at, each.role, found) for at, each in enumerate(said) for found in MARK.finditer(each.text)]
    if not placed:
        return None
    asked = [one for one in placed if one[1] == "user"] or placed
    begin, _, first = asked[-1]
    key = first["name"], first["id"]
    begin, _, last = [p for p in placed if p[0] >= begin and (p[2]["name"], p[2]["id"]) == key][-1]
    options = dict(pair.split("=", 1) for pair in last["rest"].split())
    done = int(options.pop("done", "0"))
    # A turn's own mark counts it; a message is one turn however many tools it calls, and so are items that
    # no result parts.
    turns, open_turn = 0, False
    for each in said[begin + 1 :]:
        if each.role == "assistant" and each.num_calls:
            turns += not open_turn
            open_turn = True
        else:
            open_turn = False
    if said[begin].role == "assistant" and not said[begin].num_calls and _calls_follow(said, begin):
        # The text and its calls came as items of their own: the mark has counted them.
        turns -= 1
    return Task(key[0], key[1], done + max(0, turns), options)


def _calls_follow(said: Sequence[Said], at: int) -> bool:
    """Whether calls stand right behind a message."""
    return at + 1 < len(said) and said[at + 1].role == "assistant" and said[at + 1].num_calls > 0


def _steps(task: Task) -> Sequence[str]:
    steps = SCENARIOS.get(task.name, ())
    return [*steps, *["shell"] * int(task.options.get("more", "0"))]


def _step(task: Task, wish: str, tool: Tool) -> Reply:
    mark = task.mark(task.done + 1)
    prose = PROSE * int(task.options.get("prose", "1"))
    wish, _, times = wish.partition("*")
    calls = []
    for number in range(int(times or "1")):
        if wish == "subagent":
            options = {k: v for k, v in task.options.items() if k in ("file", "prose")}
            value = Task("sub", f"{task.task_id}.{task.done}.{number}", 0, options).mark(0) + " Look around."
        else:
            value = f"{mark} {number} {prose}"
        arguments = arguments_for(wish, tool, value, task.options.get("file", "README.md"))
        calls.append(Call(tool, arguments, f"echo '{value}'" if tool.schema is None else ""))
    return Reply("step", f"{mark} {prose}", tuple(calls), task.task_id, task.done)


def _final(task: Task, asked: Asked) -> Reply:
    answer = f"Finished {task.name} {task.task_id.replace('.', ' ')}. {PROSE}"
    finish = tool_for("finish", asked.tools)
    if finish is not None:
        call = Call(finish, arguments_for("finish", finish, answer, ""))
        return Reply("final", task.mark(task.done + 1), (call,), task.task_id, task.done)
    if "COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT" in "".join(each.text for each in asked.said):
        shell = tool_for("shell", asked.tools)
        if shell is not None:
            command = {"command": "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"}
            return Reply("final", answer, (Call(shell, command),), task.task_id, task.done)
    return Reply("final", _shaped(asked, answer), (), task.task_id, task.done)


def _one_off(asked: Asked) -> str | None:
    """Whether a request wants a summary or a title of a conversation and not the next step of it."""
    if asked.tools:
        return "summary" if _SUMMARY_ASKED_AMID_TOOLS.search(asked.last.text) else None
    outside = MARK.sub("", asked.last_user)
    if _TITLE_ASKED.search(asked.system[:2000]) or _TITLE_ASKED.search(outside[:400]):
        return "title"
    if _SUMMARY_ASKED.search(asked.system[:2000]) or _SUMMARY_ASKED.search(outside[:1500]):
        return "summary"
    return "summary" if _SUMMARY_ASKED.search(outside[-1500:]) else None


def _shaped(asked: Asked, text: str) -> str:
    """A text as the JSON object that the request wants, if it wants one."""
    form: Any = asked.body.get("response_format") or {}
    if isinstance(asked.body.get("text"), dict):
        form = asked.body["text"].get("format") or {}
    if isinstance(asked.body.get("output_config"), dict):
        form = asked.body["output_config"].get("format") or {}
    schema = form.get("schema") or (form.get("json_schema") or {}).get("schema")
    if not isinstance(schema, dict):
        return text
    tool = Tool("answer", schema)
    return json.dumps(arguments_for("finish", tool, text, ""))
