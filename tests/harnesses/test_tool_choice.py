import pytest

from harnesses.conversation import Tool
from harnesses.tool_choice import arguments_for, tool_for


def offered(name, **properties):
    required = list(properties)
    return Tool(name, {"type": "object", "properties": properties, "required": required})


TEXT = {"type": "string"}
LIST = {"type": "array", "items": TEXT}


@pytest.mark.parametrize(
    ("wish", "name"),
    [
        ("shell", "Bash"),
        ("shell", "exec_command"),
        ("read", "Read"),
        ("subagent", "Task"),
        ("finish", "submit"),
    ],
)
def test_tools_are_known_by_the_names_that_harnesses_give_them(wish, name):
    tools = [offered("weather", place=TEXT), offered(name, x=TEXT)]
    assert tool_for(wish, tools) == tools[1]
    assert tool_for(wish, tools[:1]) is None


def test_a_command_has_the_form_that_the_schema_wants():
    assert arguments_for("shell", offered("bash", command=TEXT), "hi", "") == {"command": "echo 'hi'"}
    told = arguments_for("shell", offered("shell", command=LIST), "hi", "")
    assert told == {"command": ["bash", "-lc", "echo 'hi'"]}


def test_what_is_required_beside_is_the_least_that_is_allowed():
    tool = offered(
        "Task",
        description=TEXT,
        prompt=TEXT,
        subagent_type=TEXT,
        depth={"type": "integer"},
        mode={"enum": ["quick", "deep"]},
    )
    told = arguments_for("subagent", tool, "Go.", "")
    assert told["prompt"] == "Go."
    assert told["subagent_type"] == "general-purpose"
    assert (told["depth"], told["mode"]) == (1, "quick")
    assert isinstance(told["description"], str)


def test_names_are_met_in_any_case_and_the_first_text_serves_where_none_is_known():
    assert arguments_for("read", offered("read", filePath=TEXT), "", "/f") == {"filePath": "/f"}
    assert arguments_for("read", offered("view", where=TEXT), "", "/f") == {"where": "/f"}
