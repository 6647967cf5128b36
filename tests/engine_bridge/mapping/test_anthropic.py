"""Messages requests as the engine converts them: single rules here, vLLM's own code as judge of a generated
corpus.
"""

import random
from typing import Any

import pytest

from engine_bridge.errors import RejectedByEngine, Unmappable
from engine_bridge.mapping.anthropic import MessagesPrompt
from engine_bridge.mapping.mapper import ChatMapper, MappingState
from tests.engine_bridge.mapping.conversations import (
    CHATML,
    has_real,
    mappers_by_template,
    real_profile,
    say,
    template_files,
    toy_profile,
)
from tests.engine_bridge.mapping.engine_answers import engine_prompts

BILLING = "x-anthropic-billing-header: cc_version=1; cch=7f"
SYSTEM_FIRST = (
    "{% for m in messages %}"
    "{% if m.role == 'system' and not loop.first %}{{ raise_exception('no') }}{% endif %}"
    "<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
)


def converted(body: dict[str, Any], merges_system: bool = False) -> Any:
    return MessagesPrompt.from_body(body).converted(merges_system, "none").prompt


def text(words: str, **more: Any) -> dict[str, Any]:
    return {"type": "text", "text": words, **more}


def user(content: Any) -> dict[str, Any]:
    return {"role": "user", "content": content}


def test_the_system_prompt_is_one_message_without_the_signature_of_claude_code():
    blocks = [text(BILLING), text("be good", cache_control={"type": "ephemeral"}), text(" and kind")]
    prompt = converted({"system": blocks, "messages": [user("hi")]})
    assert prompt.messages == [{"role": "system", "content": "be good and kind"}, user("hi")]


def test_blocks_become_messages_calls_and_reasoning():
    body = {
        "messages": [
            {
                "role": "assistant",
                "content": [
                    {"type": "thinking", "thinking": "hm", "signature": "s"},
                    text("looking"),
                    {"type": "tool_use", "id": "t1", "name": "ls", "input": {"a": 1}},
                ],
            },
            user(
                [
                    {"type": "tool_result", "tool_use_id": "t1", "content": [text("a"), text("b")]},
                    text("go on"),
                ]
            ),
        ]
    }
    function = {"name": "ls", "arguments": '{"a": 1}'}
    assert converted(body).messages == [
        {
            "role": "assistant",
            "reasoning": "hm",
            "tool_calls": [{"id": "t1", "type": "function", "function": function}],
            "content": "looking",
        },
        {"role": "tool", "tool_call_id": "t1", "content": "a\nb"},
        user("go on"),
    ]


@pytest.mark.parametrize(
    ("fields", "effort"),
    [
        ({}, None),
        ({"output_config": {"effort": "high"}}, "high"),
        ({"thinking": {"type": "disabled"}, "output_config": {"effort": "high"}}, "none"),
        ({"thinking": {"type": "enabled", "budget_tokens": 1024}}, None),
    ],
)
def test_thinking_is_an_effort(fields: dict[str, Any], effort: str | None):
    assert converted({"messages": [user("hi")], **fields}).reasoning_effort == effort


@pytest.mark.parametrize(
    "body",
    [
        {},
        {"messages": []},
        {"messages": [user(None)]},
        {"messages": [{"role": "tool", "content": "x"}]},
        {"messages": [user([{"type": "document"}])]},
        {"messages": [user([text(5)])]},
        {"messages": [user("hi")], "tools": [{"name": "f"}]},
        {"messages": [user("hi")], "tool_choice": {"type": "some"}},
        {"messages": [user("hi")], "thinking": {"type": "much"}},
        {"messages": [user("hi")], "output_config": {"effort": "none"}},
    ],
)
def test_what_the_engine_refuses_is_rejected(body: dict[str, Any]):
    with pytest.raises(RejectedByEngine):
        converted(body)


def test_what_changes_tools_on_the_way_is_not_replayed():
    block = {"type": "tool_removal", "tool": {"type": "tool_reference", "name": "f"}}
    with pytest.raises(Unmappable):
        converted({"messages": [{"role": "system", "content": [block]}]})


def conversation() -> dict[str, Any]:
    return {
        "system": "be good",
        "messages": [
            user("one"),
            {"role": "assistant", "content": [{"type": "tool_use", "id": "t", "name": "f", "input": {}}]},
            user([{"type": "tool_result", "tool_use_id": "t", "content": "r"}, text("two")]),
            {"role": "system", "content": "remember"},
            {"role": "assistant", "content": "three"},
            user("four"),
        ],
    }


def test_tokens_belong_to_the_clients_own_messages():
    mapper = ChatMapper(toy_profile(CHATML), chunk_tokens=4)
    body = conversation()
    mapped = mapper.map_converted(MessagesPrompt.from_body(body))
    assert len(mapped.message_ends) == len(body["messages"])
    for count in range(1, len(body["messages"]) + 1):
        shorter = {**body, "messages": body["messages"][:count]}
        alone = mapper.map_converted(MessagesPrompt.from_body(shorter))
        assert alone.message_ends == mapped.message_ends[:count]
        assert alone.head_end == mapped.head_end > 0
        assert alone.token_ids[: alone.message_ends[-1]] == mapped.token_ids[: alone.message_ends[-1]]


def test_what_moved_to_the_front_leaves_nothing_to_the_messages_before_it():
    mapper = ChatMapper(toy_profile(SYSTEM_FIRST), chunk_tokens=4)
    mapped = mapper.map_converted(MessagesPrompt.from_body(conversation()))
    assert (mapped.head_end, mapped.message_ends[:3]) == (0, (0, 0, 0))
    assert 0 < mapped.message_ends[3] < mapped.message_ends[4] < mapped.message_ends[5]


def test_a_request_is_mapped_on_from_the_last_one():
    mapper, state = ChatMapper(toy_profile(CHATML), chunk_tokens=4), MappingState()
    body = conversation()
    for count in (2, 4, 6, 3):
        prompt = MessagesPrompt.from_body({**body, "messages": body["messages"][:count]})
        on = mapper.map_converted(prompt, state)
        cold = mapper.map_converted(prompt)
        assert (on.token_ids, on.message_ends, on.chunk_keys) == (
            cold.token_ids,
            cold.message_ends,
            cold.chunk_keys,
        )


# -- vLLM's own code as judge -----------------------------------------------------------------------------


def block(rng: random.Random, role: str) -> dict[str, Any]:
    kinds = ["text", "text", "thinking", "redacted_thinking", "tool_use", "tool_result", "tool_reference"]
    kind = rng.choice(kinds)
    marked = {"cache_control": {"type": "ephemeral", "ttl": "1h"}} if rng.random() < 0.2 else {}
    match kind:
        case "text":
            return text(rng.choice([say(rng), say(rng, 1), BILLING, ""]), **marked)
        case "thinking":
            return {"type": kind, "thinking": say(rng), "signature": "s"}
        case "tool_use":
            given = rng.choice([{}, {"path": say(rng), "n": 1.0, "deep": {"a": [None, True]}}, None])
            return {
                "type": kind,
                "id": f"toolu_{rng.randrange(99)}",
                "name": rng.choice(["run", "find"]),
                "input": given,
            }
        case "tool_result":
            items = [text(say(rng)) for _ in range(rng.randint(0, 2))]
            given = rng.choice([say(rng), items, None, ""])
            return {"type": kind, "tool_use_id": "toolu_1", "content": given, "is_error": False, **marked}
    return {"type": kind, "data": "x", "tool_name": "run"}


def random_body(rng: random.Random) -> dict[str, Any]:
    messages = []
    for at in range(rng.randint(1, 7)):
        role = rng.choice(["user", "assistant", "user", "assistant", "system"]) if at else "user"
        blocks = [block(rng, role) for _ in range(rng.randint(0, 4))]
        messages.append({"role": role, "content": rng.choice([say(rng), blocks, blocks])})
    body: dict[str, Any] = {"model": "m", "max_tokens": 9000, "messages": messages}
    if rng.random() < 0.7:
        parts = [text(rng.choice([say(rng, 1), BILLING, ""])) for _ in range(rng.randint(0, 3))]
        body["system"] = rng.choice([say(rng), parts, BILLING + "\nrest"])
    if rng.random() < 0.5:
        tools = [
            {
                "name": "run",
                "description": say(rng),
                "input_schema": {"properties": {"a": {"type": "string"}}},
            },
            {
                "name": "find",
                "input_schema": {"type": "object", "b": 1, "a": 1e3},
                "cache_control": {"type": "x"},
            },
            {"name": "odd", "input_schema": {}, "strict": True, "defer_loading": False},
        ]
        body["tools"] = rng.sample(tools, rng.randint(0, 3))
        choices = [{"type": "auto"}, {"type": "any"}, {"type": "none"}, {"type": "tool", "name": "run"}]
        if rng.random() < 0.4:
            body["tool_choice"] = rng.choice(choices)
    if rng.random() < 0.4:
        body["thinking"] = rng.choice(
            [{"type": "disabled"}, {"type": "enabled", "budget_tokens": 2048}, {"type": "adaptive"}]
        )
    if rng.random() < 0.2:
        body["output_config"] = {"effort": rng.choice(["low", "high", "max"])}
    if rng.random() < 0.2:
        body["chat_template_kwargs"] = rng.choice([{"enable_thinking": False}, {"enable_thinking": None}, {}])
    return body


@pytest.mark.e2e
def test_vllm_makes_the_same_prompts():
    if not has_real("qwen3"):
        pytest.fail("run tests/fetch_tokenizers.py qwen3 first: make test does")
    profile = real_profile("qwen3")
    sources = [None, CHATML, SYSTEM_FIRST, *(path.read_text() for path in template_files()[30::60])]
    rng = random.Random(4)
    jobs = [
        {"api": "messages", "body": random_body(rng), "template": source}
        for source in sources
        for _ in range(25)
    ]
    mappers = mappers_by_template(profile, sources)
    differing = []
    compared = 0
    for job, theirs in zip(jobs, engine_prompts("qwen3", jobs), strict=True):
        try:
            ours = mappers[job["template"]].map_converted(MessagesPrompt.from_body(job["body"]))
        except RejectedByEngine as error:
            if "error" not in theirs:
                differing.append((job["body"], str(error), theirs))
            continue
        except Unmappable:
            continue
        if "error" in theirs:
            differing.append((job["body"], "not refused", theirs))
            continue
        compared += 1
        if theirs["ids"] != [ours.token_ids.tolist()]:
            differing.append((job["template"], job["body"], theirs))
        assert len(ours.message_ends) == len(job["body"]["messages"])
    assert differing == []
    assert compared > len(jobs) // 3
