"""Traffic that is not followed, on the real stack: what it may share is demoted, never deleted."""

from collections.abc import Awaitable, Callable

import pytest

from lifecycle.core.directives import Demote, Reclaim
from lifecycle.core.events import UntrackedForwarded
from lifecycle.vocabulary import DirectiveOutcome, Tier
from tests.e2e.agent import World, prose
from tests.e2e.engine_cache import BOTH, NOWHERE, PLAIN

L2_ONLY = frozenset({Tier.L2})


async def by_completions(world: World, system: str) -> str:
    """The same system prompt in a way that is not followed."""
    tokens = await world.cache.tokens(
        [{"role": "system", "content": system}, {"role": "user", "content": "x"}]
    )
    # The engine takes what can be made an integer for one; we take integers only.
    loose = [float(token) for token in tokens]
    body = {"model": world.cache.stack.options.model_name, "prompt": loose, "max_tokens": 1}
    reply = await world.http.post(f"{world.up.data_url}/v1/completions", json=body)
    reply.raise_for_status()
    return "/v1/completions is not followed: the prompt is neither text nor token ids"


async def by_bypass(world: World, system: str) -> str:
    """The same system prompt while everything is bypassed."""
    await world.http.post(f"{world.up.admin_url}/kv/v1/bypass", params={"on": True})
    messages = [{"role": "system", "content": system}, {"role": "user", "content": "x"}]
    body = {"model": world.cache.stack.options.model_name, "messages": messages, "max_tokens": 1, **PLAIN}
    reply = await world.http.post(f"{world.up.data_url}/v1/chat/completions", json=body)
    reply.raise_for_status()
    await world.http.post(f"{world.up.admin_url}/kv/v1/bypass", params={"on": False})
    return "bypass"


@pytest.mark.parametrize("untracked", [by_completions, by_bypass])
async def test_what_untracked_calls_may_share_is_demoted(
    world: World, untracked: Callable[[World, str], Awaitable[str]]
) -> None:
    cache = world.cache
    system = prose(70)
    agent = world.agent("tracked", system=system)
    await agent.say(prose(40))
    salted = world.agent("salted", system=system)
    salted.messages.append({"role": "user", "content": prose(40)})
    await salted.call(1, {"cache_salt": "of-its-own"})
    reason = await untracked(world, system)
    [told] = await world.until(lambda: world.events(UntrackedForwarded))
    assert (told.namespace.model, told.namespace.salt, told.reason) == ("tiny", "", reason)

    keys = await agent.keys()
    await world.until_confirmed(keys)
    await cache.await_tiers(keys, BOTH)
    await agent.ops({"op": "close"})
    await world.until_settled(keys, DirectiveOutcome.APPLIED)
    assert world.asked(Demote) >= set(keys)
    assert await cache.where(keys) == [L2_ONLY] * len(keys)
    [demoted] = [d for d in await world.directives() if d["kind"] == "demote"]
    assert demoted["result"]["applied"] == len(keys)
    assert "lower copy kept because untracked inference was forwarded 0 min ago" in demoted["reason"]

    await cache.forget_engine_cache()
    reply = await cache.direct(agent.asked, max_tokens=1)
    assert reply["usage"]["prompt_tokens_details"]["cached_tokens"] == cache.chunk * len(keys)

    # Under a salt of its own nobody else can use the same chunks.
    state = world.state(salted.ctx)
    assert state is not None
    salt = state.namespace.salt
    assert salt not in ("", "of-its-own"), "a client's salt counts within its tenant only"
    mine = await salted.keys()
    await cache.await_tiers(mine, BOTH, salt)
    await salted.ops({"op": "close"})
    await world.until(lambda: world.asked(Reclaim) >= set(mine))
    await cache.await_tiers(mine, NOWHERE, salt)
    assert not world.asked(Reclaim) & (set(keys) - set(mine))
