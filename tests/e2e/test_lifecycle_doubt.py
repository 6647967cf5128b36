"""Undeclared changes on the real stack: what is left behind is doubtful first, gone later, or lives again."""

from typing import Any

from lifecycle.core.events import BranchExpired, BranchRestored
from tests.e2e.agent import Agent, World, prose
from tests.e2e.engine_cache import BOTH, NOWHERE, Message

LONG = {"ignore_eos": True, "min_tokens": 230}


def respaced(message: Message) -> Message:
    """The same text with other spaces."""
    return {**message, "content": " " + message["content"].replace(" ", "  ") + " "}


def question() -> Message:
    return {"role": "user", "content": prose(40)}


async def generating_agent(world: World) -> tuple[Agent, Message, list[bytes], list[bytes]]:
    """An agent that got a long answer: the answer, the prompt's chunks, and those of generated tokens."""
    agent = world.agent("writer")
    agent.messages.append(question())
    answer = await agent.call(230, LONG)
    assert len(agent.ids[0]) == 230
    prompt = await agent.keys()
    generated = (await agent.stored_keys())[len(prompt) :]
    assert len(generated) >= 3
    await world.until_confirmed([*prompt, *generated])
    await world.cache.await_tiers([*prompt, *generated], BOTH)
    return agent, answer, prompt, generated


def states_of(view: dict[str, Any], keys: list[bytes]) -> set[str]:
    """States of the versions that hold the keys; `dead` for keys that no version holds."""
    held = {c["key"]: v["state"] for v in view["versions"] for c in v["chunks"]}
    return {held.get(key.hex(), "dead") for key in keys}


async def test_a_respaced_echo_leaves_a_doubtful_answer_that_is_gone_a_turn_later(world: World) -> None:
    cache = world.cache
    agent, answer, prompt, generated = await generating_agent(world)
    assert states_of(await world.view(agent.ctx), generated) == {"suspended"}

    agent.messages += [respaced(answer), question()]
    agent.messages.append(await agent.call())
    after = await agent.stored_keys()
    await world.until_confirmed(after)
    assert not set(after) & set(generated), "the changed spaces changed no token"
    assert states_of(await world.view(agent.ctx), generated) == {"doubtful"}
    await world.sweep()
    assert await cache.where(generated) == [BOTH] * len(generated)

    agent.messages.append(question())
    await agent.call()
    await world.until_gone(generated)
    assert [e.reason for e in world.events(BranchExpired)] == ["the context went on without it"]
    assert states_of(await world.view(agent.ctx), generated) == {"dead"}
    assert await cache.where(generated) == [NOWHERE] * len(generated)
    kept = [key for key in prompt if key in await agent.keys()]
    assert len(kept) >= len(prompt) - 1, "only the chunk with the generation prompt differs"
    assert await cache.where(kept) == [BOTH] * len(kept)


async def test_of_a_doubtful_branch_that_comes_back_nothing_was_lost(world: World) -> None:
    cache = world.cache
    agent, answer, _, _ = await generating_agent(world)
    agent.messages += [answer, question()]
    agent.messages.append(await agent.call())
    old, old_list = await agent.keys(), list(agent.messages)
    await world.until_confirmed(old)

    agent.messages = [*old_list[:2], respaced(answer), *old_list[3:], question()]
    await agent.call()
    new = await agent.keys()
    await world.until_confirmed(new)
    left = [key for key in old if key not in new]
    assert len(left) >= 3
    assert states_of(await world.view(agent.ctx), left) == {"doubtful"}
    await world.sweep()

    agent.messages = [*old_list, question()]
    await cache.forget_engine_cache()
    await agent.call()
    await world.until(lambda: world.events(BranchRestored))
    came_back = [key for key in await agent.keys() if key in old]
    assert agent.cached_tokens == cache.chunk * len(came_back)
    assert len(came_back) >= len(old) - 1
    await world.sweep()
    assert await cache.where(came_back) == [BOTH] * len(came_back)
    assert states_of(await world.view(agent.ctx), left) <= {"suspended", "dead"}
    assert states_of(await world.view(agent.ctx), [k for k in new if k not in old]) == {"doubtful"}
