"""Rows from events: pure, absolute, blind to repetition, and made for every type of event there is."""

import json
from datetime import UTC, datetime
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lifecycle.core.events import CallArrived, ContextCreated, PinSet, RecordedEvent
from lifecycle.core.ids import Namespace
from lifecycle.core.observations import MessageFact
from lifecycle.core.state import Version
from lifecycle.projections.read_rows import FORK_OF_UNKNOWN, KEYS, Change, changes, merged, moment
from lifecycle.vocabulary import IdentityRung
from tests.lifecycle.core.event_examples import EVENT_TYPES, full, least, strategy

AnyEvent = st.sampled_from(EVENT_TYPES).flatmap(strategy)


def recorded(event: Any, position: int = 7, stream: str = "ctx/uid") -> RecordedEvent:
    return RecordedEvent(stream, 1, position, event)


def after(written: list[Change]) -> dict[Any, dict[str, Any]]:
    """Tables as a database would hold them."""
    rows: dict[Any, dict[str, Any]] = {}
    for change in written:
        place = (change.table, change.key)
        if change.whole:
            rows[place] = dict(change.values)
        elif place in rows:
            rows[place] |= change.values
    return rows


@settings(max_examples=30)
@given(st.lists(AnyEvent, max_size=12))
def test_the_same_events_again_change_nothing(events: list[Any]) -> None:
    once = [c for n, e in enumerate(events) for c in changes(recorded(e, n))]
    assert after(once + once) == after(once)


@settings(max_examples=30)
@given(st.lists(AnyEvent, max_size=12), st.integers(0, 12))
def test_merged_changes_have_the_effect_of_all_in_their_order(events: list[Any], cut: int) -> None:
    written = [changes(recorded(e, n)) for n, e in enumerate(events)]
    head = merged(c for each in written[:cut] for c in each)
    tail = merged(c for each in written[cut:] for c in each)
    assert len({(c.table, c.key) for c in head}) == len(head)
    assert after(head + tail) == after([c for each in written for c in each])


@pytest.mark.parametrize("event_type", EVENT_TYPES, ids=lambda t: t.__name__)
def test_every_type_of_event_writes_whole_rows_or_columns_of_one(event_type: type[Any]) -> None:
    for event in (full(event_type), least(event_type)):
        for change in changes(recorded(event)):
            assert set(KEYS[change.table]) <= set(change.values)
            assert all(isinstance(v, str | int | datetime | None) for v in change.values.values())


def test_whole_rows_of_a_table_have_the_same_columns() -> None:
    columns: dict[str, set[frozenset[str]]] = {}
    for event_type in EVENT_TYPES:
        for event in (full(event_type), least(event_type)):
            for change in changes(recorded(event)):
                if change.whole:
                    columns.setdefault(change.table, set()).add(frozenset(change.values))
    assert {table: len(found) for table, found in columns.items()} == dict.fromkeys(KEYS, 1)


def test_digests_and_keys_stay_in_the_log() -> None:
    event = CallArrived(
        at_ns=1, call_id="c", attempt=1, kept=-1, head=b"DIGEST", messages=(MessageFact(b"DIGEST", "user"),)
    )
    assert "DIGEST" not in json.dumps([c.values for c in changes(recorded(event))], default=str)


@pytest.mark.parametrize(("end", "unmapped"), [(5, ""), (-1, FORK_OF_UNKNOWN)])
def test_a_fork_of_unknown_tokens_is_unmapped_from_its_beginning(end: int, unmapped: str) -> None:
    event = ContextCreated(
        at_ns=1,
        uid="uid",
        tenant="t",
        context_id="c",
        namespace=Namespace("m"),
        rung=IdentityRung.EXPLICIT,
        inherited=(Version(0, -1, -1, "head", b"", end=end),),
    )
    (change,) = changes(recorded(event))
    assert change.values["unmapped"] == unmapped


def test_text_that_a_database_cannot_hold_is_marked() -> None:
    event = CallArrived(at_ns=1, call_id="a\x00b", attempt=1, kept=-1)
    assert changes(recorded(event))[1].values["call_id"] == "a�b"


def test_a_renewed_pin_is_one_row() -> None:
    first, again = (PinSet(at_ns=n, pin_id="p", tip=1, index=0, until_ns=n * 10) for n in (1000, 2000))
    rows = after([*changes(recorded(first)), *changes(recorded(again, 8))])
    assert rows["kv_pins", ("p",)]["until_at"] == moment(20_000)


@given(st.integers(-(2**63), 2**63 - 1))
def test_every_recordable_time_is_a_time(at_ns: int) -> None:
    passed = moment(at_ns) - datetime(1970, 1, 1, tzinfo=UTC)
    assert (passed.days * 86_400 + passed.seconds) * 10**6 + passed.microseconds == at_ns // 1000
