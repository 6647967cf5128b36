"""Calls of processes that ended in the middle of them."""

from lifecycle.core.state import list_path
from lifecycle.orphans import callers, end_orphans
from lifecycle.store.memory import MemoryEventLog
from tests.lifecycle.lives import Agent, books, replayed, started


async def test_calls_that_a_dead_process_left_in_flight_end_with_the_next_one() -> None:
    log = MemoryEventLog()
    tracker, _ = await started(log)
    agent = Agent(tracker, "a")
    await agent.open()
    await agent.arrive("u1", "mapped")
    await agent.map("u1", "mapped")
    await agent.first("mapped")
    await agent.arrive("u1 a1 u2", "unknown")
    again, _ = await started(log)
    assert len(again.contexts.states["a"].flights) == 2
    assert again.contexts.index.oldest_unknown_ns(agent.namespace) is not None
    await end_orphans(again, callers(again.contexts))
    state = again.contexts.states["a"]
    assert state.flights == ()
    assert again.contexts.index.oldest_unknown_ns(agent.namespace) is None
    current = state.current_branch()
    assert current is not None
    assert len(list_path(state, current.tip)) == 1, "what was computed is still the context's list"
    assert books(again.contexts) == books(await replayed(log))
