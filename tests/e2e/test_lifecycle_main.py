"""The main job on the real stack: dead KV really gone, nothing live touched."""

from typing import Any

import pytest

from tests.e2e.agent import Agent, World, prose, tool
from tests.e2e.engine_cache import BOTH, NOWHERE

NUM_TURNS = 12
TOP = {"logprobs": True, "top_logprobs": 20, "temperature": 0, "max_tokens": 1}


async def long_run(world: World, num_turns: int = NUM_TURNS) -> tuple[Agent, set[bytes], set[bytes]]:
    """An agent that used a tool in every turn; the keys of its prompts, and those of what it generated."""
    agent = world.agent("coder", tools=[tool("look"), tool("change")])
    agent.messages.append({"role": "user", "content": prose(60)})
    prompts: set[bytes] = set()
    stored: set[bytes] = set()
    for turn in range(num_turns):
        await agent.use_tool("look" if turn % 2 else "change", prose(30))
        prompts.update(await agent.keys())
        stored.update(await agent.stored_keys())
    return agent, prompts, stored - prompts


def top_logprobs(reply: Any) -> dict[str, float]:
    first = reply["choices"][0]["logprobs"]["content"][0]
    return {each["token"]: each["logprob"] for each in first["top_logprobs"]}


def distance(one: dict[str, float], other: dict[str, float]) -> float:
    """Largest difference over the tokens both rank high; infinite if they do not even rank the same."""
    if one.keys() != other.keys():
        common = one.keys() & other.keys()
        if len(common) < len(one) - 2:
            return float("inf")
        return max(abs(one[t] - other[t]) for t in common)
    return max(abs(one[t] - other[t]) for t in one)


async def test_a_compaction_frees_exactly_the_old_list(world: World) -> None:
    cache = world.cache
    agent, prompts, generated = await long_run(world)
    stored = prompts | generated
    whole = await agent.keys()
    await world.until_confirmed(whole)
    await cache.await_tiers(whole, BOTH)
    assert set(whole) < stored, "what it generated is rendered otherwise, so that has chunks of its own"
    kept = set(await cache.head_keys(agent.messages[:1], agent.tools))
    assert len(kept) >= 5
    compacted = [agent.messages[0], {"role": "user", "content": prose(40)}]
    assert kept <= set(await cache.keys(compacted, agent.tools))
    dead = sorted(stored - kept)
    assert len(dead) >= 15
    writes = cache.control_writes()
    await agent.ops({"op": "replace", "span": [1, len(agent.messages)], "n": 1})
    await world.until_gone(dead)
    assert cache.control_writes() != writes, "the servers' logs would show a delete"
    assert await cache.where(dead) == [NOWHERE] * len(dead)
    assert await cache.where(sorted(kept)) == [BOTH] * len(kept)

    agent.messages = compacted
    await cache.forget_engine_cache()
    stats = {"kv_transfer_params": {"cached_token_stats": True}}
    await agent.call(1, {**TOP, **stats})
    assert agent.reply is not None
    extra = agent.reply.model_extra or {}
    assert extra["kv_transfer_params"]["cached_token_stats"]["num_lmcache_cached_tokens"] == 64 * len(kept)
    assert agent.cached_tokens == 64 * len(kept)

    reused = top_logprobs(agent.reply.to_dict())
    cold = await cache.direct(agent.messages, agent.tools, cache_salt=prose(2), **TOP)
    assert cold["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    assert distance(reused, top_logprobs(cold)) < 1e-3
    other = [{**agent.messages[0], "content": prose(70)}, *agent.messages[1:]]
    assert distance(reused, top_logprobs(await cache.direct(other, agent.tools, **TOP))) > 1e-2
    print(f"\nfreed {len(dead)} of {len(stored)} chunks, {len(kept)} kept")


@pytest.mark.parametrize("forked", [False, True])
async def test_of_a_one_off_nothing_past_the_shared_prefix_is_stored(world: World, forked: bool) -> None:
    cache = world.cache
    agent = world.agent("asker")
    await agent.say(prose(60))
    await agent.say(prose(60))
    mine = await agent.keys()
    await world.until_confirmed(mine)

    summariser = world.agent("summariser", system=agent.messages[0]["content"])
    summariser.messages = [*agent.messages, {"role": "user", "content": prose(70)}]
    fork = {"parent": agent.ctx, "fork_at": len(agent.messages)} if forked else {}
    await summariser.call(200, {"ignore_eos": True, "min_tokens": 200}, one_off=True, **fork)
    keys = await summariser.stored_keys()
    own = [key for key in keys if key not in mine]
    assert len(own) >= 5

    # A later call's chunks have reached the last tier: whatever the one-off stored would have, too.
    later = world.agent("later")
    await later.say(prose(60))
    await cache.await_tiers(await later.keys(), BOTH)
    assert await cache.where(own) == [NOWHERE] * len(own)
    assert await cache.where(mine) == [BOTH] * len(mine)
