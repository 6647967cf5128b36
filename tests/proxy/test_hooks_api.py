"""The endpoint of hooks: its answers disturb no harness, and say what was wrong with what it cannot read."""

import contextlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lifecycle.errors import LogUnavailable
from proxy import claude_code_setup, codex_setup
from proxy.claude_code_hooks import claude_code_fact
from proxy.codex_hooks import codex_fact
from proxy.config import LimitsConfig
from proxy.errors import InvalidRequest
from proxy.hook_facts import HookFact
from proxy.hooks_api import MAX_HOOK_BYTES
from proxy.opencode_hooks import opencode_fact
from proxy.operations import is_context_id
from tests.lifecycle.lives import GatedLog
from tests.proxy.api_keys import bearer, keys
from tests.proxy.test_codex_hooks import ROOT, hook
from tests.proxy.test_hook_reports import CODEX, LIST, told
from tests.proxy.whole_proxy import lifecycle, whole_proxy

HOOKS = "/kv/v1/hooks/codex"


async def test_what_cannot_be_read_says_why_and_loses_nothing(tmp_path: Path) -> None:
    bodies = {
        b"": "no JSON",
        b"{": "no JSON",
        b"[" * 100_000: "no JSON",
        b"[]": "no object",
        b'{"hook_event_name": "Stop"}': "session_id",
        b'{"session_id": "a", "hook_event_name": 7}': "hook_event_name",
        b'{"session_id": "a", "hook_event_name": "Stop", "agent_id": 7}': "agent_id",
    }
    async with whole_proxy(tmp_path) as it:
        await it.chat(LIST, lifecycle(ctx=CODEX))
        for body, says in bodies.items():
            answer = await it.data.post(HOOKS, content=body)
            assert answer.status_code == 400
            assert answer.headers["content-type"] == "application/problem+json"
            assert says in answer.json()["detail"]
        assert await told(it, "codex", hook("Stop")) in ("taken", "queued")
        assert (await it.data.post(HOOKS, content=b"x" * (MAX_HOOK_BYTES + 1))).status_code == 413
        assert (await it.data.get(HOOKS)).status_code == 404
        nowhere = await it.data.post("/kv/v1/hooks/nobody", json=hook("Stop"))
        assert nowhere.status_code == 404
        assert HOOKS in nowhere.json()["detail"]
        assert await told(it, "codex", hook("SomethingNew", and_more={"of": ["it"]})) == "ignored"


async def test_a_key_is_needed_once_there_are_keys(tmp_path: Path) -> None:
    async with whole_proxy(tmp_path, api_keys=keys()) as it:
        assert (await it.data.post(HOOKS, json=hook("Stop"))).status_code == 401
        assert (await it.data.post(HOOKS, json=hook("Stop"), headers=bearer("a"))).status_code == 200


async def test_a_harness_hears_of_no_trouble_of_ours(tmp_path: Path) -> None:
    async with whole_proxy(tmp_path) as it:
        await it.chat(LIST, lifecycle(ctx=CODEX))
        log = GatedLog(it.runtime.event_log)
        it.runtime.tracker._log = log
        log.away = LogUnavailable("disk full")
        for _ in range(2):
            answer = await it.data.post(HOOKS, json=hook("Stop"))
            assert (answer.status_code, answer.json()) == (200, {})
        log.away = None
        await it.until(lambda: not it.runtime.tracker.degraded)


async def test_hooks_count_as_operations(tmp_path: Path) -> None:
    async with whole_proxy(tmp_path, limits=LimitsConfig(ops_per_minute=1)) as it:
        await it.chat(LIST, lifecycle(ctx=CODEX))
        assert await told(it, "codex", hook("Stop")) in ("taken", "queued")
        verdict = await told(it, "codex", hook("SessionEnd"))
        assert verdict == "queued" or "operation limit" in verdict
        assert it.context(CODEX).open


async def test_ids_that_no_context_could_have_are_named_all_the_same(tmp_path: Path) -> None:
    async with whole_proxy(tmp_path) as it:
        for session in ("a/b", "é\n", "x" * 1024, ROOT):
            verdict = await told(it, "codex", {**hook("SessionEnd"), "session_id": session})
            assert verdict in ("ignored: no such context", "queued")


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=9),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=9), inner, max_size=3),
    max_leaves=8,
)
NAMES = st.sampled_from(
    [*codex_setup.EVENTS, *claude_code_setup.EVENTS, "SessionStart", "session.created", "session.idle"]
)
FIELDS = ("hook_event_name", "session_id", "agent_id", "type", "properties", "tool_name", "background_tasks")


@pytest.mark.parametrize("read", [codex_fact, claude_code_fact, opencode_fact])
@given(event=st.dictionaries(st.sampled_from(FIELDS), VALUES), name=NAMES)
def test_whatever_a_hook_says_it_is_read_or_refused(
    read: Callable[[Mapping[str, Any]], HookFact | None], event: dict[str, Any], name: str
) -> None:
    for each in (event, {"hook_event_name": name, "type": name, **event}):
        with contextlib.suppress(InvalidRequest):
            fact = read(each)
            assert fact is None or is_context_id(fact.ctx)
