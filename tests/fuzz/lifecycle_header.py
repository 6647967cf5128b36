"""Lifecycle headers that nobody would write, read: `python -m tests.fuzz.lifecycle_header --seconds 60`.

Reading raises for no bytes, and what it lets through is of the kind that the key promises.
"""

import math
import re
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from lifecycle.vocabulary import WaitKind
from proxy.lifecycle_fields import MAX_NAME_LENGTH, LifecycleFields, read_lifecycle_fields
from proxy.operations import MAX_CONTEXT_LENGTH, MAX_MESSAGES, MAX_SEQ
from tests.fuzz.driver import run_for

KEYS = [
    "ctx",
    "call",
    "parent",
    "fork_at",
    "one_off",
    "pin",
    "unpin",
    "close",
    "agent",
    "flow",
    "waiting",
    "tool",
]
KEYS += ["eta", "source", "seq", "ops", "nonsense", "*", "a-b", "Ctx", ""]
NOT_FOR_HEADERS = re.compile(rb"[\x00-\x08\x0a-\x1f\x7f]")

texts = st.text(max_size=8) | st.sampled_from(
    ["a", "x" * 128, "x" * 129, "x" * 257, "a/b", "0:3", "3:0", "system"]
)
items = st.one_of(
    texts.map(lambda text: '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"'),
    st.integers(-(10**16), 10**16).map(str),
    st.floats(allow_nan=False, allow_infinity=False).map(lambda number: f"{number:.3f}"),
    st.sampled_from(
        ["?0", "?1", "?2", "tool", "human", "decode", ":aGk=:", ":a:", '%"a%c3%a9"', '%"%ff"', "", "-"]
    ),
    st.sampled_from(
        ["@0", "@-1", "@99999999999", "@999999999999999", "@-999999999999999", "1.", "1e5", "9" * 5000]
    ),
)
parameters = st.lists(
    st.tuples(st.sampled_from(["ttl", "a", "q"]), st.none() | items).map(
        lambda made: f";{made[0]}" + ("" if made[1] is None else f"={made[1]}")
    ),
    max_size=2,
).map("".join)
values = st.tuples(
    items
    | st.lists(st.tuples(items, parameters).map("".join), max_size=3).map(
        lambda inner: f"({' '.join(inner)})"
    ),
    parameters,
).map("".join)
members = st.tuples(st.sampled_from(KEYS), st.none() | values, parameters).map(
    lambda made: made[0] + (made[2] if made[1] is None else f"={made[1]}")
)
dictionaries = st.lists(members, max_size=5).map(lambda made: ", ".join(made).encode())
headers = st.lists(
    st.tuples(
        st.sampled_from(
            [b"x-kv-lifecycle", b"x-kv-session-id", b"x-kv-parent-session-id", b"x-kv-session-final"]
        ),
        dictionaries | st.binary(max_size=20) | texts.map(lambda text: text.encode("utf-8", "surrogatepass")),
    ),
    max_size=3,
)
json_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(st.characters(codec=None), max_size=4)
    | texts,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(["span", "ttl", "op", "seq", "ctx", "n"]), inner, max_size=3)
    ),
    max_leaves=6,
)
bodies = st.none() | json_values | st.dictionaries(st.sampled_from(KEYS) | st.text(max_size=3), json_values)


def is_well_formed(fields: LifecycleFields) -> None:
    for text, limit in (
        (fields.ctx, MAX_CONTEXT_LENGTH),
        (fields.parent, MAX_CONTEXT_LENGTH),
        (fields.agent, MAX_CONTEXT_LENGTH),
        (fields.flow, MAX_CONTEXT_LENGTH),
        (fields.tool, MAX_CONTEXT_LENGTH),
        (fields.call, MAX_NAME_LENGTH),
        (fields.source, MAX_NAME_LENGTH),
    ):
        assert isinstance(text, str)
        assert len(text) <= limit
        assert not NOT_FOR_HEADERS.search(text.encode())
    assert "/" not in fields.ctx + fields.parent
    for number in (fields.fork_at, fields.seq):
        assert number is None or (type(number) is int and 0 <= number <= MAX_SEQ)
    assert fields.eta is None or (type(fields.eta) is float and math.isfinite(fields.eta) and fields.eta >= 0)
    assert fields.waiting in (None, WaitKind.TOOL, WaitKind.HUMAN, WaitKind.SUBAGENT)
    assert type(fields.one_off) is bool
    assert type(fields.close) is bool
    for pin in fields.pins:
        assert pin.span in ("system", "tools") or 0 <= int(pin.span[0]) < int(pin.span[1]) <= MAX_MESSAGES
        assert pin.ttl is None or (math.isfinite(pin.ttl) and pin.ttl > 0)
    assert fields.fork_at is None or fields.parent
    assert fields.source or (fields.seq is None and not fields.ops)


@given(headers, bodies)
def only_well_formed_keys_pass(sent: list[tuple[bytes, bytes]], body_object: Any) -> None:
    """From header and body together; and what is said of the rest fits into a header."""
    fields = read_lifecycle_fields(sent, body_object)
    is_well_formed(fields)
    told = fields.error_header()
    assert len(told) <= 1024
    assert not NOT_FOR_HEADERS.search(told)
    assert bool(told) == bool(fields.errors)


@given(headers)
def headers_read_alike_every_time(sent: list[tuple[bytes, bytes]]) -> None:
    """Nothing is remembered from one call to the next."""
    assert read_lifecycle_fields(sent) == read_lifecycle_fields(sent)


PROPERTIES = [only_well_formed_keys_pass, headers_read_alike_every_time]

if __name__ == "__main__":
    run_for(PROPERTIES)
