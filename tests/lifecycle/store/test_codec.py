"""Events as bytes: compact, checked, and never anything but an event or an error that names the culprit."""

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lifecycle.core import events
from lifecycle.errors import CorruptLog, InvalidObservation
from lifecycle.store.codec import check_stream, checksum, decode, encode, tag_of
from tests.lifecycle.core.event_examples import EVENT_TYPES, full, strategy

ANY_EVENT = st.one_of([strategy(event_type) for event_type in EVENT_TYPES])


def test_keys_cost_their_bytes_and_defaults_cost_nothing() -> None:
    keys = bytes(range(256)) * 4
    event = events.ChunksConfirmed(at_ns=1, namespace=full(events.Namespace), keys=keys, tiers=())
    assert keys in encode(event)
    assert len(encode(event)) < len(keys) + 200
    assert b"stored" not in encode(event)


def test_an_unknown_type_is_named() -> None:
    payload = msgspec.msgpack.encode({"type": "context_teleported.v7", "at_ns": 1})
    with pytest.raises(CorruptLog, match=r"context_teleported\.v7"):
        decode(payload)


def test_a_known_type_with_a_missing_field_is_named() -> None:
    payload = msgspec.msgpack.encode({"type": "branch_opened.v1", "at_ns": 1, "branch": 2})
    with pytest.raises(CorruptLog, match=r"branch_opened\.v1.*call_id"):
        decode(payload)


@settings(max_examples=300, deadline=None)
@given(
    st.one_of(
        st.binary(max_size=60),
        st.recursive(
            st.one_of(st.none(), st.integers(0, 2**64 - 1), st.text(max_size=5), st.binary(max_size=5)),
            lambda inner: st.one_of(
                st.lists(inner), st.dictionaries(st.sampled_from(["type", "at_ns", "x"]), inner)
            ),
            max_leaves=8,
        ).map(msgspec.msgpack.encode),
    )
)
def test_bytes_that_are_no_event_are_corrupt_and_nothing_else(payload: bytes) -> None:
    with pytest.raises(CorruptLog):
        decode(payload)


@settings(max_examples=200, deadline=None)
@given(ANY_EVENT, st.data())
def test_a_flipped_bit_never_passes_the_checksum(event: events.Event, data: st.DataObject) -> None:
    payload = encode(event)
    bit = data.draw(st.integers(0, len(payload) * 8 - 1))
    damaged = bytearray(payload)
    damaged[bit // 8] ^= 1 << (bit % 8)
    assert checksum("ctx/a", 1, bytes(damaged)) != checksum("ctx/a", 1, payload)


def test_the_checksum_knows_the_place() -> None:
    assert len({checksum(s, v, b"x") for s in ("ctx/a", "ctx/b", "1/ctx/a") for v in (1, 2, 11)}) == 9


@pytest.mark.parametrize(
    "event",
    [
        events.PrefillDone(at_ns=2**63, call_id="c", attempt=1),
        events.PrefillDone(at_ns=-(2**63) - 1, call_id="c", attempt=1),
        events.PrefillDone(at_ns=1, call_id="c", attempt=2**64),
        events.PrefillDone(at_ns=1, call_id="lone \ud800 surrogate", attempt=1),
    ],
    ids=["late", "early", "count", "text"],
)
def test_what_would_not_come_back_is_refused(event: events.Event) -> None:
    with pytest.raises(InvalidObservation, match=tag_of(event).replace(".", r"\.")):
        encode(event)


@pytest.mark.parametrize("name", ["", "ctx/\udc80"])
def test_a_stream_needs_a_name_in_unicode(name: str) -> None:
    with pytest.raises(InvalidObservation):
        check_stream(name)
