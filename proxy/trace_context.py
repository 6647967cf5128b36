"""The `traceparent` header of the W3C's Trace Context: read, and written in place of the client's."""

import re

import msgspec

from proxy.engine_connection import Headers

TRACEPARENT = b"traceparent"
SAMPLED = 0x01

_FORM = re.compile(rb"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?", re.DOTALL)


class TraceParent(msgspec.Struct, frozen=True):
    """A place in a trace: neither id is 0."""

    trace_id: int
    span_id: int
    flags: int

    def header(self) -> bytes:
        """As it is written, in version 00."""
        return b"00-%032x-%016x-%02x" % (self.trace_id, self.span_id, self.flags)


def read_traceparent(value: bytes) -> TraceParent | None:
    """What the header says, also in a later version; None if it is not well-formed."""
    found = _FORM.fullmatch(value.strip(b" \t"))
    if found is None or found[1] == b"ff" or (found[1] == b"00" and found[5] is not None):
        return None
    trace_id, span_id = int(found[2], 16), int(found[3], 16)
    return TraceParent(trace_id, span_id, int(found[4], 16)) if trace_id and span_id else None


def traceparents(headers: Headers) -> list[bytes]:
    """Every value of the header."""
    return [value for name, value in headers if name == TRACEPARENT]


def with_traceparent(headers: Headers, parent: TraceParent) -> list[tuple[bytes, bytes]]:
    """The headers with this one: where the client's stood, or behind the others. Nothing else changes."""
    if not traceparents(headers):
        return [*headers, (TRACEPARENT, parent.header())]
    return [(name, parent.header() if name == TRACEPARENT else value) for name, value in headers]
