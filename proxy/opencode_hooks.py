"""opencode's events, as a plugin sees and posts them: `{"type", "properties"}` each.

A subagent is a session whose `parentID` names another. A compaction (1.18) leaves nothing of the messages
before it. `session.compacting`, `tool.execute.before` and `tool.execute.after` are hooks of the plugin and no
events of opencode's: it posts them in the same form.
"""

from collections.abc import Mapping
from typing import Any

from lifecycle.vocabulary import WaitKind
from proxy.errors import InvalidRequest
from proxy.harness_contexts import session_context
from proxy.hook_facts import (
    CompactionBegins,
    CompactionDone,
    GoesOn,
    HookFact,
    Over,
    SubagentBegan,
    TurnOver,
    Waits,
    optional_text,
    required_text,
    tool_named,
)

_SUBAGENT_TOOL = "task"


def opencode_fact(event: Mapping[str, Any]) -> HookFact | None:
    """What one event tells; None if that is nothing about a context. Raises `InvalidRequest`."""
    name = required_text(event, "type")
    told = event.get("properties", {})
    if not isinstance(told, dict):
        raise InvalidRequest("properties is an object")
    match name:
        case "session.created":
            about = _info(told)
            parent = optional_text(about, "parentID")
            ctx = session_context(required_text(about, "id"))
            return SubagentBegan(ctx, session_context(parent)) if parent else None
        case "session.deleted":
            return Over(session_context(required_text(_info(told), "id")), subagents=True)
        case "session.idle":
            return TurnOver(_ctx(told))
        case "session.compacting":
            return CompactionBegins(_ctx(told))
        case "session.compacted":
            return CompactionDone(_ctx(told))
        case "permission.asked" | "permission.updated":
            return Waits(_ctx(told), WaitKind.HUMAN)
        case "permission.replied":
            return GoesOn(_ctx(told))
        case "tool.execute.before":
            tool = tool_named(told, "tool")
            kind = WaitKind.SUBAGENT if tool == _SUBAGENT_TOOL else WaitKind.TOOL
            return Waits(_ctx(told), kind, tool)
        case "tool.execute.after":
            return GoesOn(_ctx(told))
        case _:
            return None


def _ctx(told: Mapping[str, Any]) -> str:
    return session_context(required_text(told, "sessionID"))


def _info(told: Mapping[str, Any]) -> Mapping[str, Any]:
    info = told.get("info")
    if not isinstance(info, dict):
        raise InvalidRequest("properties.info is an object")
    return info
