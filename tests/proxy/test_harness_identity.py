"""What each harness says of itself is understood, and nothing that it says wrong fails a call."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lifecycle.vocabulary import IdentityRung
from proxy.harness_identity import HarnessCall, groups_differ, read_harness_call


def read(headers: dict[str, str], **document: Any) -> HarnessCall:
    return read_harness_call([(n.encode(), v.encode()) for n, v in headers.items()], document)


def turn(**fields: object) -> dict[str, str]:
    return {"thread-id": "t", "x-codex-turn-metadata": json.dumps(fields)}


@pytest.mark.parametrize(
    ("headers", "rung", "name", "parent"),
    [
        ({"x-dynamo-session-id": "a:b"}, IdentityRung.DYNAMO, "dynamo:a:b", ""),
        (
            {"x-dynamo-session-id": "b", "x-dynamo-parent-session-id": "a"},
            IdentityRung.DYNAMO,
            "dynamo:b",
            "dynamo:a",
        ),
        ({"x-claude-code-session-id": "s"}, IdentityRung.CLAUDE_CODE, "claude-code:s", ""),
        (
            {"x-claude-code-session-id": "s", "x-claude-code-agent-id": "x"},
            IdentityRung.CLAUDE_CODE,
            "claude-code:s:x",
            "claude-code:s",
        ),
        (
            {
                "x-claude-code-session-id": "s",
                "x-claude-code-agent-id": "y",
                "x-claude-code-parent-agent-id": "x",
            },
            IdentityRung.CLAUDE_CODE,
            "claude-code:s:y",
            "claude-code:s:x",
        ),
        ({"thread-id": "t", "session-id": "t"}, IdentityRung.CODEX, "codex:t", ""),
        ({"thread-id": "t", "session-id": "r"}, IdentityRung.CODEX, "codex:t", "codex:r"),
        ({"session-id": "r"}, IdentityRung.CODEX, "codex:r", ""),
        (
            {"thread-id": "t", "session-id": "r", "x-codex-parent-thread-id": "p"},
            IdentityRung.CODEX,
            "codex:t",
            "codex:p",
        ),
        (turn(parent_thread_id="p"), IdentityRung.CODEX, "codex:t", "codex:p"),
        ({"x-session-id": "ses"}, IdentityRung.SESSION, "session:ses", ""),
        ({"x-session-id": "c", "x-parent-session-id": "p"}, IdentityRung.SESSION, "session:c", "session:p"),
        ({"x-deepseek-harness-session-id": "d"}, IdentityRung.SESSION, "deepseek:d", ""),
    ],
)
def test_each_harness_names_its_contexts(
    headers: dict[str, str], rung: IdentityRung, name: str, parent: str
) -> None:
    said = read(headers)
    assert (said.rung, said.context_id, said.parent) == (rung, name, parent)
    assert said.told_by in headers
    assert not said.errors


def test_the_first_of_several_names_counts() -> None:
    everything = {
        "x-session-id": "5",
        "thread-id": "4",
        "x-claude-code-session-id": "3",
        "x-dynamo-session-id": "2",
    }
    for name in ("x-dynamo-session-id", "x-claude-code-session-id", "thread-id", "x-session-id"):
        assert read(everything).told_by == name
        del everything[name]


def test_what_codex_says_of_a_turn() -> None:
    assert read(turn(request_kind="compaction")).compacts
    assert not read(turn(request_kind="turn")).compacts
    assert read(turn(history_initialization="warm_fork", parent_thread_id="p")).forks
    assert read(turn(history_initialization="cold_resume")).resumes
    assert read({**turn(), "x-codex-window-id": "t:1"}).window == "t:1"
    assert read(turn(context_window_id="w")).window == "w"


def test_a_session_may_say_that_it_is_over() -> None:
    for named in ({"x-dynamo-session-id": "a"}, {"x-claude-code-session-id": "a"}):
        assert read({**named, "x-dynamo-session-final": "true"}).final
        assert not read({**named, "x-dynamo-session-final": "false"}).final


@pytest.mark.parametrize("given", [{"session_id": "a", "parent_session_id": "b"}, None])
def test_an_agentic_context_stands_in_the_body(given: dict[str, str] | None) -> None:
    for value in (given, json.dumps(given)) if given else ():
        said = read({}, vllm_xargs={"agentic_context": value})
        assert (said.context_id, said.parent) == ("session:a", "session:b")
    assert not read({}, vllm_xargs={"other": 1}).context_id


@pytest.mark.parametrize(
    "given",
    [
        {"x-codex-turn-metadata": "{"},
        {"x-codex-turn-metadata": "[1]"},
        {"x-codex-turn-metadata": "[" * 100_000},
        {"x-codex-turn-metadata": json.dumps({"request_kind": 7}), "x-dynamo-session-final": "perhaps"},
    ],
)
def test_what_is_malformed_is_left_out_and_reported(given: dict[str, str]) -> None:
    said = read({"thread-id": "t", **given})
    assert said.context_id == "codex:t"
    assert said.errors
    assert not said.compacts


@pytest.mark.parametrize("value", [7, [1], "no json", '"text"'])
def test_a_malformed_agentic_context_is_reported(value: object) -> None:
    said = read({"x-affinity": "a"}, vllm_xargs={"agentic_context": value})
    assert not said.context_id
    assert said.errors
    assert said.groups


headers = st.sampled_from(
    [
        *("x-dynamo-session-id", "x-dynamo-session-final", "x-claude-code-session-id"),
        *("x-claude-code-agent-id", "thread-id", "x-codex-turn-metadata", "x-session-id", "x-affinity"),
    ]
)
json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=5), inner, max_size=2),
    max_leaves=4,
)


@given(
    st.lists(st.tuples(headers.map(str.encode), st.binary(max_size=40)), max_size=6),
    st.dictionaries(
        st.sampled_from(["user", "session_id", "prompt_cache_key", "metadata", "vllm_xargs"]), json_values
    ),
)
def test_nothing_that_is_said_fails_a_call(
    given: list[tuple[bytes, bytes]], document: dict[str, Any]
) -> None:
    read_harness_call(given, document)


def test_session_level_keys_group_and_the_strongest_decides() -> None:
    def groups(**document: Any) -> Any:
        return read({}, **document).groups

    one = groups(prompt_cache_key="a", user="u")
    assert not groups_differ(one, groups(prompt_cache_key="a", user="other"))
    assert groups_differ(one, groups(prompt_cache_key="b", user="u"))
    assert groups_differ(one, groups(user="other"))
    assert not groups_differ(one, groups(session_id="s"))
    assert not groups_differ(one, ())
    assert groups_differ(groups(metadata={"user_id": "u1"}), groups(metadata={"user_id": "u2"})), (
        "whose session it is, in Anthropic's words"
    )
    assert not read({}, user=7, metadata=[]).groups
