"""What is true, read from the log: names, pins and directives; and what may be forgotten."""

from collections.abc import AsyncIterator

import msgspec
import pytest

from lifecycle.core.directives import DirectiveResult, Reclaim
from lifecycle.core.events import (
    CallVerified,
    ChunksGone,
    ContextClosed,
    ContextCreated,
    DirectiveProposed,
    DirectiveSettled,
    EnforcementRearmed,
    Event,
    HarmBudgetExceeded,
    RecordedEvent,
)
from lifecycle.core.ids import ContextKey, Namespace
from lifecycle.core.observations import OperationReceived, PinsDropped, PinSpan
from lifecycle.errors import CorruptLog
from lifecycle.projections.contexts import NUM_CLOSED_KEPT, RETENTION_SECONDS, Contexts, Held
from lifecycle.store.memory import MemoryEventLog
from lifecycle.tracker import Tracker
from lifecycle.vocabulary import DirectiveOutcome, IdentityRung
from tests.lifecycle.core.story import BYTES_PER_TOKEN, NAMESPACE
from tests.lifecycle.lives import Agent, ManualClock, chain_of

KEY = ContextKey("t", "name")
OTHER = Namespace("other model")


@pytest.fixture
async def tracker() -> Tracker:
    made = Tracker(MemoryEventLog(), ManualClock())
    await made.start()
    return made


async def test_a_name_is_found_in_its_namespace_and_the_latest_in_any(tracker: Tracker) -> None:
    contexts = tracker.contexts
    assert contexts.find(KEY, NAMESPACE) is None
    assert contexts.latest(KEY) is None
    here, there = Agent(tracker, "here", "name"), Agent(tracker, "there", "name", OTHER)
    await here.open()
    await there.open()
    assert contexts.find(KEY, NAMESPACE) is here.state
    assert contexts.find(KEY, OTHER) is there.state
    assert contexts.find(ContextKey("somebody else", "name"), NAMESPACE) is None
    assert isinstance(tracker.clock, ManualClock)
    tracker.clock.advance(1)
    await here.call("u1")
    assert contexts.latest(KEY) is here.state
    tracker.clock.advance(1)
    await there.call("u1")
    assert contexts.latest(KEY) is there.state
    assert {s.uid for s in contexts.of_tenant("t")} == {"here", "there"}
    assert list(contexts.of_tenant("nobody")) == []


async def test_pinned_bytes_are_what_the_pins_hold(tracker: Tracker) -> None:
    agents = [Agent(tracker, f"u{n}") for n in range(3)]
    for n, agent in enumerate(agents):
        await agent.open()
        await agent.call("s1 u1 a1")
        pin = PinSpan(seq=1, ctx=agent.name, span=(0, n + 1))
        await tracker.observe(
            agent.uid,
            OperationReceived(at_ns=agent.now, source="s", operation=pin, bytes_per_token=BYTES_PER_TOKEN),
        )
        held = sum(p.size_bytes for a in agents[: n + 1] for p in a.state.pins)
        assert tracker.contexts.use.of("t").pinned_bytes == held > 0
    for agent in agents:
        await tracker.observe(agent.uid, PinsDropped(at_ns=agent.now, reason="r"))
    assert tracker.contexts.use.of("t").pinned_bytes == 0


async def test_a_directive_is_followed_from_proposal_to_outcome(tracker: Tracker) -> None:
    directive = Reclaim(directive_id="d", namespace=NAMESPACE, reason="r", keys=bytes(32))
    await tracker.record(NAMESPACE, [DirectiveProposed(at_ns=1, directive=directive, as_of=0)])
    record = tracker.contexts.directives["d"]
    assert (record.directive, record.result, record.proposed_ns) == (directive, None, 1)
    result = DirectiveResult(outcome=DirectiveOutcome.APPLIED)
    settled = DirectiveSettled(at_ns=2, directive_id="d", namespace=NAMESPACE, result=result)
    await tracker.record(NAMESPACE, [settled])
    record = tracker.contexts.directives["d"]
    assert (record.result, record.settled_ns) == (result, 2)


async def test_a_stream_that_does_not_begin_with_its_creation_is_corrupt(tracker: Tracker) -> None:
    agent = Agent(tracker, "a")
    await agent.open()
    (arrived,) = await agent.arrive("u1")
    with pytest.raises(CorruptLog):
        Contexts().apply(RecordedEvent(arrived.stream, 1, 1, arrived.event))


def test_closed_contexts_are_forgotten_oldest_first_and_never_open_ones() -> None:
    contexts = Contexts()
    created = ContextCreated(
        at_ns=1, uid="", tenant="t", context_id="", namespace=NAMESPACE, rung=IdentityRung.EXPLICIT
    )
    closed = ContextClosed(at_ns=1, reason="r")
    position = 0
    for n in range(NUM_CLOSED_KEPT + 5):
        name = f"{n:06}"
        opened = msgspec.structs.replace(created, uid=name, context_id=name)
        events: list[Event] = [opened] if n == 0 else [opened, closed]
        for version, event in enumerate(events, start=1):
            position += 1
            contexts.apply(RecordedEvent(f"ctx/{name}", version, position, event))
    assert "000000" in contexts.states
    assert [n for n in range(1, 10) if f"{n:06}" in contexts.states] == list(range(5, 10))
    assert len(contexts.states) == NUM_CLOSED_KEPT + 1
    assert len(contexts.stream_versions) == len(contexts.states)
    assert contexts.find(ContextKey("t", "000001"), NAMESPACE) is None


async def test_who_lost_control_stays_so_until_rearmed_also_through_a_snapshot(tracker: Tracker) -> None:
    exceeded = {
        tenant: HarmBudgetExceeded(
            at_ns=tracker.clock.now_ns(),
            namespace=Namespace("m"),
            tenant=tenant,
            regretted_tokens=5_000,
            prompt_tokens=10_000,
            allowed_tokens=1_000,
            window_seconds=3600.0,
        )
        for tenant in ("one", "two")
    }
    for event in exceeded.values():
        await tracker.record(event.namespace, [event])
    assert tracker.contexts.demotions == {("m", tenant): event for tenant, event in exceeded.items()}
    rearmed = EnforcementRearmed(at_ns=tracker.clock.now_ns(), namespace=Namespace("m"), tenant="one")
    await tracker.record(rearmed.namespace, [rearmed])
    assert tracker.contexts.demotions == {("m", "two"): exceeded["two"]}
    contexts, again = tracker.contexts, Contexts()
    held = msgspec.msgpack.decode(msgspec.msgpack.encode(contexts.held()), type=Held)
    again.hold(contexts.position, {}, [], contexts.stream_versions, held, contexts.index)
    assert again.demotions == contexts.demotions


def closed_at(contexts: Contexts, uid: str, at_ns: int, position: int) -> int:
    """A context that opens and closes at that time; answers the last position."""
    created = ContextCreated(
        at_ns=at_ns, uid=uid, tenant="t", context_id=uid, namespace=NAMESPACE, rung=IdentityRung.EXPLICIT
    )
    for version, event in enumerate((created, ContextClosed(at_ns=at_ns, reason="r")), start=1):
        contexts.apply(RecordedEvent(f"ctx/{uid}", version, position + version, event))
    return position + 2


def test_closed_contexts_and_settled_directives_are_forgotten_after_the_retention_by_event_time() -> None:
    contexts = Contexts(retention_seconds=3600)
    position = closed_at(contexts, "old", 0, 0)
    directive = Reclaim(directive_id="d", namespace=NAMESPACE, reason="r", keys=bytes(32))
    under_way = msgspec.structs.replace(directive, directive_id="under way")
    result = DirectiveResult(outcome=DirectiveOutcome.APPLIED)
    for event in (
        DirectiveProposed(at_ns=0, directive=directive, as_of=0),
        DirectiveProposed(at_ns=0, directive=under_way, as_of=0),
        DirectiveSettled(at_ns=0, directive_id="d", namespace=NAMESPACE, result=result),
    ):
        position += 1
        contexts.apply(RecordedEvent(NAMESPACE.stream(), position - 2, position, event))
    position = closed_at(contexts, "young", 3599 * 10**9, position)
    assert set(contexts.states) == {"old", "young"}
    assert set(contexts.directives) == {"d", "under way"}
    position = closed_at(contexts, "now", 3660 * 10**9, position)
    assert set(contexts.states) == {"young", "now"}
    assert set(contexts.directives) == {"under way"}, "what is under way is still waited for"
    assert contexts.find(ContextKey("t", "old"), NAMESPACE) is None
    assert contexts.version_of("ctx/old") == 0


def test_what_is_recorded_of_a_context_that_was_just_forgotten_changes_nothing() -> None:
    contexts = Contexts(retention_seconds=3600)
    position = closed_at(contexts, "old", 0, 0)
    position = closed_at(contexts, "now", 3660 * 10**9, position)
    assert set(contexts.states) == {"now"}
    late = CallVerified(at_ns=3660 * 10**9, call_id="c", attempt=1, num_chunks=1, num_shown=1)
    contexts.apply(RecordedEvent("ctx/old", 3, position + 1, late))
    assert set(contexts.states) == {"now"}
    assert contexts.version_of("ctx/old") == 0
    position = closed_at(contexts, "later", 3661 * 10**9, position + 1)
    assert contexts.position == position


async def test_a_context_is_not_forgotten_while_chunks_that_it_let_go_may_be_freed(tracker: Tracker) -> None:
    agent = Agent(tracker, "a")
    await agent.open()
    await agent.call("s1 u1")
    await agent.stored(chain_of("s1 u1"))
    await agent.close()
    assert isinstance(tracker.clock, ManualClock)
    tracker.clock.advance(RETENTION_SECONDS + 60)
    await agent.stored(b"")
    assert "a" in tracker.contexts.states, "its mode decides whether they may be freed"
    gone = ChunksGone(at_ns=tracker.clock.now_ns(), namespace=NAMESPACE, keys=chain_of("s1 u1"))
    await tracker.record(NAMESPACE, [gone])
    tracker.clock.advance(60)
    await agent.stored(b"")
    assert "a" not in tracker.contexts.states


async def test_a_log_that_lacks_a_position_is_corrupt(tracker: Tracker) -> None:
    async def torn() -> AsyncIterator[RecordedEvent]:
        yield RecordedEvent("ctx/a", 1, 2, ContextClosed(at_ns=1, reason="r"))

    with pytest.raises(CorruptLog, match="position 1"):
        await Contexts().rebuild(torn())


def test_of_two_contexts_of_one_name_the_first_one_has_it_also_behind_a_snapshot() -> None:
    """Two writers may open the same name at once."""
    contexts = Contexts()
    for position, uid in enumerate(("first", "second"), start=1):
        created = ContextCreated(
            at_ns=1, uid=uid, tenant="t", context_id="n", namespace=NAMESPACE, rung=IdentityRung.EXPLICIT
        )
        contexts.apply(RecordedEvent(f"ctx/{uid}", 1, position, created))
    other = Contexts()
    backwards = dict(reversed(contexts.states.items()))
    other.hold(2, backwards, (), contexts.stream_versions, contexts.held(), contexts.index)
    for each in (contexts, other):
        found = each.find(ContextKey("t", "n"), NAMESPACE)
        assert found is not None
        assert found.uid == "first"
    assert other.held().nameless == ["second"]


async def test_how_a_model_was_mapped_last_is_told_by_the_context_used_last(tracker: Tracker) -> None:
    assert tracker.contexts.fingerprint_of("m") == ""
    for n, fingerprint in enumerate(["old", "new"]):
        agent = Agent(tracker, f"u{n}", namespace=Namespace("m", "", fingerprint))
        await agent.open()
        await agent.arrive("u1")
    assert tracker.contexts.fingerprint_of("m") == "new"
    assert tracker.contexts.fingerprint_of("another") == ""
