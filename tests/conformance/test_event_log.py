"""The `EventLog` contract, on every adapter."""

import asyncio
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lifecycle.core.events import CallArrived, Event, ListGrown, RecordedEvent
from lifecycle.core.observations import MessageFact
from lifecycle.errors import InvalidObservation, LogUnavailable, VersionConflict
from lifecycle.ports import EventLog
from tests.conformance.event_log_adapters import ADAPTERS, Adapter, Connect, shared
from tests.lifecycle.core.event_examples import EVENT_TYPES, full


def grown(*counts: int) -> list[Event]:
    """Events that can be told apart by a number."""
    return [ListGrown(at_ns=1, num_new=n) for n in counts]


def numbers(recorded: Sequence[RecordedEvent]) -> list[int]:
    """The numbers of `grown`."""
    return [r.event.num_new for r in recorded if isinstance(r.event, ListGrown)]


async def stream_of(log: EventLog, stream: str, after_version: int = 0) -> list[RecordedEvent]:
    return [r async for r in log.read_stream(stream, after_version)]


async def all_of(log: EventLog, after_position: int = 0) -> list[RecordedEvent]:
    return [r async for r in log.read_all(after_position)]


async def test_a_new_log_is_empty(log: EventLog) -> None:
    assert await log.head() == 0
    assert await all_of(log) == []
    assert await stream_of(log, "ctx/never") == []


async def test_append_answers_with_what_a_reader_will_see(log: EventLog) -> None:
    recorded = await log.append("ctx/a", grown(10, 11), 0)
    assert [(r.stream, r.version, r.position) for r in recorded] == [("ctx/a", 1, 1), ("ctx/a", 2, 2)]
    assert numbers(recorded) == [10, 11]
    assert await stream_of(log, "ctx/a") == list(recorded) == await all_of(log)
    assert await log.head() == 2


async def test_every_event_type_comes_back_as_it_was(log: EventLog) -> None:
    events = [full(event_type) for event_type in EVENT_TYPES]
    await log.append("ctx/a", events, 0)
    assert [r.event for r in await stream_of(log, "ctx/a")] == events


async def test_versions_count_in_the_stream_and_positions_over_the_log(log: EventLog) -> None:
    await log.append("ctx/a", grown(1), 0)
    await log.append("ctx/b", grown(2, 3), 0)
    await log.append("ctx/a", grown(4), 1)
    assert [(r.stream, r.version, r.position) for r in await all_of(log)] == [
        ("ctx/a", 1, 1),
        ("ctx/b", 1, 2),
        ("ctx/b", 2, 3),
        ("ctx/a", 2, 4),
    ]


@pytest.mark.parametrize("expected", [-1, 0, 1, 3, 2**70])
async def test_another_version_than_the_last_is_a_conflict(log: EventLog, expected: int) -> None:
    before = await log.append("ctx/a", grown(1, 2), 0)
    with pytest.raises(VersionConflict) as conflict:
        await log.append("ctx/a", grown(3, 4), expected)
    error = conflict.value
    assert (error.stream, error.expected, error.actual) == ("ctx/a", expected, 2)
    assert await all_of(log) == list(before)
    assert numbers(await log.append("ctx/a", grown(5), 2)) == [5]


async def test_a_new_stream_has_version_0(log: EventLog) -> None:
    with pytest.raises(VersionConflict) as conflict:
        await log.append("ctx/new", grown(1), 1)
    assert conflict.value.actual == 0


async def test_an_empty_append_changes_nothing(log: EventLog) -> None:
    await log.append("ctx/a", grown(1), 0)
    assert list(await log.append("ctx/a", [], 1)) == []
    assert list(await log.append("ctx/b", [], 0)) == []
    assert await log.head() == 1


async def test_a_batch_with_one_unrecordable_event_lands_nothing(log: EventLog) -> None:
    with pytest.raises(InvalidObservation):
        await log.append("ctx/a", [*grown(1), ListGrown(at_ns=2**64, num_new=2)], 0)
    assert await log.head() == 0
    assert numbers(await log.append("ctx/a", grown(3), 0)) == [3]


async def test_reading_begins_in_the_middle(log: EventLog) -> None:
    await log.append("ctx/a", grown(1, 2, 3), 0)
    await log.append("ctx/b", grown(4), 0)
    assert numbers(await stream_of(log, "ctx/a", after_version=1)) == [2, 3]
    assert numbers(await stream_of(log, "ctx/a", after_version=3)) == []
    assert numbers(await stream_of(log, "ctx/a", after_version=99)) == []
    assert numbers(await all_of(log, after_position=2)) == [3, 4]
    assert numbers(await all_of(log, after_position=99)) == []


@pytest.mark.parametrize(
    "name",
    ["ctx/ünï/日本語/🧠", "a'; DROP TABLE events;--", "%_*?[", "line\nbreak", "nul\x00s", "  ", "n" * 5000],
)
async def test_stream_names_are_any_text(log: EventLog, name: str) -> None:
    await log.append(name, grown(1), 0)
    await log.append(name + "x", grown(2), 0)
    await log.append(name.upper() + "y", grown(3), 0)
    (recorded,) = await stream_of(log, name)
    assert (recorded.stream, numbers([recorded])) == (name, [1])


@pytest.mark.parametrize("name", ["", "ctx/\ud800"])
async def test_what_is_no_text_names_no_stream(log: EventLog, name: str) -> None:
    with pytest.raises(InvalidObservation):
        await log.append(name, grown(1), 0)
    assert await log.head() == 0


async def test_names_that_look_alike_are_two_streams(log: EventLog) -> None:
    names = ["ctx/é", "ctx/e\u0301", "CTX/é", "ctx/é "]
    for number, name in enumerate(names):
        await log.append(name, grown(number), 0)
    assert [numbers(await stream_of(log, name)) for name in names] == [[0], [1], [2], [3]]


async def test_a_big_batch_lands_whole_and_in_order(log: EventLog) -> None:
    messages = tuple(MessageFact(bytes([n]) * 16, "user") for n in range(200))
    big = CallArrived(at_ns=1, call_id="c", attempt=1, kept=-1, messages=messages)
    await log.append("ctx/big", [*grown(*range(3000)), big], 0)
    read = await stream_of(log, "ctx/big")
    assert numbers(read) == list(range(3000))
    assert read[-1].event == big
    assert numbers(await all_of(log, after_position=2990)) == list(range(2990, 3000))


async def test_appends_at_once_to_many_streams_all_land(log: EventLog) -> None:
    count = 700
    answers = await asyncio.gather(*(log.append(f"ctx/{n}", grown(n, n), 0) for n in range(count)))
    everything = await all_of(log)
    assert [r.position for r in everything] == list(range(1, 2 * count + 1))
    assert sorted((r for answer in answers for r in answer), key=lambda r: r.position) == everything
    for n in (0, count // 2, count - 1):
        assert numbers(await stream_of(log, f"ctx/{n}")) == [n, n]


async def test_of_appends_at_once_to_one_stream_one_wins(log: EventLog) -> None:
    attempts = [log.append("ctx/a", grown(n, n), 0) for n in range(20)]
    answers = await asyncio.gather(*attempts, return_exceptions=True)
    winners = [a for a in answers if not isinstance(a, BaseException)]
    losers = [a for a in answers if isinstance(a, VersionConflict)]
    assert (len(winners), len(losers)) == (1, 19)
    assert {loser.actual for loser in losers} == {2}
    assert await all_of(log) == list(winners[0])


async def test_a_conflict_leaves_its_neighbours_alone(log: EventLog) -> None:
    await log.append("ctx/a", grown(0), 0)
    answers = await asyncio.gather(
        log.append("ctx/b", grown(1), 0),
        log.append("ctx/a", grown(2), 0),
        log.append("ctx/c", grown(3), 0),
        log.append("ctx/a", grown(4), 1),
        return_exceptions=True,
    )
    assert [isinstance(a, VersionConflict) for a in answers] == [False, True, False, False]
    assert sorted(numbers(await all_of(log))) == [0, 1, 3, 4]


async def test_a_caller_that_leaves_disturbs_nobody(log: EventLog) -> None:
    async def leave_early(n: int, hops: int) -> None:
        task = asyncio.ensure_future(log.append(f"ctx/{n}", grown(n, n, n), 0))
        for _ in range(hops):
            await asyncio.sleep(0)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    stay = [log.append(f"stay/{n}", grown(1000 + n), 0) for n in range(10)]
    await asyncio.gather(*(leave_early(n, hops=n) for n in range(30)), *stay)
    await log.append("last", grown(2000), 0)
    for n in range(30):
        assert numbers(await stream_of(log, f"ctx/{n}")) in ([], [n, n, n])
    assert {1000 + n for n in range(10)} <= set(numbers(await all_of(log)))


async def test_a_reader_misses_nothing_while_others_append(log: EventLog) -> None:
    writers, each = 8, 25
    finished = asyncio.Event()

    async def write(n: int) -> None:
        for version in range(each):
            await log.append(f"ctx/{n}", grown(n * each + version), version)

    async def write_all() -> None:
        await asyncio.gather(*(write(n) for n in range(writers)))
        finished.set()

    async def follow() -> list[RecordedEvent]:
        seen: list[RecordedEvent] = []
        last_round = False
        while True:
            async for recorded in log.read_all(seen[-1].position if seen else 0):
                seen.append(recorded)
            if last_round:
                return seen
            last_round = finished.is_set()
            await asyncio.sleep(0)

    _, *followers = await asyncio.gather(write_all(), follow(), follow())
    for seen in followers:
        assert [r.position for r in seen] == list(range(1, writers * each + 1))
        assert seen == await all_of(log)


async def test_a_read_ends_at_what_was_there_when_it_began(log: EventLog) -> None:
    await log.append("ctx/a", grown(*range(600)), 0)
    for read in (log.read_all(), log.read_stream("ctx/a")):
        head = await log.head()
        seen = 0
        async for recorded in read:
            assert recorded.position <= head
            if seen % 200 == 0:
                await log.append("ctx/a", grown(-1), await log.head())
            seen += 1
        assert seen == head


async def test_an_abandoned_read_holds_nothing_up(log: EventLog) -> None:
    await log.append("ctx/a", grown(*range(600)), 0)
    reads = [log.read_all() for _ in range(50)]
    for read in reads:
        assert (await anext(read)).position == 1
    assert numbers(await log.append("ctx/a", grown(7), 600)) == [7]
    assert await log.head() == 601


async def test_a_reader_that_leaves_disturbs_nobody(log: EventLog) -> None:
    await log.append("ctx/a", grown(*range(600)), 0)

    async def leave_early(hops: int) -> None:
        task = asyncio.ensure_future(all_of(log))
        for _ in range(hops):
            await asyncio.sleep(0)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    await asyncio.gather(*(leave_early(hops) for hops in range(0, 60, 2)))
    assert numbers(await log.append("ctx/a", grown(7), 600)) == [7]
    assert len(await all_of(log)) == 601


async def test_a_closed_log_says_so(log: EventLog) -> None:
    await log.append("ctx/a", grown(1), 0)
    await log.close()
    await log.close()
    with pytest.raises(LogUnavailable):
        await log.append("ctx/a", grown(2), 1)
    with pytest.raises(LogUnavailable):
        await log.head()
    with pytest.raises(LogUnavailable):
        await all_of(log)


async def test_closing_lets_begun_appends_end(log: EventLog) -> None:
    begun = [asyncio.ensure_future(log.append(f"ctx/{n}", grown(n), 0)) for n in range(5)]
    await asyncio.sleep(0)
    await log.close()
    for answer in await asyncio.gather(*begun, return_exceptions=True):
        assert isinstance(answer, LogUnavailable) or numbers(answer)  # type: ignore[arg-type]


@shared
async def test_a_restart_sees_everything(log: EventLog, connect: Connect) -> None:
    await log.append("ctx/a", [full(event_type) for event_type in EVENT_TYPES], 0)
    await log.append("ctx/b", grown(1), 0)
    before = await all_of(log)
    await log.close()
    again = await connect()
    assert await all_of(again) == before
    (recorded,) = await again.append("ctx/b", grown(2), 1)
    assert recorded.position == len(before) + 1


@shared
async def test_two_connections_race_and_one_wins_each_version(log: EventLog, connect: Connect) -> None:
    other = await connect()
    wins: list[RecordedEvent] = []

    async def compete(through: EventLog, number: int) -> None:
        version = 0
        while version < 40:
            try:
                recorded = await through.append("ctx/a", grown(number, number), version)
            except VersionConflict as conflict:
                version = conflict.actual
            else:
                wins.extend(recorded)
                version = recorded[-1].version

    await asyncio.gather(*(compete(through, n) for n, through in enumerate((log, other) * 3)))
    seen = await stream_of(other, "ctx/a")
    assert seen == sorted(wins, key=lambda r: r.version) == await stream_of(log, "ctx/a")
    assert [r.version for r in seen] == list(range(1, len(seen) + 1))
    assert all(first == second for first, second in zip(numbers(seen)[::2], numbers(seen)[1::2], strict=True))


@shared
async def test_one_connection_sees_at_once_what_the_other_appended(log: EventLog, connect: Connect) -> None:
    other = await connect()
    for version in range(0, 20, 2):
        await log.append("ctx/a", grown(version), version)
        assert await other.head() == version + 1
        await other.append("ctx/a", grown(version + 1), version + 1)
        assert numbers(await stream_of(log, "ctx/a")) == list(range(version + 2))


STREAMS = st.sampled_from(["ctx/a", "ctx/b", "ns/m//"])
ATTEMPTS = st.lists(
    st.tuples(STREAMS, st.lists(st.sampled_from(EVENT_TYPES), max_size=4), st.integers(-1, 1)), max_size=8
)


@settings(max_examples=40, deadline=None)
@given(rounds=st.lists(ATTEMPTS, max_size=4))
@pytest.mark.parametrize("adapter", ADAPTERS, ids=lambda adapter: adapter.name)
def test_any_history_is_what_a_dictionary_would_hold(
    adapter: Adapter, rounds: list[list[tuple[str, list[type[Event]], int]]]
) -> None:
    """Rounds of appends at once, each aimed at the version it believes in, often wrongly."""

    async def play(place: Path) -> None:
        log = await adapter.connect(place)
        model: dict[str, list[Event]] = {}
        order: list[Event] = []
        for attempts in rounds:
            calls, accepted = [], []
            for stream, event_types, error in attempts:
                events = [full(event_type, seed=len(order) + 1) for event_type in event_types]
                known = model.setdefault(stream, [])
                calls.append(log.append(stream, events, len(known) + error))
                accepted.append(not events or error == 0)
                if accepted[-1]:
                    known.extend(events)
                    order.extend(events)
            answers = await asyncio.gather(*calls, return_exceptions=True)
            assert [not isinstance(answer, VersionConflict) for answer in answers] == accepted
        assert [r.event for r in await all_of(log)] == order
        for stream, events in model.items():
            assert [r.event for r in await stream_of(log, stream)] == events
        await log.close()

    with TemporaryDirectory() as place:
        asyncio.run(play(Path(place)))
