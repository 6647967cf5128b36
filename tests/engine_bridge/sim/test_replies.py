"""Scripts say what they are told to, pseudo-text follows from the prompt."""

from array import array
from pathlib import Path

import pytest

from engine_bridge.sim.replies import (
    Asked,
    InvalidScript,
    Reply,
    ToolUse,
    chosen_text,
    hermes_calls,
    load_script,
    pseudo_ids,
    pseudo_length,
    pseudo_random,
    text_of,
)

SCRIPT = """
- when: {role: user, contains: weather, tool: look, tool_turns: 0}
  reply: {text: Let me look., tool_calls: [{name: look, arguments: {place: Ulm}}]}
- when: {role: tool}
  reply: {text: It rains.}
- reply: {num_tokens: 7, finish_reason: length}
"""
TOOL = {"type": "function", "function": {"name": "look"}}
CALLED = {"role": "assistant", "content": None, "tool_calls": [{"id": "c"}]}


def asked(*messages, tools=(TOOL,)) -> Asked:
    return Asked(list(messages), list(tools), {})


def user(content) -> dict:
    return {"role": "user", "content": content}


@pytest.fixture
def script(tmp_path: Path):
    path = tmp_path / "script.yaml"
    path.write_text(SCRIPT)
    return load_script(path)


def test_the_first_rule_that_holds_answers(script):
    looking = Reply(text="Let me look.", tool_calls=(ToolUse("look", {"place": "Ulm"}),))
    other = Reply(num_tokens=7, finish_reason="length")
    assert script(asked(user("How is the weather?"))) == looking
    assert script(asked(user([{"type": "text", "text": "the weather!"}]))) == looking
    assert script(asked(user("How is the weather?"), tools=())) == other
    assert script(asked(CALLED, user("and the weather?"))) == other
    assert script(asked(user("hi"), CALLED, {"role": "tool", "content": "rain"})) == Reply(text="It rains.")
    assert script(asked()) == other


@pytest.mark.parametrize(
    "text", ["nonsense: [", "- when: {rol: user}\n  reply: {}", "- reply: {finish_reason: maybe}", "text"]
)
def test_a_wrong_script_is_refused_by_name(tmp_path: Path, text: str):
    path = tmp_path / "wrong.yaml"
    path.write_text(text)
    with pytest.raises(InvalidScript, match=r"wrong\.yaml"):
        load_script(path)
    with pytest.raises(InvalidScript, match="absent"):
        load_script(tmp_path / "absent.yaml")


def test_pseudo_text_depends_on_prompt_choice_and_seed_only():
    prompt = array("I", [1, 2, 3])
    words = range(100, 200)
    said = [pseudo_ids(pseudo_random(p, c, s), words, 20) for p, c, s in 2 * [(prompt, 0, None)]]
    others = [(prompt[:2], 0, None), (prompt, 1, None), (prompt, 0, 5)]
    assert said[0] == said[1]
    assert set(said[0]) <= set(words)
    assert all(pseudo_ids(pseudo_random(p, c, s), words, 20) != said[0] for p, c, s in others)


@pytest.mark.parametrize(("limit", "minimum"), [(1, 0), (5, 3), (500, 300), (50, 50)])
def test_its_length_keeps_to_the_limits(limit: int, minimum: int):
    lengths = {pseudo_length(pseudo_random(array("I", [n]), 0), limit, minimum) for n in range(50)}
    assert all(minimum <= length <= limit for length in lengths)


def test_a_single_choice_is_said_and_read_as_the_hermes_parser_would():
    said = '<tool_call>\n{"name": "look", "arguments": {"path": "a.py"}}\n</tool_call>'
    assert chosen_text({"structured_outputs": {"choice": [said]}}) == said
    assert chosen_text({"structured_outputs": {"choice": ["a", "b"]}}) is None
    assert chosen_text({}) is None
    assert hermes_calls(f"Well.\n{said}") == ("Well.", (ToolUse("look", {"path": "a.py"}),))
    broken = "<tool_call>{no json}</tool_call>"
    assert hermes_calls(broken) == (broken, ())


def test_texts_of_messages():
    assert [text_of(m) for m in (user("a"), user(None), user([{"text": "b"}, {"text": "c"}]))] == [
        "a",
        "",
        "b\nc",
    ]
