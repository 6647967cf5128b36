"""What the engine is told to keep out of the store, and when it is told nothing."""

import json
from pathlib import Path
from typing import Any

from lifecycle.core.directives import Admit
from lifecycle.vocabulary import DirectiveOutcome, Mode
from tests.lifecycle.fake_cache import FakeCache
from tests.lifecycle.lives import GatedLog
from tests.proxy.toy_model import CHUNK, NAME
from tests.proxy.whole_proxy import CHAT, Whole, assistant, lifecycle, sent, system, user, whole_proxy


async def settled_admissions(it: Whole) -> list[Any]:
    return [
        r.result
        for r in it.runtime.tracker.contexts.directives.values()
        if isinstance(r.directive, Admit) and r.result is not None
    ]


async def test_a_one_off_is_kept_out_of_the_store(tmp_path: Path) -> None:
    async with whole_proxy(tmp_path) as it:
        prompt = [system("you sum up what you are told"), user("a long story of which nothing is kept" * 3)]
        await it.chat(prompt, lifecycle(ctx="once", one_off=True))
        assert sent(it)["kv_transfer_params"] == {"lmcache.max_offload_tokens": 0}
        assert it.cache.chunks == {}
        assert it.toy.bodies[-1].startswith(json.dumps({"model": NAME})[:-1].encode())


async def test_a_forked_one_off_keeps_what_its_parent_has_proven(tmp_path: Path) -> None:
    async with whole_proxy(tmp_path) as it:
        parent = [system("you are the parent"), user("tell me something long enough to fill some chunks")]
        await it.chat(parent, lifecycle(ctx="p"))
        keys_ = it.toy.keys(parent)
        namespace = it.context("p").namespace
        index = it.runtime.tracker.contexts.index
        await it.until(lambda: index.verified_chunks(namespace, b"".join(keys_)) == len(keys_))
        own = [*parent, assistant("ok"), user("sum up what was said so far, in one sentence")]
        await it.chat(own, lifecycle(ctx="s", parent="p", fork_at=2, one_off=True))
        boundary = sent(it)["kv_transfer_params"]["lmcache.max_offload_tokens"]
        assert boundary % CHUNK == 0
        assert 0 < boundary <= len(it.toy.tokens(parent))
        assert set(it.cache.chunks) >= set(keys_)
        past = set(it.toy.keys(own)) - set(keys_)
        assert past
        assert not past & set(it.cache.chunks)


async def test_observe_sends_no_hint_and_says_what_it_would_have_done(tmp_path: Path) -> None:
    async with whole_proxy(tmp_path, Mode.OBSERVE) as it:
        await it.chat([user("sum up")], lifecycle(ctx="once", one_off=True))
        assert "kv_transfer_params" not in sent(it)
        await it.until(lambda: bool(it.runtime.tracker.contexts.directives))
        await it.until(lambda: all(r.result for r in it.runtime.tracker.contexts.directives.values()))
        (result,) = await settled_admissions(it)
        assert (result.outcome, result.reason) == (DirectiveOutcome.SUPPRESSED, "observe mode")
        assert not it.cache.asked


async def test_a_held_out_context_is_observed_among_enforced_ones(tmp_path: Path) -> None:
    async with whole_proxy(tmp_path, holdout=1.0) as it:
        await it.chat([user("sum up")], lifecycle(ctx="once", one_off=True))
        assert "kv_transfer_params" not in sent(it)


async def test_a_plan_that_comes_too_late_does_not_hold_the_call_and_expires(tmp_path: Path) -> None:
    async with whole_proxy(tmp_path, plan_wait_seconds=0.02) as it:
        log = GatedLog(it.runtime.event_log)
        it.runtime.tracker._log = log
        log.gate.clear()
        body = {"model": NAME, "messages": [user("sum up")]}
        answer = await it.data.post(CHAT, json=body, headers=lifecycle(ctx="once", one_off=True))
        assert answer.json()["choices"][0]["message"]["content"] == "ok"
        assert "kv_transfer_params" not in sent(it)
        log.gate.set()
        await it.until(
            lambda: any(r.result is not None for r in it.runtime.tracker.contexts.directives.values())
        )
        (result,) = await settled_admissions(it)
        assert result.outcome is DirectiveOutcome.EXPIRED


async def test_a_cache_without_the_hint_is_not_sent_one(tmp_path: Path) -> None:
    async with whole_proxy(tmp_path, cache=FakeCache(frozenset({"reclaim"}), CHUNK)) as it:
        await it.chat([user("sum up")], lifecycle(ctx="once", one_off=True))
        assert "kv_transfer_params" not in sent(it)
