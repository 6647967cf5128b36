"""A tenant is erased: what only it held is gone, key by key, and what others hold is named."""

from pathlib import Path

import pytest

from lifecycle.core.events import CallMapped
from lifecycle.core.ids import split_keys
from lifecycle.errors import LogUnavailable
from lifecycle.vocabulary import MappingKind, Mode
from proxy.erasure import IN_FLIGHT, erase_tenant
from tests.lifecycle.lives import GatedLog
from tests.lifecycle.store.redis_process import place_in_shared_redis
from tests.proxy.api_keys import bearer, keys
from tests.proxy.toy_model import NAME
from tests.proxy.whole_proxy import Message, Whole, assistant, lifecycle, system, user, whole_proxy

HEAD = system("a system prompt that both of the tenants share with each other")
OF_A = [HEAD, user("what the first tenant says, long enough for several chunks of its own")]
OF_B = [HEAD, user("what the other tenant says, which is not at all the same thing here")]


async def called(it: Whole, tenant: str, messages: list[Message], call: str = "1") -> None:
    await it.chat(messages, {**lifecycle(ctx="x", call=call), **bearer(tenant)})
    index = it.runtime.tracker.contexts.index
    run = b"".join(it.toy.keys(messages))
    namespace = it.context("x", tenant).namespace
    await it.until(lambda: index.verified_chunks(namespace, run) * 32 == len(run))


@pytest.mark.parametrize("mode", [Mode.ENFORCE, Mode.OBSERVE])
async def test_only_its_own_keys_go_and_shared_ones_are_listed(tmp_path: Path, mode: Mode) -> None:
    async with whole_proxy(tmp_path, mode, api_keys=keys()) as it:
        await called(it, "a", OF_A)
        await called(it, "b", OF_B)
        await it.ops_as("a", {"op": "pin", "seq": 1, "ctx": "x", "span": [0, 2]})
        answer = await it.admin.delete("/kv/v1/tenants/a", headers=bearer("admin"))
        assert answer.status_code == 200
        erased = answer.json()
        shared = set(it.toy.keys(OF_A)) & set(it.toy.keys(OF_B))
        own = set(it.toy.keys(OF_A)) - shared
        assert shared
        assert set(erased["shared"]) == {key.hex() for key in shared}
        assert set(erased["erased"]) >= {key.hex() for key in own}
        assert (erased["left"], erased["reasons"], erased["contexts"]) == ([], [], 1)
        assert not own & set(it.cache.chunks)
        assert set(it.toy.keys(OF_B)) <= set(it.cache.chunks)
        assert it.context("x", "a").closed
        assert not it.context("x", "a").pins
        assert it.context("x", "b").versions


async def test_what_was_said_before_a_response_is_forgotten_too(tmp_path: Path) -> None:
    async with whole_proxy(tmp_path, api_keys=keys()) as it:
        body = {"model": NAME, "input": "what the tenant says"}
        of_a = await it.data.post("/v1/responses", json=body, headers=bearer("a"))
        of_b = await it.data.post("/v1/responses", json=body, headers=bearer("b"))
        await it.runtime.mailboxes.settled()
        await it.admin.delete("/kv/v1/tenants/a", headers=bearer("admin"))
        for tenant, first in (("a", of_a), ("b", of_b)):
            going_on = {**body, "previous_response_id": first.json()["id"]}
            await it.data.post("/v1/responses", json=going_on, headers=bearer(tenant))
            await it.runtime.mailboxes.settled()
        kinds = [m.kind for m in (await it.events(CallMapped))[-2:]]
        assert kinds == [MappingKind.NONE, MappingKind.EXACT]


async def test_every_proxy_of_the_log_forgets_what_was_said_before(tmp_path: Path) -> None:
    url = await place_in_shared_redis(tmp_path)
    async with (
        whole_proxy(tmp_path, api_keys=keys(), log_url=url) as one,
        whole_proxy(tmp_path, api_keys=keys(), log_url=url) as two,
    ):
        body = {"model": NAME, "input": "what the tenant says"}
        for tenant in ("a", "b"):
            await two.data.post("/v1/responses", json=body, headers=bearer(tenant))
        await two.runtime.mailboxes.settled()
        await one.runtime.tracker.catch_up()
        chains = two.runtime.tracking.calls.chains
        assert len(chains) == 2
        answer = await one.admin.delete("/kv/v1/tenants/a", headers=bearer("admin"))
        assert answer.json()["contexts"] == 1
        await two.runtime.tracker.catch_up()
        assert len(chains) == 1
        chains.forget_tenant("a")
        assert len(chains) == 1, "the other tenant's is there still"


async def test_what_died_before_and_was_not_freed_is_erased_too(tmp_path: Path) -> None:
    async with whole_proxy(tmp_path, api_keys=keys()) as it:
        await called(it, "a", OF_A)
        it.cache.failing = RuntimeError("not now")
        await it.ops_as("a", {"op": "remove", "seq": 1, "ctx": "x", "span": [1, 2]})
        await it.until(
            lambda: any(r.result is not None for r in it.runtime.tracker.contexts.directives.values())
        )
        it.cache.failing = None
        await it.chat([HEAD, user("new")], {**lifecycle(ctx="x", call="2"), **bearer("a")})
        erased = await erase_tenant(it.runtime, "a")
        assert set(erased.erased) >= {key.hex() for key in it.toy.keys(OF_A)}
        assert not set(it.toy.keys(OF_A)) & set(it.cache.chunks)


async def test_what_cannot_be_freed_is_left_with_a_reason(tmp_path: Path) -> None:
    async with whole_proxy(tmp_path, api_keys=keys()) as it:
        await called(it, "a", OF_A)
        it.runtime.following.problem = "something is wrong"
        erased = await erase_tenant(it.runtime, "a")
        assert erased.erased == []
        assert set(erased.left) >= {key.hex() for key in it.toy.keys(OF_A)}
        assert erased.reasons == ["something is wrong"]
        assert set(it.toy.keys(OF_A)) <= set(it.cache.chunks)
        assert not [d for d in it.cache.asked if set(split_keys(getattr(d, "keys", b"")))]


async def test_what_calls_in_flight_hold_is_left_until_they_are_over(tmp_path: Path) -> None:
    async with whole_proxy(tmp_path, api_keys=keys()) as it:
        await called(it, "b", OF_B)
        await called(it, "a", OF_A[:1])
        it.toy.holds = lambda body: bool(body.get("stream"))
        both = set(it.toy.keys(OF_A)) & set(it.toy.keys(OF_B))
        own = set(it.toy.keys(OF_A)) - both
        body = {"model": NAME, "messages": OF_A, "stream": True}
        headers = {**lifecycle(ctx="x", call="2"), **bearer("a")}
        async with it.data.stream("POST", "/v1/chat/completions", json=body, headers=headers) as answer:
            await anext(answer.aiter_bytes())
            await it.until(lambda: any(f.mapping_known for f in it.context("x", "a").flights))
            erased = await erase_tenant(it.runtime, "a")
            assert set(erased.left) >= {key.hex() for key in own}
            assert set(erased.shared) >= {key.hex() for key in both}
            assert erased.reasons == [IN_FLIGHT]
            assert own <= set(it.cache.chunks)
        await it.until(lambda: not it.context("x", "a").flights)
        erased = await erase_tenant(it.runtime, "a")
        assert (erased.shared, erased.left, erased.reasons) == ([], [], [])
        assert not own & set(it.cache.chunks)
        assert set(it.toy.keys(OF_B)) <= set(it.cache.chunks)


async def test_what_nobody_could_prove_to_be_its_own_is_erased_too(tmp_path: Path) -> None:
    async with whole_proxy(tmp_path, Mode.OBSERVE, api_keys=keys()) as it:
        it.cache.store(b"".join(it.toy.keys(OF_A)))  # there before the tenant's first call
        await called(it, "a", OF_A)
        await it.ops_as("a", {"op": "close", "seq": 1, "ctx": "x"})
        erased = await erase_tenant(it.runtime, "a")
        assert set(erased.erased) >= {key.hex() for key in it.toy.keys(OF_A)}
        assert not set(it.toy.keys(OF_A)) & set(it.cache.chunks)


async def test_nothing_is_said_to_be_erased_while_the_log_is_away(tmp_path: Path) -> None:
    async with whole_proxy(tmp_path, api_keys=keys()) as it:
        await called(it, "a", [*OF_A, assistant("ok"), user("more")])
        log = GatedLog(it.runtime.event_log)
        it.runtime.tracker._log = log
        log.away = LogUnavailable("disk full")
        answer = await it.admin.delete("/kv/v1/tenants/a", headers=bearer("admin"))
        assert answer.status_code == 503
        log.away = None


async def test_a_tenant_nobody_knows_has_nothing(tmp_path: Path) -> None:
    async with whole_proxy(tmp_path, ready=False) as it:
        erased = await erase_tenant(it.runtime, "nobody")
        assert (erased.contexts, erased.erased, erased.shared, erased.left) == (0, [], [], [])
