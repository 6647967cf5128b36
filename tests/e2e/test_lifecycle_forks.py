"""Forks on the real stack: what contexts share lives as long as one of them does."""

import pytest

from lifecycle.core.events import ContextCreated
from tests.e2e.agent import Agent, World, prose
from tests.e2e.engine_cache import BOTH, NOWHERE

LONG_ANSWER = 1500
"""Tokens of an answer that is still being written when an operation was answered, on any machine."""


async def a_parent(world: World) -> tuple[Agent, list[bytes], list[bytes]]:
    """An agent after three turns, the chunks inside its first two messages, and all it stored."""
    parent = world.agent("parent")
    for _ in range(3):
        await parent.say(prose(40))
    stored = await parent.stored_keys()
    await world.until_confirmed(stored)
    return parent, await world.cache.head_keys(parent.messages[:2]), stored


async def test_what_a_parent_removes_lives_until_its_child_closes(world: World) -> None:
    cache = world.cache
    parent, kept, stored = await a_parent(world)
    child = parent.fork()
    await child.say(prose(40), parent=parent.ctx, fork_at=len(parent.messages))
    await child.say(prose(40))
    childs = await child.stored_keys()
    await world.until_confirmed(childs)
    shared = [key for key in stored if key in childs and key not in kept]
    assert len(kept) >= 6
    assert len(shared) >= 4

    await parent.ops({"op": "remove", "span": [2, len(parent.messages)]})
    await world.until_gone([key for key in stored if key not in childs])
    await world.sweep()
    assert await cache.where(kept + shared) == [BOTH] * len(kept + shared)

    await child.ops({"op": "close"})
    own = [key for key in childs if key not in kept]
    assert len(own) > len(shared)
    await world.until_gone(own)
    assert await cache.where(own) == [NOWHERE] * len(own)
    assert await cache.where(kept) == [BOTH] * len(kept)


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
async def test_of_two_forks_the_last_to_close_frees_what_they_share(
    world: World, order: tuple[int, int]
) -> None:
    cache = world.cache
    parent, _, stored = await a_parent(world)
    children = [parent.fork(f"child{i}") for i in (0, 1)]
    chains = []
    for child in children:
        await child.ops({"op": "fork", "parent": parent.ctx})
        await child.say(prose(40))
        chains.append(await child.stored_keys())
    await world.until_confirmed([*chains[0], *chains[1]])
    shared = [key for key in chains[0] if key in chains[1]]
    # Where the parent's last chunk ends just so, one more is filled by what the template puts before a turn.
    assert len(set(shared) - set(stored)) <= 1
    assert len(shared) >= 8
    await parent.ops({"op": "close"})
    first, last = order
    await children[first].ops({"op": "close"})
    own = [key for key in chains[first] if key not in shared]
    assert own
    await world.until_gone(own)
    await world.sweep()
    assert await cache.where(chains[last]) == [BOTH] * len(chains[last])
    await children[last].ops({"op": "close"})
    await world.until_gone(chains[last])
    everything = sorted({*stored, *chains[0], *chains[1]})
    await cache.await_tiers(everything, NOWHERE)


async def test_a_fork_during_the_parents_call_takes_its_last_closed_list(world: World) -> None:
    cache = world.cache
    parent, _, stored = await a_parent(world)
    closed = list(parent.messages[:-1])
    child = parent.fork()
    parent.messages.append({"role": "user", "content": prose(40)})
    async with parent.streaming(LONG_ANSWER, {"ignore_eos": True, "min_tokens": LONG_ANSWER}):
        await child.ops({"op": "fork", "parent": parent.ctx})
        state = world.state(parent.ctx)
        assert state is not None
        assert state.flights, "the parent's call is over, so this shows nothing"
        created = [e for e in world.events(ContextCreated) if e.context_id == child.ctx]
        assert [(e.forked, e.fork_at) for e in created] == [(True, len(closed))]
        await child.say(prose(40))
    flown = await parent.stored_keys()
    childs = await child.stored_keys()
    await world.until_confirmed([*flown, *childs])
    shared = [key for key in childs if key in stored]
    assert len(shared) >= 8
    assert len(flown) >= len(stored) + 5

    await parent.ops({"op": "close"})
    await world.until_gone([key for key in flown if key not in childs])
    assert await cache.where(childs) == [BOTH] * len(childs)
    await child.ops({"op": "close"})
    await world.until_gone(childs)
    await cache.await_tiers(sorted({*flown, *childs, *stored}), NOWHERE)
