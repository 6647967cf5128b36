"""The header is read as the W3C wrote it, and written where it stood."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.trace_context import TraceParent, read_traceparent, with_traceparent

TRACE, SPAN = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"

places = st.builds(TraceParent, st.integers(1, 2**128 - 1), st.integers(1, 2**64 - 1), st.integers(0, 255))


@given(places)
def test_what_is_written_is_read(place: TraceParent) -> None:
    assert read_traceparent(place.header()) == place


@pytest.mark.parametrize(
    "value", [f"00-{TRACE}-{SPAN}-01", f" 00-{TRACE}-{SPAN}-03\t", f"cc-{TRACE}-{SPAN}-01-new"]
)
def test_well_formed_ones_are_read_also_of_a_later_version(value: str) -> None:
    found = read_traceparent(value.encode())
    assert found is not None
    assert (f"{found.trace_id:032x}", f"{found.span_id:016x}") == (TRACE, SPAN)


@pytest.mark.parametrize(
    "value",
    [
        "",
        "garbage",
        f"ff-{TRACE}-{SPAN}-01",
        f"00-{TRACE}-{SPAN}-01-more",
        f"00-{TRACE}-{SPAN}",
        f"00-{TRACE.upper()}-{SPAN}-01",
        f"00-{'0' * 32}-{SPAN}-01",
        f"00-{TRACE}-{'0' * 16}-01",
        f"cc-{TRACE}-{SPAN}-01more",
    ],
)
def test_others_are_none(value: str) -> None:
    assert read_traceparent(value.encode()) is None


@given(st.binary(max_size=80))
def test_nothing_that_comes_breaks_the_reader(value: bytes) -> None:
    read_traceparent(value)


@given(st.lists(st.tuples(st.sampled_from([b"a", b"tracestate", b"baggage"]), st.binary(max_size=5))), places)
def test_other_headers_keep_bytes_and_order(headers: list[tuple[bytes, bytes]], place: TraceParent) -> None:
    written = with_traceparent(headers, place)
    assert written == [*headers, (b"traceparent", place.header())]
    middle = [*headers, (b"traceparent", b"00-old"), *headers]
    assert with_traceparent(middle, place) == [*headers, (b"traceparent", place.header()), *headers]
