"""Claude Code's hooks, in the shape that its 2.1 posts them."""

from typing import Any

import pytest

from lifecycle.vocabulary import WaitKind
from proxy.claude_code_hooks import claude_code_fact
from proxy.errors import InvalidRequest
from proxy.harness_contexts import claude_code_context
from proxy.hook_facts import CompactionBegins, CompactionDone, GoesOn, HookFact, Over, SubagentBegan, Waits

SESSION, AGENT = "5602-session", "ae49-agent"
MAIN, SUB = claude_code_context(SESSION), claude_code_context(SESSION, AGENT)
RUNS = {"id": AGENT, "type": "subagent", "status": "running"}


def hook(name: str, **fields: object) -> dict[str, Any]:
    return {
        "session_id": SESSION,
        "prompt_id": "52d7-prompt",
        "transcript_path": "/somewhere/session.jsonl",
        "cwd": "/somewhere",
        "permission_mode": "default",
        "hook_event_name": name,
        **fields,
    }


@pytest.mark.parametrize(
    ("event", "fact"),
    [
        (hook("SessionStart", source="resume"), GoesOn(MAIN)),
        (hook("SessionStart", source="compact"), CompactionDone(MAIN)),
        (hook("UserPromptSubmit", prompt="go on"), GoesOn(MAIN)),
        (hook("PreToolUse", tool_name="Bash", tool_input={}), Waits(MAIN, WaitKind.TOOL, "Bash")),
        (
            hook("PreToolUse", tool_name="Agent", tool_input={"run_in_background": False}),
            Waits(MAIN, WaitKind.SUBAGENT, "Agent"),
        ),
        (
            hook("PreToolUse", tool_name="Agent", tool_input={"prompt": "look"}),
            Waits(MAIN, WaitKind.TOOL, "Agent"),
        ),
        (hook("PreToolUse", tool_name="Read", agent_id=AGENT), Waits(SUB, WaitKind.TOOL, "Read")),
        (hook("PostToolUse", tool_name="Bash", duration_ms=9), GoesOn(MAIN)),
        (hook("PostToolUseFailure", tool_name="Bash"), GoesOn(MAIN)),
        (hook("PermissionRequest", tool_name="Bash"), Waits(MAIN, WaitKind.HUMAN)),
        (hook("Notification", notification_type="idle_prompt"), Waits(MAIN, WaitKind.HUMAN)),
        (hook("Stop", background_tasks=[]), Waits(MAIN, WaitKind.HUMAN)),
        (hook("Stop", background_tasks=[RUNS]), Waits(MAIN, WaitKind.SUBAGENT)),
        (hook("Stop", background_tasks=[{**RUNS, "type": "shell"}, 3]), Waits(MAIN, WaitKind.HUMAN)),
        (hook("StopFailure", error="rate_limit"), Waits(MAIN, WaitKind.HUMAN)),
        (hook("PreCompact", trigger="manual", custom_instructions=None), CompactionBegins(MAIN)),
        (hook("PostCompact", trigger="manual", compact_summary="..."), CompactionDone(MAIN)),
        (hook("SubagentStart", agent_id=AGENT, agent_type="Explore"), SubagentBegan(SUB, MAIN)),
        (hook("SubagentStop", agent_id=AGENT, agent_type=""), Over(SUB, subagents=True)),
        (hook("SessionEnd", reason="other"), Over(MAIN, subagents=True)),
    ],
)
def test_a_hook_tells_of_its_session_or_subagent(event: dict[str, Any], fact: HookFact) -> None:
    assert claude_code_fact(event) == fact


@pytest.mark.parametrize(
    "event",
    [hook("TaskCompleted"), hook("SubagentStop"), hook("Notification", notification_type="auth_success")],
)
def test_what_tells_of_no_context_is_nothing(event: dict[str, Any]) -> None:
    assert claude_code_fact(event) is None


@pytest.mark.parametrize("missing", ["hook_event_name", "session_id"])
def test_a_hook_without_a_name_or_a_session_says_so(missing: str) -> None:
    event = hook("Stop")
    del event[missing]
    with pytest.raises(InvalidRequest, match=missing):
        claude_code_fact(event)
