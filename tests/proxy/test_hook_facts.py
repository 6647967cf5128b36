"""Fields of hooks: what must be there is, what may be absent may, and a wrong type is said to be one."""

import pytest

from proxy.errors import InvalidRequest
from proxy.hook_facts import MAX_ID_LENGTH, optional_text, required_text, tool_named


@pytest.mark.parametrize("value", [None, "", 7, ["a"], "x" * (MAX_ID_LENGTH + 1)])
def test_what_must_be_there_is_text(value: object) -> None:
    with pytest.raises(InvalidRequest, match="session_id is a string"):
        required_text({"session_id": value}, "session_id")


def test_what_may_be_absent_may_be_null_but_nothing_else() -> None:
    assert [optional_text(event, "agent_id") for event in ({}, {"agent_id": None}, {"agent_id": "a"})] == [
        "",
        "",
        "a",
    ]
    with pytest.raises(InvalidRequest):
        optional_text({"agent_id": 1}, "agent_id")


def test_a_tool_without_a_name_that_can_be_shown_has_none() -> None:
    names = ["Bash", "", None, 5, "new\nline", "x" * 300]
    assert [tool_named({"tool_name": name}, "tool_name") for name in names] == ["Bash", "", "", "", "", ""]
