"""A call's sender gets one of a fixed set of names."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.harness import HARNESSES, OTHER, UNNAMED, harness_of


@pytest.mark.parametrize(
    ("agent", "name"),
    [
        ("codex_cli_rs/0.171.0 (Ubuntu 22.4.0; x86_64) xterm", "codex"),
        ("claude-cli/2.1.5 (external, cli)", "claude-code"),
        ("opencode/1.18.0 ai-sdk/provider-utils/3.0", "opencode"),
        ("Agents/Python 0.24.0", "openai-agents"),
        ("AsyncOpenAI/Python 1.99.1", "openai-python"),
        ("OpenAI/JS 5.1.0", "openai-node"),
        ("litellm/1.81.0", "litellm"),
        ("python-httpx/0.28.1", "httpx"),
        ("my own agent", OTHER),
    ],
)
def test_known_programs_are_named(agent: str, name: str) -> None:
    assert harness_of([(b"host", b"x"), (b"user-agent", agent.encode())]) == name


@given(st.binary(max_size=200))
def test_whatever_is_sent_the_names_are_few(agent: bytes) -> None:
    assert harness_of([(b"user-agent", agent)]) in HARNESSES | {UNNAMED}


def test_without_a_user_agent_there_is_no_name() -> None:
    assert harness_of([]) == UNNAMED
