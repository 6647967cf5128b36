"""The endpoint of hooks: its answers disturb no harness, and say what was wrong with what it cannot read."""

from pathlib import Path

import pytest

from lifecycle.errors import LogUnavailable
from proxy.config import LimitsConfig
from proxy.hooks_api import MAX_HOOK_BYTES
from tests.lifecycle.lives import GatedLog
from tests.proxy.test_codex_hooks import ROOT, hook
from tests.proxy.test_data_app import bearer, keys
from tests.proxy.test_hook_reports import CODEX, LIST, told
from tests.proxy.whole_proxy import lifecycle, whole_proxy

HOOKS = "/kv/v1/hooks/codex"


async def test_what_is_not_known_is_ignored(tmp_path: Path) -> None:
    async with whole_proxy(tmp_path) as it:
        assert await told(it, "codex", hook("SomethingNew", and_more={"of": ["it"]})) == "ignored"


@pytest.mark.parametrize(
    ("body", "says"),
    [
        (b"", "no JSON"),
        (b"{", "no JSON"),
        (b"[" * 100_000, "no JSON"),
        (b"[]", "no object"),
        (b'{"hook_event_name": "Stop"}', "session_id"),
        (b'{"session_id": "a", "hook_event_name": 7}', "hook_event_name"),
        (b'{"session_id": "a", "hook_event_name": "Stop", "agent_id": 7}', "agent_id"),
    ],
)
async def test_what_cannot_be_read_says_why_and_loses_nothing(tmp_path: Path, body: bytes, says: str) -> None:
    async with whole_proxy(tmp_path) as it:
        await it.chat(LIST, lifecycle(ctx=CODEX))
        answer = await it.data.post(HOOKS, content=body)
        assert answer.status_code == 400
        assert answer.headers["content-type"] == "application/problem+json"
        assert says in answer.json()["detail"]
        assert await told(it, "codex", hook("Stop")) in ("taken", "queued")


async def test_what_is_too_large_or_nowhere_is_refused(tmp_path: Path) -> None:
    async with whole_proxy(tmp_path) as it:
        assert (await it.data.post(HOOKS, content=b"x" * (MAX_HOOK_BYTES + 1))).status_code == 413
        assert (await it.data.get(HOOKS)).status_code == 404
        nowhere = await it.data.post("/kv/v1/hooks/nobody", json=hook("Stop"))
        assert nowhere.status_code == 404
        assert HOOKS in nowhere.json()["detail"]


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
