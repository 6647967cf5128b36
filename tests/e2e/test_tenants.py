"""Tenants on the real stack: what one frees the other keeps, and what one has the other neither finds nor
sees."""

import hashlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from engine_bridge.stack.engine_stack import EngineStack
from lifecycle.core.events import CallEnded, ContextCreated
from lifecycle.vocabulary import CACHE_SALT, CONTEXT_HEADER, IdentityRung
from proxy.config import KeyConfig, TenantConfig
from tests.e2e.agent import Agent, World, config_for, lifecycle, prose, world_of
from tests.e2e.engine_cache import BOTH, NOWHERE, PLAIN, Cache
from tests.e2e.test_lifecycle_books import assert_books_equal_a_recount

CHAT = "/v1/chat/completions"


def secret(name: str) -> str:
    return f"secret of {name}"


def key(name: str, *, admin: bool = False) -> KeyConfig:
    digest = hashlib.sha256(secret(name).encode()).hexdigest()
    return KeyConfig(tenant=name, key_sha256=digest, admin=admin)


@dataclass
class Tenants:
    """Two tenants before one proxy, and its operator."""

    one: World
    two: World
    operator: World

    async def erase(self, tenant: str) -> dict[str, Any]:
        url = f"{self.operator.up.admin_url}/kv/v1/tenants/{tenant}"
        reply = await self.operator.http.delete(url)
        reply.raise_for_status()
        return dict(reply.json())

    async def salt(self, agent: Agent) -> str:
        """The salt that an agent's chunks lie under."""
        state = await agent.world.until(lambda: agent.world.state(agent.ctx))
        assert state is not None
        return state.namespace.salt


@asynccontextmanager
async def tenants_of(cache: Cache, folder: Path, isolation: str) -> AsyncIterator[Tenants]:
    config = config_for(
        cache.stack,
        folder,
        api_keys=(key("one"), key("two"), key("operator", admin=True)),
        tenants=tuple(TenantConfig(name=name, isolation=isolation) for name in ("one", "two")),  # type: ignore[arg-type]
    )
    async with world_of(cache, config) as world:
        worlds = [World(world.up, cache, name, secret(name)) for name in ("one", "two", "operator")]
        try:
            yield Tenants(*worlds)
        finally:
            for each in worlds:
                await each.close()


@pytest.fixture
async def shared(engine_stack: EngineStack, cache: Cache, tmp_path: Path) -> AsyncIterator[Tenants]:
    async with tenants_of(cache, tmp_path, "shared") as tenants:
        yield tenants


@pytest.fixture
async def salted(engine_stack: EngineStack, cache: Cache, tmp_path: Path) -> AsyncIterator[Tenants]:
    async with tenants_of(cache, tmp_path, "salt") as tenants:
        yield tenants


async def settled_agent(world: World, system: str, salt: str = "") -> tuple[Agent, list[bytes]]:
    """An agent after two turns, and the chunks of its list, which the cache has shown in both tiers."""
    agent = world.agent("agent", system=system)
    await agent.say(prose(40))
    await agent.say(prose(40))
    keys = await agent.keys()
    await world.cache.await_tiers(keys, BOTH, salt)
    return agent, keys


def files_of(cache: Cache, keys: list[bytes], salt: str = "") -> list[str]:
    """Files of L2 that hold one of the chunks, under the salt."""
    names = {key.hex() for key in keys}
    return [
        file.name
        for file in cache.stack.l2_dir.rglob("*")
        if (salt in file.name) and any(name in file.name for name in names)
    ]


async def test_of_a_shared_cache_each_frees_only_what_the_other_does_not_hold(shared: Tenants) -> None:
    cache = shared.one.cache
    system = prose(70)
    mine, keys = await settled_agent(shared.one, system)
    others, kept = await settled_agent(shared.two, system)
    both = [key for key in keys if key in kept]
    own = [key for key in keys if key not in kept]
    assert len(both) >= 4
    assert len(own) >= 4
    await shared.one.until_confirmed([*keys, *kept])

    await mine.ops({"op": "close"})
    await shared.one.until_gone(own)
    await shared.one.sweep()
    assert await cache.where(own) == [NOWHERE] * len(own)
    assert await cache.where(kept) == [BOTH] * len(kept)
    await cache.forget_engine_cache()
    others.messages.append({"role": "user", "content": prose(10)})
    await others.call()
    assert others.cached_tokens >= cache.chunk * (len(kept) - 1), "the other one's list is whole"

    # Erased: what was its own is gone, chunk by chunk; what the other one holds is named and stays.
    again, keys = await settled_agent(shared.one, system)
    kept = await others.keys()
    own = [key for key in keys if key not in kept]
    [granted] = await again.ops({"op": "pin", "span": [0, 2], "ttl": 600})
    assert granted["status"] == "applied"
    erased = await shared.erase("one")
    assert set(erased["shared"]) == {key.hex() for key in keys if key in kept}
    assert set(erased["erased"]) >= {key.hex() for key in own}
    assert (erased["left"], erased["reasons"]) == ([], [])
    gone = [bytes.fromhex(name) for name in erased["erased"]]
    assert await cache.where(gone) == [NOWHERE] * len(gone)
    assert files_of(cache, gone) == []
    assert await cache.where(kept) == [BOTH] * len(kept)
    assert len(files_of(cache, kept)) >= len(kept)
    await cache.forget_engine_cache()
    reply = await cache.direct(again.asked, max_tokens=1)
    assert reply["usage"]["prompt_tokens_details"]["cached_tokens"] == cache.chunk * len(
        [key for key in keys if key in kept]
    )

    # Nothing is left to erase, of it or of one that nobody knows.
    for name in ("one", "nobody"):
        nothing = await shared.erase(name)
        assert (nothing["erased"], nothing["shared"], nothing["left"], nothing["reasons"]) == ([], [], [], [])
    assert_books_equal_a_recount(shared.two)


async def test_what_a_call_in_flight_holds_is_left_until_it_is_over(shared: Tenants) -> None:
    cache = shared.one.cache
    system = prose(70)
    _, kept = await settled_agent(shared.two, system)
    agent = shared.one.agent("busy", system=system)
    agent.messages.append({"role": "user", "content": prose(40)})
    async with agent.streaming(20_000, {"ignore_eos": True}, hang_up_at=100):
        keys = await agent.keys()
        own = [key for key in keys if key not in kept]
        await cache.await_tiers(keys, BOTH)
        erased = await shared.erase("one")
        assert set(erased["left"]) >= {key.hex() for key in own}
        assert set(erased["shared"]) == {key.hex() for key in keys if key in kept}
        assert not set(erased["erased"]) & {key.hex() for key in keys}
        assert any("in flight" in reason for reason in erased["reasons"])
        assert await cache.where(keys) == [BOTH] * len(keys)
    await shared.one.until(lambda: [e for e in shared.one.events(CallEnded) if e.output_tokens < 0])
    stored = [key for key in await agent.stored_keys() if key not in kept]
    await shared.one.until_gone(stored)
    erased = await shared.erase("one")
    assert (erased["shared"], erased["left"], erased["reasons"]) == ([], [], [])
    await cache.await_tiers(stored, NOWHERE)
    assert files_of(cache, stored) == []
    assert await cache.where(kept) == [BOTH] * len(kept)


async def test_salted_tenants_share_nothing(salted: Tenants) -> None:
    cache = salted.one.cache
    system = prose(70)
    question = {"role": "user", "content": prose(40)}
    agents = [world.agent("agent", system=system) for world in (salted.one, salted.two)]
    for agent in agents:
        agent.messages.append(question)
        await agent.call()
        assert agent.cached_tokens == 0, "nobody else's chunks, and nobody else's blocks either"
    mine, others = agents
    here, there = await salted.salt(mine), await salted.salt(others)
    assert len({here, there, "", "one", "two"}) == 5
    keys = await mine.keys()
    assert keys == await others.keys(), "the hashes are the same: only the salt tells them apart"
    await cache.await_tiers(keys, BOTH, here)
    await cache.await_tiers(keys, BOTH, there)
    assert await cache.where(keys) == [NOWHERE] * len(keys)

    # Neither its own idea of a salt nor parameters of the cache let one into the other's space.
    for body in (
        {CACHE_SALT: there},
        {"kv_transfer_params": {CACHE_SALT: there, "lmcache.cache_salt": there}},
        {"vllm_xargs": {"kv_transfer_params": {"lmcache.cache_salt": there}}},
    ):
        intruder = salted.one.agent("intruder", system=system)
        intruder.messages = [
            {"role": "system", "content": system},
            question,
            {"role": "user", "content": "and?"},
        ]
        await cache.forget_engine_cache()
        await intruder.call(1, body)
        if CACHE_SALT in body:
            assert intruder.cached_tokens == 0
            assert await salted.salt(intruder) not in ("", here, there)
        else:
            assert await salted.salt(intruder) == here
        await intruder.ops({"op": "close"})

    # What one frees, and what is erased of it, the other one keeps.
    await salted.one.until_confirmed(keys, here)
    await mine.ops({"op": "close"})
    await cache.await_tiers(keys, NOWHERE, here)
    assert await cache.where(keys, there) == [BOTH] * len(keys)
    again = salted.one.agent("again", system=system)
    again.messages.append(question)
    await again.call()
    await cache.await_tiers(keys, BOTH, here)
    erased = await salted.erase("one")
    assert set(erased["erased"]) >= {key.hex() for key in keys}
    assert (erased["shared"], erased["left"], erased["reasons"]) == ([], [], [])
    assert await cache.where(keys, here) == [NOWHERE] * len(keys)
    assert files_of(cache, keys, here) == []
    assert await cache.where(keys, there) == [BOTH] * len(keys)
    await cache.forget_engine_cache()
    others.messages.append({"role": "user", "content": "and?"})
    await others.call()
    assert others.cached_tokens >= cache.chunk * (len(keys) - 1)


async def test_of_another_tenants_contexts_nothing_can_be_named_or_seen(shared: Tenants) -> None:
    system = prose(70)
    theirs, kept = await settled_agent(shared.two, system)
    uid = shared.two.state(theirs.ctx).uid  # type: ignore[union-attr]
    before = shared.two.state(theirs.ctx)

    # Operations: the same words for a context of somebody else and for one of nobody.
    operations: list[dict[str, Any]] = [
        {"op": "append", "n": 1},
        {"op": "replace", "span": [0, 1], "n": 1},
        {"op": "remove", "span": [0, 1]},
        {"op": "pin", "span": [0, 1], "ttl": 60},
        {"op": "unpin", "span": [0, 1]},
        {"op": "close"},
    ]
    said = [
        await shared.one.ops("intruder", *({**op, "ctx": ctx, "seq": 1} for op in operations))
        for ctx in (theirs.ctx, "nobody:1")
    ]
    assert [{**r, "ctx": ""} for r in said[0]] == [{**r, "ctx": ""} for r in said[1]]
    assert {r["status"] for r in said[0]} == {"rejected"}

    # Its list, sent without a name, finds the sender's own contexts only.
    asked_again = [*theirs.messages, {"role": "user", "content": "go on"}]
    model = shared.one.cache.stack.options.model_name
    body = {"model": model, "messages": asked_again, "max_tokens": 1, **PLAIN}
    found = []
    for world in (shared.one, shared.two):
        reply = await world.http.post(f"{world.up.data_url}{CHAT}", json=body)
        assert reply.status_code == 200
        found.append(reply.headers[CONTEXT_HEADER])
    assert found[0] != theirs.ctx
    assert found[1] == theirs.ctx, "the other one's own is found so"
    created = await shared.one.until(
        lambda: [e for e in shared.one.events(ContextCreated) if e.context_id == found[0]]
    )
    assert [(e.tenant, e.rung, e.parent_uid) for e in created] == [("one", IdentityRung.NEW, "")]

    # A fork of it begins with nothing, and its own context of the same name is another one.
    mine = shared.one.agent("mine", system=system)
    await mine.ops({"op": "fork", "parent": theirs.ctx})
    state = shared.one.state(mine.ctx)
    assert state is not None
    assert not state.versions
    assert not state.forked
    forker = Agent(shared.one, "forker", list(theirs.messages), [])
    await forker.say(prose(10), parent=theirs.ctx, fork_at=2)
    namesake = Agent(shared.one, theirs.ctx, [{"role": "system", "content": system}], [])
    await namesake.say(prose(10), pin=["0:1"])
    await namesake.ops({"op": "close"})
    mine_all = [e for e in shared.one.events(ContextCreated) if e.tenant == "one"]
    assert len(mine_all) >= 4
    for event in mine_all:
        assert uid not in (event.uid, event.parent_uid)
        assert not event.inherited

    # The operator's side is closed to a caller's key, whether or not there is something to see.
    for method, path in (
        ("GET", "/kv/v1/contexts"),
        ("GET", f"/kv/v1/contexts/{uid}"),
        ("GET", f"/kv/v1/contexts/{uid}/events"),
        ("GET", f"/kv/v1/chunks/{kept[0].hex()}"),
        ("GET", "/kv/v1/directives"),
        ("GET", "/kv/v1/events?after=0"),
        ("POST", f"/kv/v1/contexts/{uid}/close"),
        ("POST", "/kv/v1/release-all"),
        ("DELETE", "/kv/v1/tenants/two"),
    ):
        answers = [await asked(shared.one, method, path.replace(uid, name)) for name in (uid, "nobody")]
        assert [a.status_code for a in answers] == [403, 403], path
        assert answers[0].text.replace(uid, "nobody") == answers[1].text
        assert "two" not in answers[0].text.replace("tenants/two", "")
    assert (await asked(shared.one, "POST", "/reset_prefix_cache", shared.one.up.data_url)).status_code == 403

    after = shared.two.state(theirs.ctx)
    assert before is not None
    assert after is not None
    messages = [{n for n, v in state.versions.items() if v.index >= 0} for state in (before, after)]
    assert messages[0] <= messages[1]
    assert after.open
    assert not after.pins
    await shared.one.sweep()
    assert await shared.one.cache.where(kept) == [BOTH] * len(kept)


async def asked(world: World, method: str, path: str, url: str = "") -> httpx.Response:
    headers = {**lifecycle(ctx="x")}
    return await world.http.request(method, f"{url or world.up.admin_url}{path}", headers=headers)
