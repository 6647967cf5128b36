"""opencode's events, in the shape that a plugin of its 1.18 sees them."""

from typing import Any

import pytest

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
)
from proxy.opencode_hooks import opencode_fact

MAIN, SUB = session_context("ses_main"), session_context("ses_sub")


def event(name: str, **properties: object) -> dict[str, Any]:
    return {"id": "evt_1", "type": name, "properties": properties}


@pytest.mark.parametrize(
    ("told", "fact"),
    [
        (
            event("session.created", info={"id": "ses_sub", "parentID": "ses_main", "title": "look"}),
            SubagentBegan(SUB, MAIN),
        ),
        (event("session.deleted", info={"id": "ses_main"}), Over(MAIN, subagents=True)),
        (event("session.idle", sessionID="ses_main"), TurnOver(MAIN)),
        (event("session.compacting", sessionID="ses_main"), CompactionBegins(MAIN)),
        (event("session.compacted", sessionID="ses_main"), CompactionDone(MAIN)),
        (event("permission.asked", sessionID="ses_main", id="per_1"), Waits(MAIN, WaitKind.HUMAN)),
        (event("permission.replied", sessionID="ses_main"), GoesOn(MAIN)),
        (
            event("tool.execute.before", sessionID="ses_main", tool="bash", callID="call_1"),
            Waits(MAIN, WaitKind.TOOL, "bash"),
        ),
        (
            event("tool.execute.before", sessionID="ses_main", tool="task"),
            Waits(MAIN, WaitKind.SUBAGENT, "task"),
        ),
        (event("tool.execute.after", sessionID="ses_main", tool="bash"), GoesOn(MAIN)),
    ],
)
def test_an_event_tells_of_its_session(told: dict[str, Any], fact: HookFact) -> None:
    assert opencode_fact(told) == fact


@pytest.mark.parametrize(
    "told",
    [
        event("session.created", info={"id": "ses_main", "parentID": None}),
        event("message.part.updated", part={}),
        {"type": "server.connected"},
    ],
)
def test_what_tells_of_no_context_is_nothing(told: dict[str, Any]) -> None:
    assert opencode_fact(told) is None


@pytest.mark.parametrize(
    ("told", "missing"),
    [
        ({"properties": {}}, "type"),
        (event("session.idle"), "sessionID"),
        (event("session.deleted"), "info"),
        (event("session.created", info={"parentID": "ses_main"}), "id"),
        ({"type": "session.idle", "properties": []}, "properties"),
    ],
)
def test_an_event_that_lacks_what_it_should_have_says_so(told: dict[str, Any], missing: str) -> None:
    with pytest.raises(InvalidRequest, match=missing):
        opencode_fact(told)
