"""What the log promises about events: each type comes back as it was, and its wire form never drifts."""

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lifecycle.core import events
from lifecycle.core.namespace_events import LoggedEvent
from lifecycle.store.codec import decode, encode
from tests.lifecycle.core.event_examples import EVENT_TYPES, full, strategy, tag
from tests.lifecycle.core.golden_events import current_lines, golden_lines

by_type = pytest.mark.parametrize("event_type", EVENT_TYPES, ids=tag)


def test_every_event_type_is_in_the_union() -> None:
    declared = {
        member
        for member in vars(events).values()
        if isinstance(member, type) and issubclass(member, LoggedEvent) and member is not LoggedEvent
    }
    assert declared == set(EVENT_TYPES)


def test_tags_are_versioned_and_used_once() -> None:
    tags = [tag(event_type) for event_type in EVENT_TYPES]
    assert len(set(tags)) == len(tags)
    assert all(name.rpartition(".v")[2].isdecimal() for name in tags)


@by_type
@settings(max_examples=30, deadline=None)
@given(data=st.data())
def test_an_event_comes_back_as_it_was(event_type: type[Any], data: st.DataObject) -> None:
    event = data.draw(strategy(event_type))
    again = decode(encode(event))
    assert again == event
    assert type(again) is event_type
    assert encode(again) == encode(event)


@by_type
def test_an_event_cannot_be_changed(event_type: type[Any]) -> None:
    with pytest.raises(AttributeError):
        full(event_type).at_ns = 0


@by_type
def test_the_wire_form_is_the_golden_one(event_type: type[Any]) -> None:
    def of_type(lines: list[dict[str, Any]]) -> list[dict[str, Any]]:
        return sorted((line for line in lines if line["type"] == tag(event_type)), key=lambda x: x["example"])

    assert of_type(golden_lines()) == of_type(current_lines())


@pytest.mark.parametrize("line", golden_lines(), ids=lambda line: f"{line['type']} {line['example']}")
def test_every_golden_line_can_still_be_read(line: dict[str, Any]) -> None:
    assert decode(bytes.fromhex(line["payload"])).at_ns == line["event"]["at_ns"]
