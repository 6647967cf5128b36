"""Trimmed logs, on every adapter: what is gone is gone from the beginning, and nothing else changes."""

import asyncio
from collections.abc import Collection
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lifecycle.core.events import Event, ListGrown, RecordedEvent
from lifecycle.errors import VersionConflict
from lifecycle.ports import EventLog
from tests.conformance.event_log_adapters import ADAPTERS, Adapter, Connect, shared


def grown(*counts: int) -> list[Event]:
    """Events that can be told apart by a number."""
    return [ListGrown(at_ns=1, num_new=n) for n in counts]


async def positions(log: EventLog, after: int = 0) -> list[int]:
    return [r.position async for r in log.read_all(after)]


async def versions(log: EventLog, stream: str, after: int = 0) -> list[int]:
    return [r.version async for r in log.read_stream(stream, after)]


async def trimmed(log: EventLog, through: int, streams: Collection[str]) -> int:
    """Trim until nothing more happens."""
    first = await log.trim(through, streams)
    while (again := await log.trim(through, streams)) != first:
        first = again
    return first


async def test_a_new_log_begins_at_1(log: EventLog) -> None:
    assert await log.first_position() == 1
    assert await trimmed(log, 10, ()) == 1
    (recorded,) = await log.append("ctx/a", grown(1), 0)
    assert recorded.position == 1
    assert await log.first_position() == 1


async def test_a_trim_takes_the_oldest_and_leaves_the_rest_as_it_was(log: EventLog) -> None:
    for version in range(4):
        await log.append("ctx/a", grown(version), version)
        await log.append("ctx/b", grown(10 + version), version)
    before = [r async for r in log.read_all()]
    assert await trimmed(log, 3, ("ctx/a", "ctx/b")) == 4 == await log.first_position()
    assert [r async for r in log.read_all()] == before[3:]
    assert await positions(log, after=1) == [4, 5, 6, 7, 8]
    assert await positions(log, after=5) == [6, 7, 8]
    assert await versions(log, "ctx/a") == [3, 4]
    assert await versions(log, "ctx/b") == [2, 3, 4]
    assert await versions(log, "ctx/a", after=3) == [4]
    assert await log.head() == 8
    assert await trimmed(log, 2, ("ctx/a", "ctx/b")) == 4, "what is trimmed stays trimmed"


async def test_appends_go_on_behind_what_was_trimmed(log: EventLog) -> None:
    await log.append("ctx/a", grown(1, 2), 0)
    await log.append("ctx/b", grown(3), 0)
    assert await trimmed(log, 2, ("ctx/a", "ctx/b")) == 3
    assert await versions(log, "ctx/a") == []
    with pytest.raises(VersionConflict) as conflict:
        await log.append("ctx/a", grown(4), 0)
    assert conflict.value.actual == 2
    (recorded,) = await log.append("ctx/a", grown(4), 2)
    assert (recorded.version, recorded.position) == (3, 4)
    assert await versions(log, "ctx/a") == [3]
    assert await positions(log) == [3, 4]


async def test_a_stream_that_does_not_go_on_is_forgotten_with_its_last_event(log: EventLog) -> None:
    await log.append("ctx/over", grown(1, 2), 0)
    await log.append("ctx/half", grown(3), 0)
    await log.append("ctx/half", grown(4), 1)
    assert await trimmed(log, 3, ()) == 4
    with pytest.raises(VersionConflict) as conflict:
        await log.append("ctx/half", grown(5), 0)
    assert conflict.value.actual == 2, "it has an event left"
    (recorded,) = await log.append("ctx/over", grown(6), 0)
    assert (recorded.version, recorded.position) == (1, 5)
    assert await versions(log, "ctx/over") == [1]


async def test_positions_go_on_after_everything_is_trimmed(log: EventLog) -> None:
    await log.append("ctx/a", grown(1, 2), 0)
    await log.append("ctx/b", grown(3), 0)
    first = await trimmed(log, 99, ("ctx/a", "ctx/b"))
    assert first in (3, 4), "a log may keep its last batch"
    assert await log.head() == 3
    assert await positions(log) == list(range(first, 4))
    (recorded,) = await log.append("ctx/b", grown(4), 1)
    assert (recorded.version, recorded.position) == (2, 4)
    assert await positions(log, after=3) == [4]


async def test_many_events_are_trimmed_in_steps(log: EventLog) -> None:
    for n in range(30):
        await log.append(f"ctx/{n}", grown(*range(100)), 0)
    steps = [await log.trim(2950, ())]
    while (first := await log.trim(2950, ())) != steps[-1]:
        steps.append(first)
    assert steps == sorted(set(steps))
    assert steps[-1] in (2901, 2951), "a batch may be kept whole"
    assert await positions(log) == list(range(steps[-1], 3001))


async def test_a_read_that_is_overtaken_goes_on_with_what_is_left(log: EventLog) -> None:
    for n in range(20):
        await log.append("ctx/a", grown(*range(100)), 100 * n)
    reads = [log.read_all(), log.read_stream("ctx/a")]
    for read in reads:
        assert (await anext(read)).position == 1
    first = await trimmed(log, 1500, ("ctx/a",))
    for read in reads:
        rest = [r.position async for r in read]
        assert rest[-1] == 2000
        assert rest[-500:] == list(range(1501, 2001))
        assert rest == sorted(set(rest))
    assert first == 1501


async def test_appends_and_trims_at_once_disturb_nobody(log: EventLog) -> None:
    names = [f"ctx/{n}" for n in range(5)]

    async def write(name: str) -> None:
        for version in range(0, 60, 2):
            await log.append(name, grown(version, version), version)

    async def cut() -> None:
        for through in range(0, 250, 10):
            await log.trim(through, names)
            await asyncio.sleep(0)

    await asyncio.gather(cut(), *map(write, names))
    assert await log.head() == 300
    first = await trimmed(log, 240, names)
    assert await positions(log) == list(range(first, 301))
    for name in names:
        kept = await versions(log, name)
        assert kept == list(range(61 - len(kept), 61))


@shared
async def test_a_trimmed_log_is_found_so_again(log: EventLog, connect: Connect) -> None:
    other = await connect()
    await log.append("ctx/a", grown(1), 0)
    await log.append("ctx/b", grown(2), 0)
    await log.append("ctx/b", grown(3), 1)
    assert await trimmed(log, 2, ("ctx/a", "ctx/b")) == 3
    assert await other.first_position() == 3, "another process sees it at once"
    await log.close()
    again = await connect()
    assert await again.first_position() == 3
    assert await positions(again) == [3]
    assert (await again.append("ctx/a", grown(4), 1))[0].position == 4
    assert await positions(other) == [3, 4]


@shared
async def test_two_who_trim_at_once_agree(log: EventLog, connect: Connect) -> None:
    other = await connect()
    for n in range(40):
        await log.append("ctx/a", grown(n), n)
    await asyncio.gather(*(through.trim(p, ("ctx/a",)) for p in (10, 20, 30) for through in (log, other)))
    assert await trimmed(log, 30, ("ctx/a",)) == 31
    assert await positions(other) == list(range(31, 41))


STREAMS = st.sampled_from(["ctx/a", "ctx/b", "ns/m//"])
STEPS = st.lists(
    st.one_of(
        st.tuples(STREAMS, st.integers(1, 3)),
        st.tuples(st.integers(0, 12), st.sets(STREAMS)),
    ),
    max_size=14,
)


@settings(max_examples=30, deadline=None)
@given(steps=STEPS)
@pytest.mark.parametrize("adapter", ADAPTERS, ids=lambda adapter: adapter.name)
def test_any_history_of_appends_and_trims_is_a_list_without_its_beginning(
    adapter: Adapter, steps: list[tuple[str, int] | tuple[int, set[str]]]
) -> None:
    async def play(place: Path) -> None:
        log = await adapter.connect(place)
        model: list[RecordedEvent] = []
        last: dict[str, int] = {}
        first = 1
        for step in steps:
            match step:
                case (str(stream), int(count)):
                    version = last.get(stream, 0)
                    model += await log.append(stream, grown(*range(count)), version)
                    last[stream] = version + count
                case (int(through), set(streams)):
                    first = await trimmed(log, through, streams)
                    assert first <= max(through, 0) + 1 or first == 1 or through < first
                    left = {r.stream for r in model[first - 1 :]}
                    last = {s: v for s, v in last.items() if s in left or s in streams}
        assert [r async for r in log.read_all()] == model[first - 1 :]
        assert await log.head() == len(model)
        assert await log.first_position() == first
        for stream, version in last.items():
            with pytest.raises(VersionConflict) as conflict:
                await log.append(stream, grown(1), version + 1)
            assert conflict.value.actual == version
        await log.close()

    with TemporaryDirectory() as place:
        asyncio.run(play(Path(place)))
