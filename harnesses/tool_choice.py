"""Which of the tools on offer serves a wish of the script, and with what arguments."""

import re
from collections.abc import Mapping, Sequence
from typing import Any

from harnesses.conversation import Tool

WISHES: Mapping[str, re.Pattern[str]] = {
    "shell": re.compile(
        r"^(shell|bash|local_shell|exec_command|shell_command|run_shell_command|run_command|execute|"
        r"execute_bash|execute_command|terminal|run_terminal_cmd|.*_shell)$",
        re.I,
    ),
    "read": re.compile(
        r"^(read|read_file|readfile|file_read|view|view_file|cat|open_file|file_viewer|file_editor|"
        r"str_replace_editor|look_up)$",
        re.I,
    ),
    "subagent": re.compile(
        r"^(task|agent|subagent|spawn_agent|dispatch_agent|delegate.*|ask_helper|helper|researcher|"
        r"transfer_to_.*)$",
        re.I,
    ),
    "wait": re.compile(r"^(wait|wait_agent|wait_for_agent)$", re.I),
    "finish": re.compile(
        r"^(final_answer|finish|submit|attempt_completion|complete_task|task_complete|done)$", re.I
    ),
}
"""Names under which harnesses offer a tool, by what it is good for."""

_COMMANDS = ("command", "cmd", "script", "commands", "code")
_PATHS = ("file_path", "filepath", "path", "filename", "absolute_path", "file", "target_file", "name")
_PROMPTS = ("prompt", "message", "task", "input", "instructions", "request", "question", "query", "items")
_ANSWERS = ("answer", "message", "result", "output", "response", "summary", "text")


def tool_for(wish: str, tools: Sequence[Tool]) -> Tool | None:
    """The first tool whose name serves the wish; None where the harness offers none."""
    return next((tool for tool in tools if WISHES[wish].match(tool.name)), None)


def arguments_for(wish: str, tool: Tool, value: str, file: str) -> dict[str, Any]:
    """Arguments that fit the tool's schema. `value` is what is wished: text to echo, a prompt, an answer.

    What the schema requires beside is filled with the least that it allows.
    """
    schema = tool.schema or {}
    properties = schema.get("properties")
    properties = properties if isinstance(properties, dict) else {}
    names, wanted = {
        "shell": (_COMMANDS, f"echo '{value}'"),
        "read": (_PATHS, file),
        "subagent": (_PROMPTS, value),
        "finish": (_ANSWERS, value),
        "wait": (("ids", "targets", "agent_id", "id"), value),
    }[wish]
    chosen = next((name for name in names if name.lower() in {p.lower() for p in properties}), None)
    chosen = next((p for p in properties if chosen and p.lower() == chosen), None)
    required = schema.get("required")
    required = [str(each) for each in required] if isinstance(required, list) else []
    if chosen is None:
        texts = [
            p for p, form in properties.items() if isinstance(form, dict) and form.get("type") == "string"
        ]
        chosen = next((p for p in (*required, *texts) if p in texts), None)
    arguments = {p: _least(properties.get(p), p, wish) for p in required}
    if arguments.get("subagent_type") == "general-purpose" and tool.name == "task":
        # opencode's tool names its agents elsewhere, deepagents' own names them.
        arguments["subagent_type"] = "general-purpose" if "general-purpose" in tool.description else "general"
    if chosen is not None:
        arguments[chosen] = _fitted(properties.get(chosen), wanted, wish)
    return arguments


def _fitted(form: Any, wanted: str, wish: str) -> Any:
    """A text in the form that a property wants."""
    kinds = _kinds(form)
    if "string" in kinds or "array" not in kinds:
        return wanted
    inner = form.get("items") if isinstance(form, dict) else None
    if isinstance(inner, dict) and "object" in _kinds(inner):
        return [{"type": "text", "text": wanted}]
    return ["bash", "-lc", wanted] if wish == "shell" else [wanted]


def _kinds(form: Any) -> set[str]:
    if not isinstance(form, dict):
        return {"string"}
    kind = form.get("type")
    kinds = {kind} if isinstance(kind, str) else set(kind or ())
    for other in (*form.get("anyOf", ()), *form.get("oneOf", ())):
        kinds |= _kinds(other)
    return {str(each) for each in kinds}


def _least(form: Any, name: str, wish: str) -> Any:
    """The least value that a required property allows."""
    form = form if isinstance(form, dict) else {}
    choices = form.get("enum") or ([form["const"]] if "const" in form else [])
    if choices:
        return choices[0]
    if "default" in form:
        return form["default"]
    kinds = _kinds(form)
    if name == "subagent_type":
        return "general-purpose"
    if name == "command" and wish == "read":
        return "view"
    if name == "security_risk":
        return "LOW"
    for kind, value in (("string", f"a {name}"), ("boolean", False), ("integer", 1), ("number", 1.0)):
        if kind in kinds:
            return value
    return [] if "array" in kinds else {}
