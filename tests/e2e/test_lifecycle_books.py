"""Retries, disorder and lies on the real stack: the books stay true, and only the liar pays."""

import asyncio
from collections import Counter

from lifecycle.core.events import CallArrived, CallEnded, DeclarationMismatched
from lifecycle.core.ids import split_keys
from lifecycle.vocabulary import CallEnd
from tests.e2e.agent import Agent, World, prose
from tests.e2e.engine_cache import BOTH, NOWHERE


def assert_books_equal_a_recount(world: World) -> None:
    """References of every chunk, counted anew from the contexts alone."""
    contexts = world.runtime.tracker.contexts
    counted = Counter(
        (state.namespace.cache, key)
        for state in contexts.states.values()
        for version in state.versions.values()
        for key in split_keys(version.keys)
    )
    kept = {(namespace, key): contexts.index.references(namespace, key) for namespace, key in counted}
    assert kept == dict(counted)
    for namespace in contexts.index.namespaces():
        assert contexts.index.stats(namespace).live == sum(n == namespace for n, _ in counted)


async def bystander(world: World, system: str) -> tuple[Agent, list[bytes]]:
    """An agent that shares the system prompt and does nothing wrong, and its chunks."""
    agent = world.agent("bystander", system=system)
    await agent.say(prose(40))
    await agent.say(prose(40))
    keys = await agent.keys()
    await world.until_confirmed(keys)
    return agent, keys


async def test_retries_and_disorder_leave_the_books_true(world: World) -> None:
    cache = world.cache
    system = prose(70)
    other, others = await bystander(world, system)
    agent = world.agent("retrier", system=system)
    await agent.say(prose(40))

    # Four attempts of one call: two whole ones and one that hangs up side by side, one behind them all.
    agent.messages.append({"role": "user", "content": prose(40)})
    stored: set[bytes] = set()

    async def attempt(max_tokens: int) -> None:
        client = Agent(world, agent.ctx, list(agent.messages), [])
        await client.call(max_tokens, {"ignore_eos": True}, call="c-2")
        stored.update(await client.stored_keys())

    def arrived() -> list[int]:
        return [e.attempt for e in world.events(CallArrived) if e.call_id == "c-2"]

    def ended() -> dict[int, CallEnd]:
        return {e.attempt: e.end for e in world.events(CallEnded) if e.call_id == "c-2"}

    first = asyncio.create_task(attempt(70))
    await world.until(arrived)
    hanging = asyncio.create_task(attempt(20_000))
    await asyncio.gather(first, attempt(70))
    await world.until(lambda: len(arrived()) == 3)
    assert_books_equal_a_recount(world)
    hanging.cancel()
    await world.until(lambda: len(ended()) == 3)
    assert_books_equal_a_recount(world)
    await attempt(1)
    await world.until(lambda: len(ended()) == 4)
    assert sorted(ended()) == [1, 2, 3, 4]
    assert sorted(ended().values()) == [CallEnd.ABORTED, *[CallEnd.COMPLETED] * 3]
    await world.until_confirmed(sorted(stored))
    assert_books_equal_a_recount(world)

    # The same numbers again, and out of order: 3 waits for 2, and nothing counts twice.
    def removal(seq: int, start: int, end: int) -> dict[str, object]:
        return {"op": "remove", "ctx": agent.ctx, "seq": seq, "span": [start, end]}

    said = await world.ops("r", removal(1, 3, 4), removal(1, 3, 4), removal(3, 1, 2), removal(2, 2, 3))
    assert [each["status"] for each in said] == ["applied", "duplicate", "held", "applied"]
    again = await world.ops("r", removal(2, 2, 3), removal(3, 1, 2))
    assert [each["status"] for each in again] == ["duplicate", "duplicate"]
    state = world.state(agent.ctx)
    assert state is not None
    assert [v.role for v in state.versions.values() if v.index >= 0] == ["system"]
    assert_books_equal_a_recount(world)
    kept = await cache.head_keys([{"role": "system", "content": system}])
    dead = sorted(stored - {*kept, *others})
    await world.until_gone(dead)
    assert await cache.where(others) == [BOTH] * len(others)

    await agent.ops({"op": "close"})
    await other.ops({"op": "close"})
    await world.until_gone(others)
    await cache.await_tiers(sorted(stored | set(others)), NOWHERE)
    assert_books_equal_a_recount(world)


async def test_what_a_call_generated_before_it_hung_up_is_freed(world: World) -> None:
    cache = world.cache
    agent = world.agent("impatient")
    agent.messages.append({"role": "user", "content": prose(40)})
    async with agent.streaming(20_000, {"ignore_eos": True}, hang_up_at=300):
        pass
    prompt, stored = await agent.keys(), await agent.stored_keys()
    generated = stored[len(prompt) :]
    assert len(generated) >= 4
    [ended] = await world.until(lambda: world.events(CallEnded))
    assert ended.end is CallEnd.ABORTED
    await world.until_confirmed(prompt)
    await world.until_gone(generated)
    await cache.await_tiers(generated, NOWHERE)
    # A last chunk that ends in what the template puts before an answer went with the answer.
    listed = await cache.head_keys(agent.messages)
    assert len(listed) >= len(prompt) - 1
    assert await cache.where(listed) == [BOTH] * len(listed)
    assert_books_equal_a_recount(world)


async def test_a_liar_pays_for_its_lie_and_nobody_else_does(world: World) -> None:
    cache = world.cache
    system = prose(70)
    _, others = await bystander(world, system)
    liar = world.agent("liar", system=system)
    await liar.say(prose(40))
    await liar.say(prose(40))
    stored = await liar.keys()
    await world.until_confirmed(stored)
    kept = await cache.head_keys(liar.messages[:1])
    assert stored[: len(kept)] == others[: len(kept)]

    # It says that everything behind the system prompt is gone, and sends it all the same.
    await liar.ops({"op": "remove", "span": [1, len(liar.messages)]}, {"op": "append", "n": 1})
    assert_books_equal_a_recount(world)
    await world.until_gone([key for key in stored if key not in {*kept, *others}])
    assert await cache.where(others) == [BOTH] * len(others)

    await cache.forget_engine_cache()
    liar.messages.append({"role": "user", "content": prose(40)})
    await liar.call()
    shared = [key for key in await liar.keys() if key in {*kept, *others}]
    assert liar.cached_tokens == cache.chunk * len(shared), "everything else was computed again"
    assert len(shared) <= len(kept) + 1, "of the bystander's own list it has the first role at most"
    [mismatch] = await world.until(lambda: world.events(DeclarationMismatched))
    assert (mismatch.expected, mismatch.actual) == (2, len(liar.messages))
    back = await liar.keys()
    await world.until_confirmed(back)
    await cache.await_tiers(back, BOTH)
    assert_books_equal_a_recount(world)

    # A fork of a list that it never had, and a span far beyond its list.
    stranger = world.agent("stranger", system=system)
    await stranger.say(prose(40), parent=liar.ctx, fork_at=len(liar.messages))
    [verdict] = await world.ops("l", {"op": "remove", "ctx": stranger.ctx, "seq": 1, "span": [50, 60]})
    assert verdict["status"] in ("applied", "rejected")
    await stranger.say(prose(40))
    await world.until_confirmed(await stranger.keys())
    await stranger.ops({"op": "close"})
    await liar.ops({"op": "close"})
    gone = {*back, *(await stranger.keys())} - set(others)
    await world.until_gone(sorted(gone))
    assert_books_equal_a_recount(world)
    assert await cache.where(others) == [BOTH] * len(others)
