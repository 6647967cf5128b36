"""Which requests have a prompt that can be computed from their messages alone."""

import pytest

from engine_bridge.errors import RejectedByEngine, Unmappable
from engine_bridge.mapping.prompts import ChatPrompt

USER = {"role": "user", "content": "hi"}


def test_a_plain_request_is_read_with_the_engines_defaults():
    prompt = ChatPrompt.from_body({"model": "m", "messages": [USER], "temperature": 0})
    assert prompt.messages == [USER]
    assert prompt.add_generation_prompt
    assert not prompt.continue_final_message
    assert prompt.tools is None


@pytest.mark.parametrize(
    "extra",
    [
        {"chat_template": "{{ messages }}"},
        {"echo": True},
        {"add_special_tokens": True},
        {"truncate_prompt_tokens": 10},
        {"kv_transfer_params": {"prompt_token_ids": [1]}},
        {"add_generation_prompt": "yes"},
    ],
)
def test_a_prompt_with_another_source_is_unmappable(extra):
    with pytest.raises(Unmappable):
        ChatPrompt.from_body({"messages": [USER], **extra})


@pytest.mark.parametrize(
    "body",
    [
        {},
        {"messages": []},
        {"messages": "hi"},
        {"messages": ["hi"]},
        {"messages": [USER], "tools": []},
        {"messages": [USER], "reasoning_effort": "enormous"},
        {"messages": [USER], "chat_template_kwargs": [1]},
        {"messages": [USER], "documents": [{"text": 1}]},
        {"messages": [USER], "continue_final_message": True},
    ],
)
def test_a_request_the_engine_refuses_is_rejected(body):
    with pytest.raises(RejectedByEngine):
        ChatPrompt.from_body(body)


def test_ordinary_transfer_parameters_do_not_matter():
    ChatPrompt.from_body({"messages": [USER], "kv_transfer_params": {"lmcache.tag": "x"}, "echo": False})
