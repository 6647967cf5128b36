"""What a tenant runs into, over real sockets: calls are answered, its own excess is refused with a reason."""

import asyncio
import json
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from lifecycle.store.memory import MemoryEventLog
from lifecycle.tracker import Tracker
from proxy.config import Config, LimitsConfig, OwnLimitsConfig, TenantConfig
from proxy.errors import TooManyCalls
from proxy.limits import Limit, Limits, limits_by_tenant
from tests.lifecycle.lives import Agent, ManualClock
from tests.proxy.api_keys import bearer, keys
from tests.proxy.test_metrics import scraped
from tests.proxy.toy_model import NAME
from tests.proxy.whole_proxy import CHAT, SECONDS, Whole, assistant, lifecycle, user, whole_proxy

LONG = "a message that is long enough for a chunk or two of the cache"


class Refusals(list[tuple[str, Limit]]):
    def __call__(self, tenant: str, limit: Limit) -> None:
        self.append((tenant, limit))


@asynccontextmanager
async def held_calls(it: Whole, num: int, headers: Mapping[str, str]) -> AsyncIterator[None]:
    """Streams that have begun and do not end before the block does."""
    it.toy.holds = lambda body: bool(body.get("stream"))
    body = {"model": NAME, "messages": [user("hi")], "stream": True}
    async with AsyncExitStack() as stack:
        pieces = []
        for _ in range(num):
            answer = await stack.enter_async_context(it.data.stream("POST", CHAT, json=body, headers=headers))
            assert answer.status_code == 200
            pieces.append(answer.aiter_raw())  # kept: one that is dropped closes its stream
            await anext(pieces[-1])
        yield


async def until_not_refused(it: Whole, headers: Mapping[str, str]) -> None:
    """The proxy hears of a client that is gone a moment later."""
    body = {"model": NAME, "messages": [user("hi")]}
    async with asyncio.timeout(SECONDS):
        while (answer := await it.data.post(CHAT, json=body, headers=headers)).status_code == 429:
            pass
    assert answer.status_code == 200


async def limited(it: Whole, tenant: str, limit: Limit) -> float:
    return (await scraped(it)).get(f"kvtether_limited_total{{limit={limit},tenant={tenant}}}", 0)


def small(**own: int) -> tuple[TenantConfig, ...]:
    return (TenantConfig(name="a", limits=OwnLimitsConfig(**own)),)


# -- calls ------------------------------------------------------------------------------------------------


async def test_calls_beyond_the_limit_are_answered_429_in_the_callers_api(tmp_path: Path) -> None:
    async with whole_proxy(tmp_path, api_keys=keys(), tenants=small(concurrent_calls=2)) as it:
        body = {"model": NAME, "messages": [user("hi")]}
        async with held_calls(it, 2, bearer("a")):
            for path in (CHAT, "/v1/completions", "/v1/responses", "/v1/embeddings"):
                refused = await it.data.post(path, json=body, headers=bearer("a"))
                assert refused.status_code == 429
                assert refused.json()["error"]["type"] == "kvtether_too_many_calls"
                assert refused.headers["retry-after"].isdigit()
            refused = await it.data.post("/v1/messages", json=body, headers=bearer("a"))
            assert (refused.status_code, refused.json()["error"]["type"]) == (429, "rate_limit_error")
            assert refused.headers["retry-after"].isdigit()
            # Others, and what is no call, are not held up.
            assert (await it.data.post(CHAT, json=body, headers=bearer("b"))).status_code == 200
            assert (await it.data.get("/v1/models", headers=bearer("a"))).status_code == 200
            counted = await scraped(it)
            assert counted["kvtether_tenant_calls_in_flight{tenant=a}"] == 2
            assert await limited(it, "a", Limit.CALLS) == 5
        await until_not_refused(it, bearer("a"))
        assert it.runtime.limits.calls() == {}


async def test_calls_that_fail_or_are_broken_off_give_their_place_back(tmp_path: Path) -> None:
    async with whole_proxy(tmp_path, limits=LimitsConfig(concurrent_calls=1)) as it:
        for _ in range(3):
            async with held_calls(it, 1, {}):
                pass
            await until_not_refused(it, {})
            assert (await it.data.post(CHAT, content=b"no json")).status_code != 429
        assert it.runtime.limits.calls() == {}


# -- contexts ---------------------------------------------------------------------------------------------


async def test_a_call_that_would_open_a_context_too_many_is_a_one_off(tmp_path: Path) -> None:
    async with whole_proxy(tmp_path, limits=LimitsConfig(contexts=2)) as it:
        for name in ("one", "two"):
            assert "x-kv-lifecycle-error" not in (await it.chat([user(LONG)], lifecycle(ctx=name))).headers
        answer = await it.chat([user("another " + LONG)], lifecycle(ctx="three"))
        assert answer.json()["choices"][0]["message"]["content"] == "ok"
        assert "context limit: 2" in answer.headers["x-kv-lifecycle-error"]
        name = answer.headers["x-kv-context"]
        assert name.startswith("three~")
        state = it.context(name)
        assert (state.one_off, state.open) == (True, False)
        # Nothing of it is kept, and reclaim goes on: it was followed like any other.
        assert json.loads(it.toy.bodies[-1])["kv_transfer_params"] == {"lmcache.max_offload_tokens": 0}
        assert it.runtime.tracker.contexts.index.last_untracked_ns(state.namespace) is None
        # Those that are open go on, and room that becomes free is used.
        more = [user(LONG), assistant("ok"), user("more")]
        assert (await it.chat(more, lifecycle(ctx="one"))).headers["x-kv-context"] == "one"
        await it.ops({"op": "close", "seq": 1, "ctx": "two"})
        answer = await it.chat([user("another " + LONG)], lifecycle(ctx="three"))
        assert answer.headers["x-kv-context"] == "three"
        assert not it.context("three").one_off
        assert await limited(it, "default", Limit.CONTEXTS) == 1


async def test_calls_at_once_do_not_open_more_contexts_than_there_may_be(tmp_path: Path) -> None:
    async with whole_proxy(tmp_path, limits=LimitsConfig(contexts=3)) as it:
        calls = [it.chat([user(f"{n} {LONG}")], lifecycle(ctx=f"c{n}")) for n in range(12)]
        answers = await asyncio.gather(*calls)
        assert all(answer.status_code == 200 for answer in answers)
        kept = [a for a in answers if "x-kv-lifecycle-error" not in a.headers]
        assert 1 <= len(kept) <= 3
        assert it.runtime.tracker.contexts.use.of("default").contexts == len(kept)


async def test_a_conversation_without_a_name_is_kept_once_there_is_room(tmp_path: Path) -> None:
    async with whole_proxy(tmp_path, limits=LimitsConfig(contexts=1)) as it:
        await it.chat([user("fills the room")], lifecycle(ctx="a"))
        first = await it.chat([user(LONG)])
        assert "~" in first.headers["x-kv-context"]
        await it.ops({"op": "close", "seq": 1, "ctx": "a"})
        second = await it.chat([user(LONG), assistant("ok"), user("go on")])
        assert "~" not in second.headers["x-kv-context"]
        third = await it.chat([user(LONG), assistant("ok"), user("go on"), assistant("ok"), user("on")])
        assert third.headers["x-kv-context"] == second.headers["x-kv-context"]


async def test_operations_that_would_open_a_context_too_many_are_rejected(tmp_path: Path) -> None:
    async with whole_proxy(tmp_path, api_keys=keys(), tenants=small(contexts=1)) as it:
        await it.chat([user(LONG)], {**lifecycle(ctx="p"), **bearer("a")})
        ops = [
            {"op": "fork", "seq": 1, "ctx": "f", "parent": "p"},
            {"op": "spawn", "seq": 1, "ctx": "s"},
            {"op": "one_off", "seq": 1, "ctx": "o"},
            {"op": "append", "seq": 1, "ctx": "p", "n": 1},
        ]
        results = await operated(it, "a", *ops)
        assert [r["status"] for r in results] == ["rejected"] * 3 + ["applied"]
        assert all("context limit: 1" in r["reason"] for r in results[:3])
        await operated(it, "a", {"op": "close", "seq": 2, "ctx": "p"})
        assert [r["status"] for r in await operated(it, "a", ops[1])] == ["applied"]


async def operated(it: Whole, tenant: str, *ops: Mapping[str, object]) -> list[dict[str, Any]]:
    body = {"source": "s", "ops": list(ops)}
    answer = await it.data.post("/kv/v1/ops", json=body, headers=bearer(tenant))
    assert answer.status_code == 200
    results: list[dict[str, Any]] = answer.json()["results"]
    return results


# -- operations -------------------------------------------------------------------------------------------


async def test_operations_beyond_the_limit_are_rejected_and_may_be_sent_again(tmp_path: Path) -> None:
    async with whole_proxy(tmp_path, api_keys=keys(), tenants=small(ops_per_minute=3)) as it:
        for tenant in "ab":
            await it.chat([user(LONG)], {**lifecycle(ctx="c"), **bearer(tenant)})
        ops = [{"op": "append", "seq": n, "ctx": "c", "n": 1} for n in range(1, 6)]
        results = await operated(it, "a", *ops)
        assert [r["status"] for r in results] == ["applied"] * 3 + ["rejected"] * 2
        assert "operation limit: 3 a minute" in results[3]["reason"]
        assert 0 < results[3]["retry_after"] <= 20
        assert it.context("c", "a").sources["s"].applied == 3  # what was refused is not consumed
        assert [r["status"] for r in await operated(it, "b", *ops)] == ["applied"] * 5
        assert await limited(it, "a", Limit.OPS) == 2


async def test_operations_on_a_call_beyond_the_limit_are_left_out_and_it_goes_on(
    tmp_path: Path,
) -> None:
    async with whole_proxy(tmp_path, limits=LimitsConfig(ops_per_minute=1)) as it:
        ops = [{"op": "waiting", "seq": n, "kind": "human"} for n in (1, 2)]
        answer = await it.chat([user(LONG)], kv_lifecycle={"ctx": "c", "source": "s", "ops": ops})
        assert answer.status_code == 200
        assert "ops from number 2 on: operation limit" in answer.headers["x-kv-lifecycle-error"]
        assert it.context("c").sources["s"].applied == 1


# -- pins and branches ------------------------------------------------------------------------------------


async def test_pins_beyond_their_number_are_refused_across_contexts(tmp_path: Path) -> None:
    async with whole_proxy(tmp_path, limits=LimitsConfig(pins=2)) as it:
        for n in range(6):
            await it.chat([user(f"{n} {LONG}")], lifecycle(ctx=f"c{n}"))
        ops = [[{"op": "pin", "seq": 1, "ctx": f"c{n}", "span": [0, 1]}] for n in range(6)]
        results = [r for batch in await asyncio.gather(*(it.ops(*op) for op in ops)) for r in batch]
        assert sorted(r["status"] for r in results) == ["applied"] * 2 + ["rejected"] * 4
        assert all("pin limit" in r["reason"] for r in results if r["status"] == "rejected")
        assert it.runtime.tracker.contexts.use.of("default").pins == 2
        answer = await it.chat([user(LONG)], {"x-kv-lifecycle": 'ctx="d", pin=("0:1")'})
        assert answer.status_code == 200
        assert not it.context("d").pins
        assert await limited(it, "default", Limit.PINS) == 5


async def test_bytes_beyond_the_limit_are_not_pinned_by_pins_at_once(tmp_path: Path) -> None:
    async with whole_proxy(tmp_path, tenants=()) as it:
        await it.chat([user(LONG)], lifecycle(ctx="c"))
        await it.ops({"op": "pin", "seq": 1, "ctx": "c", "span": [0, 1]})
        one = it.runtime.tracker.contexts.use.of("default").pinned_bytes
    assert one > 0
    async with whole_proxy(tmp_path, limits=LimitsConfig(pinned_bytes=one * 2)) as it:
        for n in range(5):
            await it.chat([user(LONG)], lifecycle(ctx=f"c{n}"))
        ops = [[{"op": "pin", "seq": 1, "ctx": f"c{n}", "span": [0, 1]}] for n in range(5)]
        results = [r for batch in await asyncio.gather(*(it.ops(*op) for op in ops)) for r in batch]
        assert sorted(r["status"] for r in results) == ["applied"] * 2 + ["rejected"] * 3
        assert all("pin budget" in r["reason"] for r in results if r["status"] == "rejected")
        assert (await scraped(it))["kvtether_tenant_pinned_bytes{tenant=default}"] == one * 2
        assert await limited(it, "default", Limit.BYTES) == 3


async def test_branches_beyond_the_limit_expire_and_no_call_fails(tmp_path: Path) -> None:
    async with whole_proxy(tmp_path, limits=LimitsConfig(branches=2)) as it:
        for _ in range(2):
            calls = [it.chat([user(f"{n} {LONG}")], lifecycle(ctx="c")) for n in range(6)]
            assert all(a.status_code == 200 for a in await asyncio.gather(*calls))
        await it.chat([user(LONG)], lifecycle(ctx="c"))
        assert len(it.context("c").branches) <= 2
        assert await limited(it, "default", Limit.BRANCHES) > 0


# -- by itself --------------------------------------------------------------------------------------------


def test_a_tenants_own_limits_stand_above_the_general_ones() -> None:
    config = Config(
        limits=LimitsConfig(contexts=5, pins=7, pinned_bytes=1),
        tenants=(TenantConfig(name="a", limits=OwnLimitsConfig(contexts=2)), TenantConfig(name="b")),
    )
    own = limits_by_tenant(config)
    assert own == {"a": LimitsConfig(contexts=2, pins=7, pinned_bytes=1)}
    limits = Limits(Tracker(MemoryEventLog(), ManualClock()), config.limits, own)
    assert limits.of("a") == own["a"]
    assert limits.of("b") == limits.of("anybody") == config.limits


def test_the_allowance_of_operations_comes_back_evenly_and_is_never_more_than_a_minutes() -> None:
    now = 0.0
    refusals = Refusals()
    tracker = Tracker(MemoryEventLog(), ManualClock())
    limits = Limits(tracker, LimitsConfig(ops_per_minute=6), None, refusals, lambda: now)
    assert [bool(limits.operation("t")) for _ in range(8)] == [False] * 6 + [True] * 2
    wait = limits.operation("t")
    assert wait == pytest.approx(10)
    now += wait
    assert [bool(limits.operation("t")) for _ in range(2)] == [False, True]
    now += 3600
    assert [bool(limits.operation("t")) for _ in range(7)] == [False] * 6 + [True]
    assert not limits.operation("somebody else")
    assert set(refusals) == {("t", Limit.OPS)}
    none = Limits(tracker, LimitsConfig(ops_per_minute=0), None, refusals, lambda: now)
    assert none.operation("t") > 0


def test_none_may_call_where_none_are_allowed() -> None:
    limits = Limits(Tracker(MemoryEventLog(), ManualClock()), LimitsConfig(concurrent_calls=0))
    with pytest.raises(TooManyCalls), limits.call("t"):
        pass


async def test_room_is_taken_from_the_question_on_and_given_back_if_nothing_is_opened() -> None:
    tracker = Tracker(MemoryEventLog(), ManualClock())
    await tracker.start()
    limits = Limits(tracker, LimitsConfig(contexts=2))
    assert [bool(limits.open_context("t", uid)) for uid in ("u1", "u2", "u3")] == [False, False, True]
    assert not limits.open_context("t", "u2")  # the same again
    limits.opened("t", "u2")
    limits.opened("t", "u9")
    assert not limits.open_context("t", "u4")
    await Agent(tracker, "u1").open()
    assert limits.open_context("t", "u5")  # u1 in the books, u4 on its way
    limits.opened("t", "u1")
    limits.opened("t", "u4")
    assert not limits.open_context("t", "u6")
