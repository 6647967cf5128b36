"""Responses requests as the engine converts them: single rules here, vLLM's own code as judge of a generated
corpus.
"""

import random
from typing import Any

import pytest

from engine_bridge.errors import RejectedByEngine, Unmappable
from engine_bridge.mapping.mapper import ChatMapper, MappingState
from engine_bridge.mapping.responses import ResponsesPrompt, custom_arguments, groups, remembered
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

Body = dict[str, Any]


def read(given: Any, **fields: Any) -> ResponsesPrompt:
    return ResponsesPrompt.from_body({"input": given, **fields})


def converted(given: Any, **fields: Any) -> Any:
    return read(given, **fields).converted().prompt


def user(content: Any) -> Body:
    return {"role": "user", "content": content}


def thought(text: str) -> Body:
    content = [{"type": "reasoning_text", "text": text}]
    return {"type": "reasoning", "id": "rs_1", "summary": [], "content": content}


def said(text: str, **more: Any) -> Body:
    part = {"type": "output_text", "text": text, "annotations": []}
    return {
        "type": "message",
        "id": "m",
        "role": "assistant",
        "status": "completed",
        "content": [part],
        **more,
    }


def call(call_id: str, name: str = "ls", arguments: str = "{}", **more: Any) -> Body:
    return {"type": "function_call", "call_id": call_id, "name": name, "arguments": arguments, **more}


def output(call_id: str, result: Any = "ok") -> Body:
    return {"type": "function_call_output", "call_id": call_id, "output": result}


def chat_call(call_id: str, name: str = "ls", arguments: str = "{}") -> Body:
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


def test_text_alone_is_a_users_message_and_instructions_stand_before_it():
    prompt = converted("hi", instructions="be good")
    assert prompt.messages == [{"role": "system", "content": "be good"}, user("hi")]
    assert prompt.add_generation_prompt


def test_what_an_assistant_said_in_one_go_is_one_message():
    items = [user("q"), thought("hm"), said("I look"), call("1"), call("2"), output("1"), call("3")]
    assert converted(items).messages == [
        user("q"),
        {
            "role": "assistant",
            "reasoning": "hm",
            "content": "I look",
            "tool_calls": [chat_call("1"), chat_call("2")],
        },
        {"role": "tool", "tool_call_id": "1", "content": "ok"},
        {"role": "assistant", "tool_calls": [chat_call("3")]},
    ]


def test_a_second_text_or_thought_begins_a_message_of_its_own():
    items = [said("one"), said("two"), call("1"), thought("a"), thought("b")]
    assert converted(items).messages == [
        {"role": "assistant", "content": "one"},
        {"role": "assistant", "content": "two", "tool_calls": [chat_call("1")], "reasoning": "a"},
        {"role": "assistant", "reasoning": "b"},
    ]


def test_what_no_template_sees_is_left_out():
    [message] = converted([{"type": "message", "id": "x", "status": "completed", **user("q")}]).messages
    assert message == user("q")


def test_a_request_that_follows_another_sees_its_items_and_its_answers_texts():
    first = read([{"role": "system", "content": "once"}, user("a"), call("1")], instructions="gone")
    second = read("b", instructions="new").following(remembered(first.items, ["said", "more"]))
    assert second.converted().prompt.messages == [
        {"role": "system", "content": "new"},
        user("a"),
        {"role": "assistant", "tool_calls": [chat_call("1")]},
        {"role": "assistant", "content": "said"},
        {"role": "assistant", "content": "more"},
        user("b"),
    ]


def test_an_open_last_message_is_gone_on_with():
    prompt = converted([user("q"), said("half a", status="incomplete")])
    assert (prompt.continue_final_message, prompt.add_generation_prompt) == (True, False)
    assert converted([user("q"), call("1", status="incomplete")]).add_generation_prompt


def test_tools_are_functions_and_namespaces_are_part_of_the_name():
    schema = {"type": "object", "properties": {}}
    tools = [
        {"type": "function", "name": "ls", "parameters": schema, "strict": True},
        {"type": "web_search"},
        {
            "type": "namespace",
            "name": "fs",
            "description": "d",
            "tools": [{"type": "function", "name": "rm"}],
        },
        {"type": "custom", "name": "sh", "description": "shell"},
    ]
    given = converted("q", tools=tools).tools
    assert [tool["function"]["name"] for tool in given] == ["ls", "fs__rm", "sh"]
    assert given[0]["function"] == {"name": "ls", "parameters": schema, "strict": True}
    assert converted("q", tools=[]).tools is None
    used = converted([call("1", "rm", namespace="fs"), {**call("2", "sh"), "type": "function_call"}])
    assert [each["function"]["name"] for each in used.messages[0]["tool_calls"]] == ["fs__rm", "sh"]


@pytest.mark.parametrize(
    "body",
    [
        {},
        {"input": []},
        {"input": ["text"]},
        {"input": [{"role": "tool", "content": "x"}]},
        {"input": [user(None)]},
        {"input": [user([{"type": "text", "text": "x"}])]},
        {"input": [{"type": "item_reference", "id": "x"}]},
        {"input": [{"type": "compaction", "encrypted_content": "x"}]},
        {"input": [{"type": "reasoning", "summary": [], "encrypted_content": "x"}]},
        {"input": [call("1", arguments={})]},  # type: ignore[arg-type]
        {"input": "x", "tools": None},
        {"input": "x", "tools": [{"type": "custom", "name": "c", "format": {"type": "grammar"}}]},
        {"input": "x", "reasoning": {"effort": "much"}},
        {"input": "x", "instructions": ["x"]},
    ],
)
def test_what_the_engine_refuses_is_rejected(body: Body):
    with pytest.raises(RejectedByEngine):
        ResponsesPrompt.from_body(body).converted()


@pytest.mark.parametrize(
    "body",
    [
        {"input": "x", "prompt": {"id": "p"}},
        {"input": "x", "previous_input_messages": [{}]},
    ],
)
def test_what_is_not_replayed_says_so(body: Body):
    with pytest.raises(Unmappable):
        ResponsesPrompt.from_body(body)


def test_an_image_is_an_item_whose_tokens_are_not_known():
    prompt = read([user([{"type": "input_image", "image_url": "u", "detail": "auto"}])])
    assert len(prompt.items) == 1
    with pytest.raises(Unmappable, match="input_image"):
        ChatMapper(toy_profile(CHATML)).map_converted(prompt)


CONVERSATION = [user("one"), thought("hm"), said("look"), call("1"), output("1"), said("three"), user("four")]


def test_tokens_belong_to_the_clients_own_items():
    mapper, state = ChatMapper(toy_profile(CHATML), chunk_tokens=4), MappingState()
    whole = mapper.map_converted(read(CONVERSATION, instructions="be good"))
    ends = whole.message_ends
    assert len(ends) == len(CONVERSATION)
    assert ends[0] == ends[1] == ends[2] < ends[3] < ends[4] < ends[5] < ends[6]
    for count in (1, 4, 5, 6, 2, 7):
        prompt = read(CONVERSATION[:count], instructions="be good")
        on, cold = mapper.map_converted(prompt, state), mapper.map_converted(prompt)
        assert on.token_ids == cold.token_ids
        assert on.message_ends == cold.message_ends
        assert (on.chunk_keys, on.head_end) == (cold.chunk_keys, whole.head_end)
        assert whole.head_end > 0


def test_groups_are_the_messages_and_where_they_begin():
    prompt = read(CONVERSATION)
    found = list(groups(prompt.items))
    assert [begin for begin, _ in found] == [0, 1, 4, 5, 6]
    assert [message for _, message in found] == prompt.converted().prompt.messages


def test_free_text_for_a_tool_is_an_argument():
    assert custom_arguments('a "é"') == '{"input": "a \\"é\\""}'


# -- vLLM's own code as judge -----------------------------------------------------------------------------


def random_item(rng: random.Random) -> Body:
    number = str(rng.randrange(9))
    parts = [{"type": "input_text", "text": say(rng), "foo": 1} for _ in range(rng.randint(0, 2))]
    texts = [{"type": "summary_text", "text": say(rng)} for _ in range(rng.randint(0, 2))]
    content = rng.choice([None, [], [{"type": "reasoning_text", "text": say(rng)}]])
    status = rng.choice([{}, {}, {"status": rng.choice(["completed", "incomplete"])}])
    return rng.choice(
        [
            user(say(rng)),
            {**user(parts), "type": "message", **status},
            {"role": rng.choice(["system", "developer"]), "content": rng.choice([say(rng), parts])},
            {"role": "assistant", "content": say(rng), **status},
            {"role": "assistant", "content": parts},
            said(say(rng), **status),
            {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": say(rng)}]},
            call(number, rng.choice(["run", "sh"]), rng.choice(['{"a": [1, null]}', "", "no"])),
            call(number, namespace=rng.choice(["fs", "", None]), status=None, id="fc_1"),
            {"type": "custom_tool_call", "call_id": number, "name": "sh", "input": say(rng)},
            {"type": "custom_tool_call_output", "call_id": number, "output": say(rng)},
            output(number, rng.choice([say(rng), parts])),
            {"type": "reasoning", "summary": texts, "content": content},
            thought(say(rng)),
        ]
    )


def random_body(rng: random.Random) -> Body:
    items = [random_item(rng) for _ in range(rng.randint(1, 7))]
    body: Body = {"model": "m", "input": rng.choice([say(rng), items, items, items])}
    if rng.random() < 0.5:
        body["instructions"] = rng.choice([say(rng), "", None])
    if rng.random() < 0.5:
        tools = [
            {"type": "function", "name": "run", "description": say(rng), "parameters": {"b": 1, "a": 1e3}},
            {"type": "function", "name": "bare", "strict": False, "defer_loading": True, "extra": 1},
            {"type": "custom", "name": "sh", "description": say(rng)},
            {"type": "web_search_preview"},
            {
                "type": "namespace",
                "name": "fs",
                "description": "d",
                "tools": [{"type": "function", "name": "ls", "parameters": {}}],
            },
        ]
        body["tools"] = rng.sample(tools, rng.randint(0, 4))
        if body["tools"] and rng.random() < 0.3:
            body["tool_choice"] = rng.choice(["auto", "none", "required"])
    if rng.random() < 0.3:
        body["reasoning"] = rng.choice([{"effort": "none"}, {"effort": "max"}, {"effort": "low"}, {}, None])
    if rng.random() < 0.2:
        body["chat_template_kwargs"] = rng.choice([{"enable_thinking": False}, {"enable_thinking": None}, {}])
    return body


def random_answer(rng: random.Random) -> tuple[list[Body], list[str]]:
    """Output items, and the texts among them."""
    texts = [say(rng) for _ in range(rng.randint(0, 2))]
    items = [thought(say(rng)), *map(said, texts), call("9")]
    return items[rng.randint(0, 1) :], texts


@pytest.mark.e2e
def test_vllm_makes_the_same_prompts():
    if not has_real("qwen3"):
        pytest.fail("run tests/fetch_tokenizers.py qwen3 first: make test does")
    profile = real_profile("qwen3")
    sources = [None, CHATML, *(path.read_text() for path in template_files()[30::60])]
    rng = random.Random(7)
    jobs = []
    for source in sources:
        for _ in range(30):
            answers = [random_answer(rng) for _ in range(rng.choice([0, 0, 1, 2]))]
            earlier = [(random_body(rng), items, texts) for items, texts in answers]
            jobs.append({"body": random_body(rng), "template": source, "earlier": earlier})
    asked = [
        {**job, "api": "responses", "earlier": [each[:2] for each in job["earlier"]]}  # type: ignore[attr-defined]
        for job in jobs
    ]
    mappers = mappers_by_template(profile, sources)
    differing = []
    compared = followed = 0
    for job, theirs in zip(jobs, engine_prompts("qwen3", asked), strict=True):
        try:
            items: tuple[Any, ...] = ()
            for body, _, texts in job["earlier"]:  # type: ignore[attr-defined]
                items = remembered(ResponsesPrompt.from_body(body).following(items).items, texts)  # type: ignore[arg-type]
            prompt = ResponsesPrompt.from_body(job["body"]).following(items)  # type: ignore[arg-type]
            ours = mappers[job["template"]].map_converted(prompt)  # type: ignore[index]
        except RejectedByEngine as error:
            if "error" not in theirs:
                differing.append((job, str(error), theirs))
            continue
        except Unmappable:
            continue
        if "error" in theirs:
            differing.append((job, "not refused", theirs))
            continue
        compared += 1
        followed += bool(job["earlier"])
        if theirs["ids"] != [ours.token_ids.tolist()]:
            differing.append((job, theirs))
        assert len(ours.message_ends) == len(prompt.items)
    assert differing == []
    assert compared > len(jobs) // 3
    assert followed > compared // 5
