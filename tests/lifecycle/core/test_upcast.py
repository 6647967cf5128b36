"""Upcasting on invented steps: the mechanism is proven before the first event type changes its meaning."""

import msgspec
import pytest

from lifecycle.core.events import PrefillDone
from lifecycle.core.upcast import UPCASTS, RawEvent, upcast
from lifecycle.errors import CorruptLog
from lifecycle.store.codec import decode, encode
from tests.lifecycle.core.event_examples import EVENT_TYPES, tag


def milliseconds_to_nanoseconds(raw: RawEvent) -> RawEvent:
    rest = {name: value for name, value in raw.items() if name != "at_ms"}
    return {**rest, "type": "first_token.v2", "at_ns": raw["at_ms"] * 1_000_000}


def renamed(raw: RawEvent) -> RawEvent:
    return {**raw, "type": "prefill_done.v1", "attempt": raw.get("attempt", 1)}


STEPS = {"first_token.v1": milliseconds_to_nanoseconds, "first_token.v2": renamed}


@pytest.mark.parametrize(
    "raw",
    [
        {"type": "first_token.v1", "at_ms": 7, "call_id": "c"},
        {"type": "first_token.v2", "at_ns": 7_000_000, "call_id": "c"},
    ],
    ids=["two steps", "one step"],
)
def test_an_old_event_is_read_as_the_current_type(raw: RawEvent) -> None:
    payload = msgspec.msgpack.encode(raw)
    assert decode(payload, STEPS) == PrefillDone(at_ns=7_000_000, call_id="c", attempt=1)


def test_a_current_event_takes_no_step() -> None:
    event = PrefillDone(at_ns=1, call_id="c", attempt=3)
    assert decode(encode(event), STEPS) == event
    raw = {"type": "prefill_done.v1", "at_ns": 1}
    assert upcast(raw, STEPS) is raw


def test_the_recorded_mapping_is_left_alone() -> None:
    raw = {"type": "first_token.v1", "at_ms": 7, "call_id": "c"}
    upcast(raw, STEPS)
    assert raw == {"type": "first_token.v1", "at_ms": 7, "call_id": "c"}


def test_bytes_survive_the_steps() -> None:
    steps = {"chunks_lost.v1": lambda raw: {**raw, "type": "chunks_gone.v1"}}
    raw = {"type": "chunks_lost.v1", "at_ns": 1, "namespace": {"model": "m"}, "keys": b"\x00\xff" * 32}
    event = decode(msgspec.msgpack.encode(raw), steps)
    assert event.keys == b"\x00\xff" * 32  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("raw", "says"),
    [
        ({"type": "first_token.v2", "at_ns": 1}, r"first_token\.v2.*call_id"),
        ({"type": "first_token.v1", "call_id": "c"}, r"first_token\.v1.*at_ms"),
        ({"type": "first_token.v1", "at_ms": None, "call_id": "c"}, r"first_token\.v1"),
    ],
    ids=["misfit", "missing", "kind"],
)
def test_an_old_event_that_no_step_can_save_is_named(raw: RawEvent, says: str) -> None:
    with pytest.raises(CorruptLog, match=says):
        decode(msgspec.msgpack.encode(raw), STEPS)


def test_steps_that_run_in_a_circle_are_refused() -> None:
    circle = {
        "a.v1": lambda raw: {**raw, "type": "a.v2"},
        "a.v2": lambda raw: {**raw, "type": "a.v1"},
    }
    with pytest.raises(CorruptLog, match="lead back"):
        upcast({"type": "a.v1"}, circle)


def test_no_step_leads_away_from_a_current_type() -> None:
    assert not set(UPCASTS) & {tag(event_type) for event_type in EVENT_TYPES}
