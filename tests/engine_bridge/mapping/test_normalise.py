"""Messages as the engine normalises them: single rules here, vLLM's own code as judge with an engine
environment.
"""

import json
import random

import pytest

from engine_bridge.errors import RejectedByEngine, Unmappable
from engine_bridge.mapping.normalise import (
    Merged,
    cut_at_tag,
    merge_developer,
    normalise_message,
    normalise_tools,
    open_final_message,
    template_kwargs,
)
from engine_bridge.mapping.prompts import ChatPrompt
from tests.engine_bridge.mapping.conversations import (
    TOOLS,
    Walk,
    has_real,
    mappers_by_template,
    real_profile,
    say,
    template_files,
)
from tests.engine_bridge.mapping.engine_answers import engine_prompts

CALL = {"id": "c1", "type": "function", "function": {"name": "run", "arguments": '{"a": 1}'}}


def kwargs(**given):
    defaults = {
        "request": None,
        "defaults": {},
        "documents": None,
        "add_generation_prompt": True,
        "reasoning_effort": None,
        "template_variables": frozenset({"enable_thinking", "reasoning_effort", "style"}),
    }
    return template_kwargs(**{**defaults, **given})


def test_absent_content_becomes_empty_text():
    assert normalise_message({"role": "assistant", "content": None}, "string")["content"] == ""
    assert normalise_message({"role": "user"}, "string")["content"] == ""


def test_parts_are_joined_or_wrapped_by_the_templates_format():
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": ""}, "b"]
    assert normalise_message({"role": "user", "content": parts}, "string")["content"] == "a\nb"
    assert normalise_message({"role": "user", "content": parts}, "openai")["content"] == [
        {"type": "text", "text": text} for text in ("a", "", "b")
    ]
    assert normalise_message({"role": "tool", "content": parts}, "openai")["content"] == "a\n\nb"


def test_arguments_become_objects_and_garbage_becomes_an_empty_one():
    for text, parsed in (('{"a": 1}', {"a": 1}), ("", {}), ("[1]", {}), ("{oops", {})):
        call = {**CALL, "function": {"name": "run", "arguments": text}}
        message = normalise_message({"role": "assistant", "content": "", "tool_calls": [call]}, "string")
        assert message["tool_calls"][0]["function"]["arguments"] == parsed


def test_an_empty_list_of_calls_is_dropped_and_reasoning_has_both_names():
    raw = {"role": "assistant", "content": "x", "tool_calls": [], "reasoning_content": "why"}
    message = normalise_message(raw, "string")
    assert "tool_calls" not in message
    assert message["reasoning"] == message["reasoning_content"] == "why"


@pytest.mark.parametrize(
    "raw",
    [
        {"content": "no role"},
        {"role": "user", "content": None},
        {"role": "user", "content": 5},
        {"role": "assistant", "content": "", "tool_calls": [{**CALL, "type": "custom"}]},
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [{**CALL, "function": {"name": "f", "arguments": {}}}],
        },
    ],
)
def test_what_the_engine_refuses_is_rejected(raw):
    with pytest.raises(RejectedByEngine):
        normalise_message(raw, "string")


@pytest.mark.parametrize(
    "part",
    [
        {"type": "image_url", "image_url": {"url": "data:,"}},
        {"type": "input_audio", "input_audio": {}},
        {"type": "tool_reference", "name": "run"},
        {"text": "no type"},
    ],
)
def test_parts_that_are_not_text_cannot_be_mapped(part):
    with pytest.raises(Unmappable):
        normalise_message({"role": "user", "content": [part]}, "string")


def test_system_messages_merge_at_the_front_and_keep_their_owners():
    conversation = [
        normalise_message({"role": role, "content": text}, "string")
        for role, text in (("developer", "a"), ("user", "b"), ("system", "c"), ("user", "d"))
    ]
    merged, owners = merge_developer(conversation)
    assert [message["content"] for message in merged] == ["a\n\nc", "b", "d"]
    assert owners == [Merged(((0, "a"), (2, "c"))), 1, 3]


def test_a_single_leading_developer_message_is_only_renamed():
    conversation = [normalise_message({"role": "developer", "content": "a"}, "string")]
    merged, owners = merge_developer(conversation)
    assert merged == [{"role": "system", "content": "a"}]
    assert owners == [0]


def test_tools_are_written_back_with_known_fields_in_a_fixed_order():
    tool = {"function": {"parameters": {"type": "object"}, "name": "run", "strict": None, "x": 1}, "y": 2}
    (dumped,) = normalise_tools([tool])
    assert json.dumps(dumped) == (
        '{"type": "function", "function": '
        '{"name": "run", "description": null, "parameters": {"type": "object"}}}'
    )


def test_kwargs_are_filtered_and_null_leaves_the_default():
    got = kwargs(request={"style": None, "unread": 1}, defaults={"style": "dry", "enable_thinking": True})
    assert got["style"] == "dry"
    assert got["enable_thinking"] is True
    assert "unread" not in got


def test_reasoning_effort_switches_thinking_unless_the_request_says_so_itself():
    assert kwargs(reasoning_effort="none")["enable_thinking"] is False
    assert kwargs(reasoning_effort="low")["enable_thinking"] is True
    assert kwargs(reasoning_effort="low", request={"enable_thinking": False})["enable_thinking"] is False


def test_kwargs_that_would_change_how_the_engine_renders_cannot_be_mapped():
    with pytest.raises(Unmappable):
        kwargs(request={"tokenize": True})


def test_an_open_final_message_ends_where_its_text_ends():
    opened = open_final_message({"role": "assistant", "content": "half"}, "{{ m.content }}")
    assert cut_at_tag(f"<a>{opened['content']}</a>") == "<a>half"
    assert cut_at_tag(f"<a>{opened['content'].strip()}</a>") == "<a>half"


def odd_bodies(rng: random.Random) -> list[dict]:
    """Requests with the unusual fields that clients send."""
    user = {"role": "user", "content": "q"}
    extra_call = {"index": 0, **CALL, "function": {"x": 1, **CALL["function"]}, "extra": {"b": 1, "a": 2}}
    text = {"type": "text", "text": "part", "cache_control": {"type": "ephemeral"}}
    bodies = [
        {"messages": [{"role": role, "content": [text, say(rng, 1)]}]}
        for role in ("user", "system", "assistant", "developer", "tool", "critic")
    ]
    messages = [
        {"role": "assistant", "content": "", "tool_calls": [extra_call], "refusal": None, "audio": None},
        {
            "role": "assistant",
            "content": [{"type": "refusal", "refusal": "no"}, {"type": "text", "text": "t"}],
        },
        {"role": "assistant", "content": [{"type": "thinking", "thinking": "hm"}], "reasoning": ""},
        {"role": "tool", "content": "x", "tool_call_id": None},
        {"role": "tool", "content": None, "tool_call_id": "1"},
        {"role": "function", "name": "f", "content": None},
        {"role": "function", "name": "f", "content": "x"},
        {"role": "user", "content": "q", "name": "ann", "task": "t", "reasoning": "dropped"},
        {"role": "user"},
        {"role": "system", "content": "x-anthropic-billing-header: 1\nrest"},
        {"role": "system", "content": [{"type": "text", "text": "x-anthropic-billing-header: 1"}]},
        {"role": "system", "content": "x-anthropic-billing-header: 1"},
        {"role": "critic", "content": "x", "tool_calls": [CALL]},
        {"role": "assistant", "tool_calls": [CALL], "content": None, "function_call": None},
        {"role": "assistant", "content": "x", "tool_calls": [{"function": CALL["function"]}]},
        {
            "role": "assistant",
            "content": "x",
            "tool_calls": [{**CALL, "function": {"name": "f", "arguments": {}}}],
        },
        {"role": "developer", "content": "d", "tools": None},
    ]
    bodies += [{"messages": [user, message, user]} for message in messages]
    tools = [
        {"function": {"name": "f"}},
        {
            "type": "function",
            "cache_control": 1,
            "function": {"parameters": {"b": 1.0, "a": 1e3}, "name": "f", "x": 1},
        },
        {
            "type": "function",
            "function": {"name": "f", "strict": True, "description": None},
            "defer_loading": True,
        },
        {"type": "function", "function": {"name": "f", "defer_loading": False}},
    ]
    bodies += [{"messages": [user], "tools": [tool]} for tool in tools]
    bodies += [
        {"messages": [user], "tools": []},
        {"messages": [user], "tools": TOOLS, "tool_choice": "none"},
        {"messages": [user], "reasoning_effort": "none"},
        {"messages": [user], "reasoning_effort": "max", "chat_template_kwargs": {"enable_thinking": None}},
        {"messages": [user], "chat_template_kwargs": {"enable_thinking": False, "zz": 1}},
        {"messages": [user], "chat_template_kwargs": {"enable_thinking": "auto"}},
        {"messages": [user], "documents": [{"title": "t", "text": "x"}]},
        {"messages": [user], "chat_template_kwargs": {"documents": [{"title": "t", "text": "y"}]}},
        {"messages": [user], "add_generation_prompt": True, "continue_final_message": True},
        {"messages": [user], "continue_final_message": True},
        {"messages": [user], "chat_template_kwargs": {"add_generation_prompt": False}},
    ]
    return bodies


def walked_bodies(seed: int, steps: int) -> list[dict]:
    walk = Walk(seed)
    bodies = []
    for _ in range(steps):
        prompt = walk.prompt()
        bodies.append(
            {
                "messages": prompt.messages,
                "tools": prompt.tools,
                "chat_template_kwargs": prompt.chat_template_kwargs,
                "add_generation_prompt": prompt.add_generation_prompt,
                "continue_final_message": prompt.continue_final_message,
            }
        )
        walk.step()
    return bodies


@pytest.mark.e2e
def test_vllm_makes_the_same_prompts():
    if not has_real("qwen3"):
        pytest.fail("run tests/fetch_tokenizers.py qwen3 first: make test does")
    profile = real_profile("qwen3")
    sources = [None, *(path.read_text() for path in template_files()[::60])]
    jobs = []
    for at, source in enumerate(sources):
        bodies = walked_bodies(at, 8) + (odd_bodies(random.Random(at)) if at % 3 == 0 else [])
        jobs += [{"body": {"model": "m", **body}, "template": source, "defaults": None} for body in bodies]
    mappers = mappers_by_template(profile, sources)
    differing = []
    compared = 0
    for job, theirs in zip(jobs, engine_prompts("qwen3", jobs, "engine_oracle"), strict=True):
        mapper = mappers[job["template"]]
        try:
            ours = mapper.map(ChatPrompt.from_body(job["body"])).token_ids.tolist()
        except RejectedByEngine as error:
            if "error" not in theirs:
                differing.append((job["body"], str(error), theirs["text"]))
            continue
        except Unmappable:
            continue
        compared += 1
        if theirs.get("ids") != ours:
            differing.append((job["body"], theirs.get("error"), theirs.get("text")))
    assert differing == []
    assert compared > len(jobs) // 2
