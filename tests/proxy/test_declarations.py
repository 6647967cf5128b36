"""What a pin costs, what it grants, and that whoever asks is answered whatever happens."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest

from lifecycle.core.ids import Namespace
from lifecycle.core.observations import AppendMessages, ForkContext, Operation, PinSpan, SpawnContext
from lifecycle.core.pins import PinRoom
from lifecycle.core.state import ContextState
from lifecycle.store.memory import MemoryEventLog
from lifecycle.tracker import Tracker
from lifecycle.vocabulary import OperationStatus, Tier
from proxy.config import LimitsConfig
from proxy.declarations import Declarations
from proxy.limits import Limits
from proxy.mailbox import Mailboxes
from proxy.tasks import owned_tasks
from tests.lifecycle.core.story import NAMESPACE
from tests.lifecycle.fake_cache import EVERYTHING, FakeCache
from tests.lifecycle.lives import Agent, CountedIds, ManualClock, chain_of

WORDS = "s1 u1 a1"
BYTES_PER_TOKEN = 10


class Scene:
    def __init__(self, mailboxes: Mailboxes) -> None:
        self.tracker = Tracker(MemoryEventLog(), ManualClock())
        self.own: dict[str, LimitsConfig] = {}
        self.cache = FakeCache()
        self.namespace: Namespace | None = NAMESPACE
        self.declarations = Declarations(
            self.tracker,
            mailboxes,
            CountedIds(),
            Limits(self.tracker, LimitsConfig(), self.own),
            lambda: BYTES_PER_TOKEN,
            lambda: self.cache.capabilities,
            lambda: self.namespace,
        )

    async def pin(self, seq: int, span: Any = (0, 3)) -> Any:
        operation = PinSpan(seq=seq, ctx="a", span=span)
        (result,) = await self.declarations.submit("t", "s", [operation])
        return result


@asynccontextmanager
async def scene() -> AsyncIterator[Scene]:
    async with owned_tasks() as tasks:
        it = Scene(Mailboxes(tasks))
        await it.tracker.start()
        agent = Agent(it.tracker, "uid", "a")
        await agent.open()
        await agent.call(WORDS)
        yield it


async def test_a_pin_is_granted_within_the_budget_and_refused_with_a_reason() -> None:
    async with scene() as it:
        num_tokens = max(v.end for v in it.tracker.contexts.states["uid"].versions.values())
        budget = num_tokens * BYTES_PER_TOKEN + 100
        it.own |= dict.fromkeys(("t", "somebody else"), LimitsConfig(pinned_bytes=budget))
        first = await it.pin(1)
        assert first.status is OperationStatus.APPLIED
        held = it.tracker.contexts.use.of("t").pinned_bytes
        assert 0 < held <= num_tokens * 10
        async with it.declarations.pin_room("t", sets_pins=True) as room:
            assert room == PinRoom(BYTES_PER_TOKEN, budget - held, None)
        async with it.declarations.pin_room("somebody else", sets_pins=False) as room:
            assert room == PinRoom(BYTES_PER_TOKEN, budget, None)
        refused = await it.pin(2, (0, 2))
        assert refused.status is OperationStatus.REJECTED
        assert "budget" in refused.reason
        assert len(chain_of(WORDS)) > 0


async def test_the_same_pin_again_changes_nothing_but_its_lease() -> None:
    async with scene() as it:
        await it.pin(1)
        held = it.tracker.contexts.use.of("t").pinned_bytes
        again = await it.pin(2)
        assert again.status is OperationStatus.APPLIED
        assert it.tracker.contexts.use.of("t").pinned_bytes == held
        assert len(it.tracker.contexts.states["uid"].pins) == 1
        assert (await it.pin(2)).status is OperationStatus.DUPLICATE


@pytest.mark.parametrize(
    ("supported", "says"), [(EVERYTHING, "held"), (frozenset({"reclaim"}), "the cache may evict")]
)
async def test_a_pin_says_what_each_tier_grants(supported: frozenset[str], says: str) -> None:
    async with scene() as it:
        it.cache = FakeCache(supported)
        granted = (await it.pin(1)).granted
        assert granted.keys() == {Tier.L1, Tier.L2}
        assert says in granted[Tier.L2]


async def test_without_a_model_nothing_can_be_created() -> None:
    async with scene() as it:
        it.namespace = None
        (result,) = await it.declarations.submit("t", "s", [SpawnContext(seq=1, ctx="new")])
        assert result.status is OperationStatus.REJECTED


async def test_a_child_lives_where_its_parent_lives() -> None:
    async with scene() as it:
        it.namespace = Namespace("another")
        await it.declarations.submit("t", "s", [SpawnContext(seq=1, ctx="child", parent="a")])
        child = next(s for s in it.tracker.contexts.states.values() if s.key.context_id == "child")
        assert child.namespace == NAMESPACE


async def test_a_context_that_begins_by_an_operation_has_the_labels_that_the_operation_gives() -> None:
    async with scene() as it:
        fork = ForkContext(seq=1, ctx="child", parent="a", agent="tester", flow="run-7")
        await it.declarations.submit("t", "s", [fork])
        child = next(s for s in it.tracker.contexts.states.values() if s.key.context_id == "child")
        assert (child.agent, child.flow) == ("tester", "run-7")


async def test_whoever_asks_is_answered_even_by_a_bug() -> None:
    async with scene() as it:

        def broken(key: object) -> ContextState | None:
            raise RuntimeError("a bug")

        it.tracker.contexts.latest = broken  # type: ignore[method-assign,assignment]
        with pytest.raises(RuntimeError):
            await asyncio.wait_for(it.declarations.submit("t", "s", [AppendMessages(seq=1, ctx="a", n=1)]), 5)


async def test_the_order_of_one_source_is_kept_however_many_ask_at_once() -> None:
    async with scene() as it:
        operations: list[Operation] = [AppendMessages(seq=n, ctx="a", n=1) for n in range(1, 50)]
        make: Callable[[Operation], Any] = lambda op: it.declarations.submit("t", "s", [op])  # noqa: E731
        results = await asyncio.gather(*(make(op) for op in operations))
        assert {r[0].status for r in results} == {OperationStatus.APPLIED}
        assert it.tracker.contexts.states["uid"].sources["s"].applied == 49
