"""What sets the memory log apart; the contract itself is in the conformance suite."""

from lifecycle.core.events import ListGrown
from lifecycle.store.memory import MemoryEventLog


async def test_two_logs_know_nothing_of_each_other() -> None:
    first, second = MemoryEventLog(), MemoryEventLog()
    await first.append("ctx/a", [ListGrown(at_ns=1, num_new=1)], 0)
    assert await second.head() == 0


async def test_what_is_read_back_has_been_through_the_codec() -> None:
    log = MemoryEventLog()
    event = ListGrown(at_ns=1, num_new=1)
    await log.append("ctx/a", [event], 0)
    (recorded,) = [r async for r in log.read_all()]
    assert recorded.event == event
    assert recorded.event is not event
