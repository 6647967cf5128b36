"""Sums by tenant are what counting anew would give, whatever happens and however the books were read."""

import pytest

from lifecycle.core.observations import CloseRequested, OperationReceived, PinsDropped, PinSpan
from lifecycle.projections.contexts import Contexts
from lifecycle.projections.tenant_use import Use
from lifecycle.store.memory import MemoryEventLog
from lifecycle.tracker import Tracker
from tests.lifecycle.core.story import BYTES_PER_TOKEN
from tests.lifecycle.lives import Agent, ManualClock


@pytest.fixture
async def tracker() -> Tracker:
    it = Tracker(MemoryEventLog(), ManualClock())
    await it.start()
    return it


def counted(contexts: Contexts, tenant: str) -> Use:
    states = list(contexts.of_tenant(tenant))
    pins = [p for s in states for p in s.pins]
    return Use(sum(s.open for s in states), len(pins), sum(p.size_bytes for p in pins))


async def test_contexts_pins_and_bytes_are_counted_by_tenant(tracker: Tracker) -> None:
    contexts = tracker.contexts
    agents = [Agent(tracker, f"u{n}") for n in range(3)]
    for n, agent in enumerate(agents):
        await agent.open()
        assert contexts.use.of("t") == counted(contexts, "t")
        await agent.call("s1 u1 a1")
        operation = PinSpan(seq=1, ctx=agent.name, span=(0, n + 1))
        seen = OperationReceived(
            at_ns=agent.now, source="s", operation=operation, bytes_per_token=BYTES_PER_TOKEN
        )
        await tracker.observe(agent.uid, seen)
        assert contexts.use.of("t") == counted(contexts, "t")
    assert contexts.use.of("t").contexts == contexts.use.of("t").pins == 3
    assert [tenant for tenant, _ in contexts.use.all()] == ["t"]
    assert contexts.use.of("somebody else") == Use()
    for agent in agents:
        await tracker.observe(agent.uid, CloseRequested(at_ns=agent.now, reason="r"))
        assert contexts.use.of("t") == counted(contexts, "t")
    assert contexts.use.of("t").contexts == 0
    assert contexts.use.of("t").pins == 3
    for agent in agents:
        await tracker.observe(agent.uid, PinsDropped(at_ns=agent.now, reason="r"))
    assert contexts.use.of("t") == Use()
    assert list(contexts.use.all()) == []


async def test_a_context_that_goes_on_counts_again(tracker: Tracker) -> None:
    agent = Agent(tracker, "u")
    await agent.open()
    await agent.call("s1 u1 a1")
    await tracker.observe(agent.uid, CloseRequested(at_ns=agent.now, reason="r"))
    assert tracker.contexts.use.of("t").contexts == 0
    await agent.call("s1 u1 a1 u2")
    assert tracker.contexts.use.of("t").contexts == 1
