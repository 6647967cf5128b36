"""What is asked is read as vLLM reads it; what is said keeps to the limits and reads back."""

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine_bridge.sim.generation import Generation, Refused, Speaker, read_chat, read_completion
from engine_bridge.sim.model_files import MODEL_DIRECTORY
from engine_bridge.sim.replies import Asked, Reply, ToolUse
from engine_bridge.sim.tokenizer import ChatTokenizer

TOKENIZER = ChatTokenizer(MODEL_DIRECTORY)
LIMIT = 4096
USER = [{"role": "user", "content": "Which file holds the parser?"}]
TOOLS = [{"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}]
LOOKING = Reply(text="Let me see.", tool_calls=(ToolUse("look", {"path": "a.py"}), ToolUse("look", {})))
[EOS] = TOKENIZER.eos_ids


def chat(body: dict[str, Any], choice: int = 0, script: Any = None) -> Generation:
    ask = read_chat({"messages": USER, **body}, TOKENIZER, LIMIT)
    return Speaker(TOKENIZER, script).generation(ask, choice)


def streamed(said: Generation) -> tuple[str, list[dict[str, Any]]]:
    """A client's sum of the deltas."""
    text, calls = "", {}
    for delta in said.deltas:
        text += delta.get("content", "")
        for piece in delta.get("tool_calls", ()):
            call = calls.setdefault(piece["index"], {"function": {"arguments": ""}})
            call.update({key: piece[key] for key in ("id", "type") if key in piece})
            call["function"]["name"] = piece["function"].get("name", call["function"].get("name"))
            call["function"]["arguments"] += piece["function"]["arguments"]
    return text, [calls[n] for n in sorted(calls)]


@settings(deadline=None)
@given(
    st.fixed_dictionaries(
        {},
        optional={
            "max_tokens": st.integers(1, 120),
            "min_tokens": st.integers(0, 120),
            "ignore_eos": st.booleans(),
            "stop": st.sampled_from(["e", ["the", "a"], ".", "zzz", ""]),
            "seed": st.integers(0, 3),
        },
    ),
    st.sampled_from(
        [None, LOOKING, Reply(text="Grüße 🧪."), Reply(num_tokens=9), Reply(text="", finish_reason="length")]
    ),
)
def test_whatever_is_asked_limits_hold_and_the_stream_is_the_answer(
    body: dict[str, Any], reply: Reply | None
):
    said = chat(body, script=lambda asked: reply)
    limit = body.get("max_tokens", LIMIT)
    assert 1 <= len(said.ids) <= limit
    assert len(said.deltas) == len(said.ids)
    assert streamed(said) == (said.text, list(said.tool_calls))
    assert said.text == chat(body, script=lambda asked: reply).text
    if said.stop_reason is not None:
        assert said.finish_reason == "stop"
        assert said.stop_reason not in said.text
    else:
        assert (said.finish_reason == "length") == (said.ids[-1] != EOS)
        assert len(said.ids) >= min(body.get("min_tokens", 0), limit)
    if body.get("ignore_eos") and "max_tokens" in body and said.stop_reason is None:
        assert len(said.ids) == limit
    assert bool(said.tool_calls) == (said.finish_reason == "tool_calls")


def test_a_scripted_call_has_the_tokens_it_is_sent_back_with():
    said = chat({"tools": TOOLS}, script=lambda asked: LOOKING)
    assert said.finish_reason == "tool_calls"
    assert said.text == "Let me see."
    assert [call["function"]["name"] for call in said.tool_calls] == ["look", "look"]
    assert len({call["id"] for call in said.tool_calls}) == 2
    answer = {"role": "assistant", "content": said.text, "tool_calls": list(said.tool_calls)}
    asked = read_chat({"messages": USER, "tools": TOOLS}, TOKENIZER, LIMIT).prompt
    again = read_chat({"messages": [*USER, answer], "tools": TOOLS}, TOKENIZER, LIMIT).prompt
    assert again[: len(asked) + len(said.ids)] == asked + said.ids


def test_a_script_sees_the_conversation_and_may_leave_it():
    seen: list[Asked] = []

    def script(asked: Asked) -> None:
        seen.append(asked)

    body = {"tools": TOOLS, "model": "m"}
    assert chat(body, script=script).ids == chat(body).ids
    assert (seen[0].last_text, seen[0].tools, seen[0].body["model"]) == (USER[0]["content"], TOOLS, "m")


def test_a_single_choice_is_all_it_may_say():
    only = '<tool_call>\n{"name": "look", "arguments": {"path": "a.py"}}\n</tool_call>'
    body = {"structured_outputs": {"choice": [only]}}
    said = chat({**body, "tools": TOOLS}, script=lambda asked: LOOKING)
    assert (said.text, said.finish_reason) == ("", "tool_calls")
    assert json.loads(said.tool_calls[0]["function"]["arguments"]) == {"path": "a.py"}
    assert chat(body).text == only


def test_choices_differ():
    assert chat({}, 0).ids != chat({}, 1).ids


def test_fields_that_a_proxy_adds_are_read():
    transfer = {"lmcache.max_offload_tokens": 0, "cached_token_stats": True}
    body = {"messages": USER, "kv_transfer_params": transfer, "cache_salt": "s", "session_id": "c", "n": 3}
    ask = read_chat(body, TOKENIZER, LIMIT)
    assert (ask.store_until, ask.wants_cache_stats, ask.salt, ask.session_id) == (0, True, "s", "c")
    assert ask.num_choices == 3
    plain = read_chat({"messages": USER, "max_completion_tokens": 5, "max_tokens": 9}, TOKENIZER, LIMIT)
    assert (plain.store_until, plain.salt, plain.session_id, plain.max_tokens) == (None, "", None, 5)


def test_a_completion_takes_text_or_tokens_or_several():
    def prompts(given: Any) -> list[list[int]]:
        return [a.prompt.tolist() for a in read_completion({"prompt": given}, TOKENIZER, LIMIT)]

    words = TOKENIZER.encode("two words").tolist()
    assert prompts("two words") == prompts(words) == [words]
    assert prompts(["two words", "two words"]) == prompts([words, words]) == [words, words]
    [ask] = read_completion({"prompt": "two words"}, TOKENIZER, LIMIT)
    assert ask.max_tokens == 16
    assert len(Speaker(TOKENIZER).generation(ask, 0).ids) <= 16


@pytest.mark.parametrize(
    ("body", "param", "words"),
    [
        ({"messages": []}, None, "at least one"),
        ({"messages": USER, "max_tokens": 0}, "max_tokens", "at least 1, got 0"),
        ({"messages": USER, "max_tokens": "9"}, "max_tokens", "integer"),
        ({"messages": USER, "n": -1}, "n", "at least 1"),
        ({"messages": USER, "cache_salt": ""}, "cache_salt", "non-empty"),
        ({"messages": USER, "kv_transfer_params": {"lmcache.max_offload_tokens": "x"}}, None, "integer"),
        (
            {"messages": [{"role": "user", "content": "word " * LIMIT}]},
            "input_tokens",
            "maximum context length",
        ),
    ],
)
def test_refusals_name_their_reason(body: dict[str, Any], param: str | None, words: str):
    with pytest.raises(Refused, match=words) as refused:
        read_chat(body, TOKENIZER, LIMIT)
    assert refused.value.status == 400
    assert param is None or refused.value.param == param


@pytest.mark.parametrize("prompt", [None, [], [[]], {"a": 1}, [1, "a"], [True]])
def test_a_completion_without_a_prompt_is_refused(prompt: Any):
    with pytest.raises(Refused):
        read_completion({"prompt": prompt}, TOKENIZER, LIMIT)


def test_a_prompt_leaves_only_so_much_room():
    ask = read_chat({"messages": USER, "max_tokens": 10_000}, TOKENIZER, LIMIT)
    assert len(ask.prompt) + ask.max_tokens == LIMIT
