"""What one agent after the other begins with is not computed again by each of them."""

import pytest

from lifecycle.core.directives import DirectiveResult, Reclaim
from lifecycle.core.events import DirectiveProposed, DirectiveSettled
from lifecycle.core.ids import KEY_BYTES, split_keys
from lifecycle.core.plan import plan_reclaim
from lifecycle.ports import EventLog
from lifecycle.projections.recurrence import MAX_KEYS, Recurrence, RecurrenceFacts
from lifecycle.store.memory import MemoryEventLog
from lifecycle.tracker import Tracker
from lifecycle.vocabulary import DirectiveOutcome
from tests.lifecycle.core.story import NAMESPACE
from tests.lifecycle.lives import Agent, ManualClock, chain_of

KEEP_SECONDS = 600
HEAD = "system tools"
RETENTION_SECONDS = 86_400.0


class Life:
    """Agents one after the other before a cache that frees at once what is planned."""

    def __init__(self, keep_seconds: float = KEEP_SECONDS) -> None:
        self.clock = ManualClock()
        self.log: EventLog = MemoryEventLog()
        self.tracker = Tracker(self.log, self.clock, RETENTION_SECONDS, keep_seconds)
        self.count = 0

    async def agent(self, words: str, parent: Agent | None = None) -> Agent:
        """A context that has called once, its chunks stored."""
        self.count += 1
        agent = Agent(self.tracker, f"agent-{self.count}")
        await agent.open(parent)
        await agent.call(words)
        await agent.stored(chain_of(words))
        return agent

    async def free(self, outcome: DirectiveOutcome = DirectiveOutcome.APPLIED) -> set[bytes]:
        """What is due now is freed, or only would be."""
        index = self.tracker.contexts.index
        now = self.clock.now_ns()
        directive = plan_reclaim(index, NAMESPACE, now, 0, f"d-{now}-{self.count}", lambda owner: True)
        if directive is None:
            return set()
        assert isinstance(directive, Reclaim)
        gone = directive.keys if outcome is DirectiveOutcome.APPLIED else b""
        result = DirectiveResult(outcome=outcome, gone=gone)
        await self.tracker.record(NAMESPACE, [DirectiveProposed(at_ns=now, directive=directive, as_of=0)])
        settled = DirectiveSettled(
            at_ns=now, directive_id=directive.directive_id, namespace=NAMESPACE, result=result
        )
        await self.tracker.record(NAMESPACE, [settled])
        return set(split_keys(directive.keys))


def keys(words: str) -> set[bytes]:
    return set(split_keys(chain_of(words)))


SHARED = keys(f"{HEAD} uone") & keys(f"{HEAD} utwo")


def test_the_story_has_a_head_of_whole_chunks() -> None:
    assert SHARED


async def test_a_head_that_two_live_agents_share_outlives_them_for_a_while() -> None:
    life = Life()
    first = await life.agent(f"{HEAD} uone")
    second = await life.agent(f"{HEAD} utwo")
    await first.close()
    await second.close()
    assert await life.free() == (keys(f"{HEAD} uone") | keys(f"{HEAD} utwo")) - SHARED
    life.clock.advance(KEEP_SECONDS - 1)
    assert await life.free() == set()
    life.clock.advance(2)
    assert await life.free() == SHARED


@pytest.mark.parametrize("outcome", [DirectiveOutcome.APPLIED, DirectiveOutcome.SUPPRESSED])
async def test_a_head_that_was_freed_and_came_back_is_freed_in_vain_once(outcome: DirectiveOutcome) -> None:
    life = Life()
    await (await life.agent(f"{HEAD} uone")).close()
    assert await life.free(outcome) > SHARED
    for name in ("utwo", "uthree", "ufour"):
        life.clock.advance(60)
        await (await life.agent(f"{HEAD} {name}")).close()
        assert not SHARED & await life.free(outcome)
    life.clock.advance(KEEP_SECONDS + 1)
    assert await life.free(outcome) == SHARED


async def test_what_comes_back_long_after_is_as_good_as_new() -> None:
    life = Life()
    await (await life.agent(f"{HEAD} uone")).close()
    await life.free()
    life.clock.advance(KEEP_SECONDS + 1)
    await (await life.agent(f"{HEAD} uone")).close()
    assert await life.free() == keys(f"{HEAD} uone")


async def test_a_fork_shares_with_its_parent_and_proves_nothing() -> None:
    life = Life()
    parent = await life.agent(f"{HEAD} uone")
    child = await life.agent(f"{HEAD} uone umore", parent)
    await parent.close()
    await child.close()
    assert await life.free() == keys(f"{HEAD} uone umore") | keys(f"{HEAD} uone")


async def test_without_a_time_to_keep_nothing_is_kept() -> None:
    life = Life(keep_seconds=0)
    first = await life.agent(f"{HEAD} uone")
    second = await life.agent(f"{HEAD} utwo")
    await first.close()
    await second.close()
    assert await life.free() > SHARED


def test_memory_is_bounded_and_goes_through_a_snapshot() -> None:
    memory = Recurrence(10)
    many = b"".join(number.to_bytes(KEY_BYTES) for number in range(MAX_KEYS + 500))
    memory.freed(many, 0)
    memory.came(many[: 600 * KEY_BYTES], 5)
    facts = memory.facts()
    assert len(facts.freed) == MAX_KEYS - 100
    assert len(facts.recurring) == 100
    other = Recurrence(10)
    other.put(facts)
    assert other.facts() == facts != RecurrenceFacts()
    for shared in (many, many[:KEY_BYTES]):
        memory.shared(shared)
    assert len(memory.facts().recurring) == MAX_KEYS
