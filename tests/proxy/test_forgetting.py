"""What a context that is over held for its next call is let go; what is pinned is kept."""

import asyncio
from pathlib import Path

import pytest

from lifecycle.core.events import ContextClosed, PinReleased
from lifecycle.core.observations import Tick
from lifecycle.vocabulary import LEASE_SECONDS
from tests.lifecycle.lives import GatedLog
from tests.lifecycle.store.redis_process import place_in_shared_redis
from tests.proxy.api_keys import bearer, keys
from tests.proxy.toy_model import NAME
from tests.proxy.whole_proxy import Message, Whole, assistant, lifecycle, system, user, whole_proxy

LIST = [system("You are an agent with many rules to follow. " * 4), user("go on")]


def held(it: Whole) -> int:
    service = it.runtime.models[NAME].service
    assert service is not None
    return service.size_bytes


async def test_a_context_that_is_over_holds_nothing_for_a_next_call(tmp_path: Path) -> None:
    async with whole_proxy(tmp_path) as it:
        assert (await it.chat(LIST, lifecycle(ctx="stays"))).status_code == 200
        one = held(it)
        assert one > 0
        assert (await it.chat([*LIST, user("and on")], lifecycle(ctx="ends"))).status_code == 200
        assert held(it) > one
        await it.ops({"op": "close", "seq": 1, "ctx": "ends"})
        await it.until(lambda: not it.context("ends").open)
        assert held(it) == one
        assert (await it.chat([*LIST, user("again")], lifecycle(ctx="stays"))).status_code == 200
        assert it.context("stays").open


async def test_a_pinned_context_keeps_its_tokens_until_the_pin_is_let_go(tmp_path: Path) -> None:
    async with whole_proxy(tmp_path) as it:
        assert (await it.chat(LIST, lifecycle(ctx="c", call="1"))).status_code == 200
        await it.ops({"op": "pin", "seq": 1, "ctx": "c", "span": "system", "ttl": 60})
        await it.ops({"op": "close", "seq": 2, "ctx": "c"})
        assert await it.events(ContextClosed)
        assert it.context("c").pins
        assert held(it) > 0
        await it.ops({"op": "unpin", "seq": 3, "ctx": "c", "span": "system"})
        assert await it.events(PinReleased)
        assert held(it) == 0


async def test_calls_that_come_at_once_to_a_new_context_leave_nothing_either(tmp_path: Path) -> None:
    async with whole_proxy(tmp_path) as it:
        calls = [lifecycle(ctx="new", call=str(number)) for number in range(4)]
        await asyncio.gather(*(it.chat(LIST, fields) for fields in calls))
        await it.runtime.mailboxes.settled()
        assert len(it.context("new").attempts) == len(calls)
        lint = it.runtime.tracking._mapper._lint
        assert held(it) > 0
        assert lint.size_bytes > 0
        await it.ops({"op": "close", "seq": 1, "ctx": "new"})
        await it.until(lambda: not it.context("new").open)
        assert held(it) == 0
        assert lint.size_bytes == 0


ON = [*LIST, assistant("ok"), user("and on")]


async def context_of(it: Whole, messages: list[Message], tenant: str = "") -> str:
    """Whose the list is found to be, by nothing but what it says."""
    answer = await it.chat(messages, bearer(tenant) if tenant else {})
    await it.runtime.mailboxes.settled()
    return answer.headers["x-kv-context"]


async def lease_ends(it: Whole, context_id: str) -> None:
    """As much time passes as the longest lease lasts."""
    state = it.context(context_id)
    later = state.active_ns + int(max(LEASE_SECONDS.values()) * 1e9)
    await it.runtime.tracker.observe(state.uid, Tick(at_ns=later))


async def test_a_list_is_known_until_its_agent_says_that_it_is_over(tmp_path: Path) -> None:
    async with whole_proxy(tmp_path) as it:
        first = await context_of(it, LIST)
        assert await context_of(it, ON) == first
        await it.ops({"op": "close", "seq": 1, "ctx": first})
        assert it.context(first).closed
        anew = await context_of(it, [*ON, assistant("ok"), user("still there?")])
        assert anew != first
        assert not it.context(first).open


async def test_a_list_whose_lease_ended_goes_on_with_its_context(tmp_path: Path) -> None:
    async with whole_proxy(tmp_path) as it:
        first = await context_of(it, LIST)
        await lease_ends(it, first)
        assert it.context(first).closed
        assert await context_of(it, ON) == first
        assert it.context(first).open


async def test_a_list_that_was_closed_during_its_call_is_nobodys_after_it(tmp_path: Path) -> None:
    async with whole_proxy(tmp_path) as it:
        first = await context_of(it, LIST)
        it.toy.holds = lambda body: bool(body.get("stream"))
        body = {"model": NAME, "messages": ON, "stream": True}
        async with it.data.stream("POST", "/v1/chat/completions", json=body) as answer:
            assert answer.headers["x-kv-context"] == first
            await anext(answer.aiter_bytes())
            await it.until(lambda: bool(it.context(first).flights))
            await it.ops({"op": "close", "seq": 1, "ctx": first})
        await it.until(lambda: not it.context(first).flights)
        await it.runtime.mailboxes.settled()
        assert await context_of(it, [*ON, user("still there?")]) != first


async def test_a_list_whose_lease_ended_is_over_when_its_agent_says_so_afterwards(tmp_path: Path) -> None:
    async with whole_proxy(tmp_path) as it:
        first = await context_of(it, LIST)
        await lease_ends(it, first)
        await it.ops({"op": "close", "seq": 1, "ctx": first})
        assert await context_of(it, ON) != first


async def test_a_list_is_over_with_the_call_that_says_so(tmp_path: Path) -> None:
    async with whole_proxy(tmp_path) as it:
        first = await context_of(it, LIST)
        await it.chat(ON, {"x-kv-lifecycle": f'ctx="{first}", close'})
        await it.runtime.mailboxes.settled()
        assert it.context(first).closed
        assert await context_of(it, [*ON, assistant("ok"), user("still there?")]) != first


async def test_a_call_that_comes_while_the_close_waits_for_the_log_begins_the_context_again(
    tmp_path: Path,
) -> None:
    async with whole_proxy(tmp_path) as it:
        first = await context_of(it, LIST)
        log = GatedLog(it.runtime.event_log)
        it.runtime.tracker._log = log
        log.gate.clear()
        log.waiting.clear()
        closing = asyncio.ensure_future(it.ops({"op": "close", "seq": 1, "ctx": first}))
        await log.waiting.wait()
        again = await it.data.post("/v1/chat/completions", json={"model": NAME, "messages": ON})
        assert again.headers["x-kv-context"] == first
        log.gate.set()
        await closing
        await it.runtime.mailboxes.settled()
        assert it.context(first).open
        assert await context_of(it, [*ON, assistant("ok"), user("still there?")]) == first


async def test_another_proxy_of_the_log_forgets_the_lists_of_an_erased_tenant(tmp_path: Path) -> None:
    url = await place_in_shared_redis(tmp_path)
    async with (
        whole_proxy(tmp_path, api_keys=keys(), log_url=url) as one,
        whole_proxy(tmp_path, api_keys=keys(), log_url=url) as two,
    ):
        of = {tenant: await context_of(two, LIST, tenant) for tenant in ("a", "b")}
        await one.runtime.tracker.catch_up()
        assert (await one.admin.delete("/kv/v1/tenants/a", headers=bearer("admin"))).json()["contexts"] == 1
        await two.runtime.tracker.catch_up()
        assert await context_of(two, ON, "a") != of["a"]
        assert await context_of(two, ON, "b") == of["b"]


@pytest.mark.parametrize("one_off", [False, True])
async def test_no_list_of_an_erased_tenant_is_known(tmp_path: Path, one_off: bool) -> None:
    async with whole_proxy(tmp_path, api_keys=keys()) as it:
        fields = {"x-kv-lifecycle": "one_off"} if one_off else {}
        of = {}
        for tenant in ("a", "b"):
            answer = await it.chat(LIST, {**fields, **bearer(tenant)})
            of[tenant] = answer.headers["x-kv-context"]
        await it.runtime.mailboxes.settled()
        finder = it.runtime.tracking.calls.finder
        assert finder._lineage.knows("a", of["a"])
        await it.admin.delete("/kv/v1/tenants/a", headers=bearer("admin"))
        assert not finder._lineage.knows("a", of["a"])
        assert finder._lineage.knows("b", of["b"])
        if not one_off:
            assert await context_of(it, ON, "a") != of["a"]
            assert await context_of(it, ON, "b") == of["b"]
