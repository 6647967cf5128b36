"""Codex's hooks, as its `hooks.json` hands them to a command: one JSON object each.

A subagent is a thread of its own, named by `agent_id`; `session_id` is the thread of the root. A compaction
(0.171, with any provider but its own) keeps instructions, environment and what the user said, and puts the
summary behind.
"""

from collections.abc import Mapping
from typing import Any

from lifecycle.vocabulary import WaitKind
from proxy.harness_contexts import codex_context
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

_WAITS_FOR_SUBAGENT = ("wait_agent", "wait")


def codex_fact(event: Mapping[str, Any]) -> HookFact | None:
    """What one hook tells; None if that is nothing about a context. Raises `InvalidRequest`."""
    name, session = required_text(event, "hook_event_name"), required_text(event, "session_id")
    agent = optional_text(event, "agent_id")
    root, ctx = codex_context(session), codex_context(agent or session)
    match name:
        case "SessionStart" if event.get("source") == "compact":
            return CompactionDone(ctx, keeps_asked=True)
        case "SessionStart" | "UserPromptSubmit":
            return GoesOn(ctx)
        case "PreToolUse":
            tool = tool_named(event, "tool_name")
            kind = WaitKind.SUBAGENT if tool in _WAITS_FOR_SUBAGENT else WaitKind.TOOL
            return Waits(ctx, kind, tool)
        case "PostToolUse":
            return GoesOn(ctx)
        case "PermissionRequest" | "Stop":
            return Waits(ctx, WaitKind.HUMAN)
        case "PreCompact":
            return CompactionBegins(ctx)
        case "PostCompact":
            return CompactionDone(ctx, keeps_asked=True)
        case "SubagentStart" if agent:
            return SubagentBegan(ctx, root)
        case "SubagentStop" if agent:
            return Over(ctx, subagents=True)
        case "SessionEnd":
            return Over(ctx, subagents=True)
        case _:
            return None
