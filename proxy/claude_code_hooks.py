"""Claude Code's hooks, as it posts them: one JSON object each.

A subagent shares the session and has an `agent_id`. A compaction (2.1) leaves nothing of the messages.
"""

from collections.abc import Mapping
from typing import Any

from lifecycle.vocabulary import WaitKind
from proxy.harness_contexts import claude_code_context
from proxy.hook_facts import (
    CompactionBegins,
    CompactionDone,
    GoesOn,
    HookFact,
    Over,
    SubagentBegan,
    Waits,
    optional_text,
    required_text,
    tool_named,
)

_SUBAGENT_TOOLS = ("Agent", "Task")
_ASKS = ("idle_prompt", "permission_prompt", "elicitation_dialog")


def claude_code_fact(event: Mapping[str, Any]) -> HookFact | None:
    """What one hook tells; None if that is nothing about a context. Raises `InvalidRequest`."""
    name, session = required_text(event, "hook_event_name"), required_text(event, "session_id")
    agent = optional_text(event, "agent_id")
    root, ctx = claude_code_context(session), claude_code_context(session, agent)
    match name:
        case "SessionStart" if event.get("source") == "compact":
            return CompactionDone(ctx)
        case "SessionStart" | "UserPromptSubmit":
            return GoesOn(ctx)
        case "PreToolUse":
            tool = tool_named(event, "tool_name")
            return Waits(ctx, WaitKind.SUBAGENT if _waits_for_subagent(event, tool) else WaitKind.TOOL, tool)
        case "PostToolUse" | "PostToolUseFailure":
            return GoesOn(ctx)
        case "PermissionRequest":
            return Waits(ctx, WaitKind.HUMAN)
        case "Notification":
            return Waits(ctx, WaitKind.HUMAN) if event.get("notification_type") in _ASKS else None
        case "Stop" | "StopFailure":
            return Waits(ctx, WaitKind.SUBAGENT if _subagent_runs(event) else WaitKind.HUMAN)
        case "PreCompact":
            return CompactionBegins(ctx)
        case "PostCompact":
            return CompactionDone(ctx)
        case "SubagentStart" if agent:
            return SubagentBegan(ctx, root)
        case "SubagentStop" if agent:
            return Over(ctx, subagents=True)
        case "SessionEnd":
            return Over(ctx, subagents=True)
        case _:
            return None


def _waits_for_subagent(event: Mapping[str, Any], tool: str) -> bool:
    asked = event.get("tool_input")
    return tool in _SUBAGENT_TOOLS and isinstance(asked, dict) and asked.get("run_in_background") is False


def _subagent_runs(event: Mapping[str, Any]) -> bool:
    """Whether a subagent in the background will wake the agent up again."""
    tasks = event.get("background_tasks")
    return any(
        isinstance(task, dict) and (task.get("type"), task.get("status")) == ("subagent", "running")
        for task in (tasks if isinstance(tasks, list) else ())
    )
