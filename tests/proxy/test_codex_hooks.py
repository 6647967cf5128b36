"""Codex's hooks, in the shape that its 0.171 hands to a command."""

from typing import Any

import pytest

from lifecycle.vocabulary import WaitKind
from proxy.codex_hooks import codex_fact
from proxy.errors import InvalidRequest
from proxy.harness_contexts import codex_context
from proxy.hook_facts import CompactionBegins, CompactionDone, GoesOn, HookFact, Over, SubagentBegan, Waits

ROOT, AGENT = "01a2-root", "01a2-agent"
MAIN, SUB = codex_context(ROOT), codex_context(AGENT)


def hook(name: str, **fields: object) -> dict[str, Any]:
    return {
        "session_id": ROOT,
        "turn_id": "01a2-turn",
        "transcript_path": "/somewhere/rollout.jsonl",
        "cwd": "/somewhere",
        "hook_event_name": name,
        "model": "tiny",
        "permission_mode": "default",
        **fields,
    }


@pytest.mark.parametrize(
    ("event", "fact"),
    [
        (hook("SessionStart", source="resume"), GoesOn(MAIN)),
        (hook("SessionStart", source="compact"), CompactionDone(MAIN, keeps_asked=True)),
        (hook("UserPromptSubmit", prompt="go on"), GoesOn(MAIN)),
        (hook("PreToolUse", tool_name="Bash", tool_use_id="call_1"), Waits(MAIN, WaitKind.TOOL, "Bash")),
        (hook("PreToolUse", tool_name="wait_agent"), Waits(MAIN, WaitKind.SUBAGENT, "wait_agent")),
        (hook("PreToolUse", tool_name="Bash", agent_id=AGENT), Waits(SUB, WaitKind.TOOL, "Bash")),
        (hook("PostToolUse", tool_name="Bash", tool_response="done"), GoesOn(MAIN)),
        (hook("PermissionRequest", tool_name="Bash"), Waits(MAIN, WaitKind.HUMAN)),
        (hook("PreCompact", trigger="auto"), CompactionBegins(MAIN)),
        (hook("PostCompact", trigger="auto"), CompactionDone(MAIN, keeps_asked=True)),
        (hook("SubagentStart", agent_id=AGENT, agent_type="default"), SubagentBegan(SUB, MAIN)),
        (hook("SubagentStop", agent_id=AGENT, stop_hook_active=False), Over(SUB, subagents=True)),
        (hook("Stop", last_assistant_message="done"), Waits(MAIN, WaitKind.HUMAN)),
        (hook("SessionEnd", reason="other"), Over(MAIN, subagents=True)),
    ],
)
def test_a_hook_tells_of_its_thread(event: dict[str, Any], fact: HookFact) -> None:
    assert codex_fact(event) == fact


@pytest.mark.parametrize("name", ["SomethingNew", "SubagentStart", "SubagentStop"])
def test_what_tells_of_no_context_is_nothing(name: str) -> None:
    assert codex_fact(hook(name)) is None


@pytest.mark.parametrize("missing", ["hook_event_name", "session_id"])
def test_a_hook_without_a_name_or_a_session_says_so(missing: str) -> None:
    event = hook("Stop")
    del event[missing]
    with pytest.raises(InvalidRequest, match=missing):
        codex_fact(event)
