"""A log that is opened late refuses until it may be read, and takes nothing until it was read."""

import pytest

from lifecycle.core.events import ListGrown
from lifecycle.errors import LogUnavailable
from lifecycle.store.late import LateEventLog
from lifecycle.store.memory import MemoryEventLog

EVENT = ListGrown(at_ns=1, num_new=1)


async def test_it_is_closed_then_readable_then_whole() -> None:
    inner = MemoryEventLog()
    await inner.append("ctx/a", [EVENT], 0)
    late = LateEventLog()
    for attempt in (late.append("ctx/a", [EVENT], 1), late.head(), late.first_position(), late.trim(1, [])):
        with pytest.raises(LogUnavailable):
            await attempt
    with pytest.raises(LogUnavailable):
        late.read_all()

    late.open_for_reading(inner)
    assert [r.position async for r in late.read_all()] == [1]
    assert [r.version async for r in late.read_stream("ctx/a")] == [1]
    for attempt in (late.append("ctx/a", [EVENT], 1), late.trim(1, [])):
        with pytest.raises(LogUnavailable):
            await attempt

    late.open_for_writing()
    await late.append("ctx/a", [EVENT], 1)
    assert await late.head() == await inner.head() == 2
    assert await late.trim(1, ["ctx/a"]) == await late.first_position() == 2


async def test_closing_it_closes_the_log() -> None:
    inner = MemoryEventLog()
    late = LateEventLog()
    await late.close()
    late.open_for_reading(inner)
    late.open_for_writing()
    await late.close()
    with pytest.raises(LogUnavailable):
        await inner.head()
    with pytest.raises(LogUnavailable):
        await late.append("ctx/a", [EVENT], 0)
