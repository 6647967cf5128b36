import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.harnesses.talk import TOOLS, said, tool, turn, user, whole

TASK = "[[task full#r1 file=/w/notes.txt]] Look around."
SYSTEM = {"role": "system", "content": "You work."}


def names(turns):
    return [
        call["function"]["name"]
        for messages in turns
        for message in messages
        for call in message.get("tool_calls", ())
    ]


def flat(turns):
    return [message for messages in turns for message in messages]


def test_it_walks_the_steps_and_answers():
    turns = whole(TASK, TOOLS)
    assert names(turns) == ["shell", "read_file", "task", "shell", "read_file", "shell"]
    assert turns[-1][0]["content"].startswith("Finished full")


def test_what_no_tool_serves_is_skipped():
    assert names(whole(TASK, TOOLS[:1])) == ["shell", "shell", "shell"]
    assert names(whole(TASK, [tool("weather", "place")])) == []


def test_options_add_steps_and_words():
    assert len(names(whole("[[task tools#a more=4]]", TOOLS))) == 7
    long, short = (said([user(f"[[task tools#a prose={n}]]")], TOOLS).text for n in (9, 1))
    assert len(long) > len(short) + 500


def test_the_file_that_the_task_names_is_read():
    arguments = whole(TASK, TOOLS)[2][0]["tool_calls"][0]["function"]["arguments"]
    assert json.loads(arguments) == {"path": "/w/notes.txt"}


@given(st.data())
def test_it_goes_on_rightly_whatever_of_the_past_is_cut(data):
    turns = whole(TASK, TOOLS)
    done = data.draw(st.integers(2, len(turns) - 1))
    first = data.draw(st.integers(0, done - 1))
    expected = said(flat(turns[:done]), TOOLS)
    got = said([SYSTEM, *flat(turns[first:done])], TOOLS)
    assert (got.kind, got.text) == (expected.kind, expected.text)


@given(st.integers(1, 6))
def test_a_summary_in_place_of_the_past_does_not_lead_astray(done):
    turns = whole(TASK, TOOLS)
    before = flat(turns[: done + 1])
    transcript = "\n".join(str(each.get("content")) for each in before)
    summary = said([user(f"Write a summary of this conversation:\n{transcript}")])
    assert summary.kind == "summary"
    for role in ("user", "system", "assistant"):
        after = said([SYSTEM, {"role": role, "content": summary.text}], TOOLS)
        assert after.text == said(before, TOOLS).text


def test_a_second_task_in_the_same_conversation_begins_anew():
    messages = [*flat(whole(TASK, TOOLS)), user("[[task tools#r1]] Once more.")]
    reply = said(messages, TOOLS)
    assert (reply.kind, reply.done) == ("step", 0)


def test_a_subagent_has_a_task_of_its_own_that_is_not_its_parents():
    turns = whole(TASK, TOOLS)
    (call,) = turns[3][0]["tool_calls"]
    prompt = json.loads(call["function"]["arguments"])["prompt"]
    child = whole(prompt, TOOLS[:2])
    assert names(child) == ["shell", "read_file"]
    assert said([user(prompt)], TOOLS).task_id.startswith("r1.")
    # The parent hears of it as a tool's result only.
    turns[3][1]["content"] = f"{prompt}\n{child[-1][0]['content']}"
    assert said(flat(turns[:4]), TOOLS).task_id == "r1"


@pytest.mark.parametrize(
    ("messages", "kind"),
    [
        ([{"role": "system", "content": "You write titles."}, user(TASK)], "title"),
        ([user(f"Summarize what follows.\n{TASK}")], "summary"),
        ([user(TASK), user("Please create a detailed summary of the conversation so far.")], "summary"),
        ([user("quota")], "probe"),
        ([user("[[task talk#a]] Hello")], "final"),
    ],
)
def test_requests_that_are_no_next_step(messages, kind):
    assert said(messages).kind == kind


def test_a_summary_is_asked_for_amid_tools_only_in_so_many_words():
    assert said([user(TASK), user("Create a detailed summary of our conversation")], TOOLS).kind == "summary"
    long = (
        "Respond with text in a <summary> block. Your task is to create a detailed summary of it all."
        + " x" * 9000
    )
    reply = said([user(TASK), user(long)], TOOLS)
    assert (reply.kind, reply.text[:9], reply.text[-10:]) == ("summary", "<summary>", "</summary>")
    assert said([user(f"{TASK} Then write a summary of the file.")], TOOLS).kind == "step"


def test_where_a_tool_ends_the_task_it_is_called():
    tools = [*TOOLS, tool("final_answer", "answer")]
    messages = [user("[[task talk#a]]")]
    (call,) = turn(messages, tools)[0]["tool_calls"]
    assert call["function"]["name"] == "final_answer"
    assert "Finished" in json.loads(call["function"]["arguments"])["answer"]


def test_an_answer_has_the_form_that_is_asked_for():
    form = {"type": "json_schema", "json_schema": {"name": "a", "schema": schema_with_enum()}}
    told = json.loads(said([user("[[task talk#a]]")], response_format=form).text)
    assert told["mood"] == "calm"
    assert "Finished" in told["answer"]


def schema_with_enum():
    properties = {"answer": {"type": "string"}, "mood": {"enum": ["calm", "wild"]}}
    return {"type": "object", "properties": properties, "required": ["answer", "mood"]}
