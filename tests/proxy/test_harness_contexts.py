"""Whatever a harness calls its sessions: each has one name that a context may have, and no two share one."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.harness_contexts import (
    claude_code_context,
    codex_context,
    deepseek_context,
    dynamo_context,
    session_context,
)
from proxy.operations import is_context_id

ids = st.text(st.characters(), min_size=1, max_size=300) | st.text("ab:%/\0~", min_size=1, max_size=4)


def test_usual_ids_stay_readable() -> None:
    assert codex_context("0199-ab") == "codex:0199-ab"
    assert claude_code_context("5f3c") == "claude-code:5f3c"
    assert claude_code_context("5f3c", "a1") == "claude-code:5f3c:a1"
    assert dynamo_context("run-7:main") == "dynamo:run-7:main"
    assert session_context("ses_4/x") == "session:ses_4%2Fx"
    assert deepseek_context("7") == "deepseek:7"


@given(ids)
def test_every_id_has_a_name(given_id: str) -> None:
    for name in (codex_context(given_id), session_context(given_id), claude_code_context(given_id, given_id)):
        assert is_context_id(name)


@given(st.tuples(ids, st.one_of(st.just(""), ids)), st.tuples(ids, st.one_of(st.just(""), ids)))
def test_different_agents_have_different_names(one: tuple[str, str], other: tuple[str, str]) -> None:
    assert (claude_code_context(*one) == claude_code_context(*other)) == (one == other)


@pytest.mark.parametrize(
    ("one", "other"),
    [(("a:b", "c"), ("a", "b:c")), (("a:b", ""), ("a", "b")), (("a%3Ab", "c"), ("a:b", "c"))],
)
def test_a_colon_in_an_id_is_no_border(one: tuple[str, str], other: tuple[str, str]) -> None:
    assert claude_code_context(*one) != claude_code_context(*other)
