"""What a call declares, in each of its three places; nothing malformed fails it."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lifecycle.core.observations import AppendMessages, PinRequest
from lifecycle.vocabulary import WaitKind
from proxy.lifecycle_fields import FieldOrigin, LifecycleFields, read_lifecycle_fields


def header(*values: str) -> list[tuple[bytes, bytes]]:
    return [(b"x-kv-lifecycle", value.encode()) for value in values]


def test_nothing_said() -> None:
    assert read_lifecycle_fields([(b"x-other", b"1")]) == LifecycleFields()


def test_every_key_of_the_header() -> None:
    fields = read_lifecycle_fields(
        header(
            'ctx="run-7:sub-2", call="c-18", parent="run-7:main", fork_at=12, one_off, close=?1',
            'pin=("0:3" "system";ttl=9);ttl=60, unpin=("tools"), agent="tester", flow="run-7"',
            'waiting=tool, tool="pytest", eta=20.5, source="sdk", seq=42',
        )
    )
    assert fields == LifecycleFields(
        ctx="run-7:sub-2",
        call="c-18",
        parent="run-7:main",
        fork_at=12,
        one_off=True,
        close=True,
        pins=(PinRequest((0, 3), 60.0), PinRequest("system", 9.0), PinRequest("tools", release=True)),
        agent="tester",
        flow="run-7",
        waiting=WaitKind.TOOL,
        tool="pytest",
        eta=20.5,
        source="sdk",
        seq=42,
        origin=FieldOrigin.HEADER,
    )


def test_every_key_of_the_body() -> None:
    fields = read_lifecycle_fields(
        [],
        {
            "ctx": "c",
            "parent": "p",
            "fork_at": 0,
            "one_off": False,
            "pin": ["0:3", {"span": [1, 2], "ttl": 5}],
            "unpin": ["system"],
            "waiting": "human",
            "eta": 3,
            "source": "sdk",
            "seq": 0,
            "ops": [{"op": "append", "seq": 1, "n": 2}, {"op": "append", "seq": 2, "ctx": "d", "n": 1}],
            "agent": None,
        },
    )
    assert fields == LifecycleFields(
        ctx="c",
        parent="p",
        fork_at=0,
        pins=(PinRequest((0, 3)), PinRequest((1, 2), 5.0), PinRequest("system", release=True)),
        waiting=WaitKind.HUMAN,
        eta=3.0,
        source="sdk",
        seq=0,
        ops=(AppendMessages(seq=1, ctx="c", n=2), AppendMessages(seq=2, ctx="d", n=1)),
        origin=FieldOrigin.BODY,
    )


def test_the_header_wins_key_by_key() -> None:
    plain = [(b"x-kv-session-id", b"s"), (b"x-kv-parent-session-id", b"sp"), (b"x-kv-session-final", b"true")]
    fields = read_lifecycle_fields([*plain, *header('ctx="h"')], {"ctx": "b", "agent": "a"})
    assert (fields.ctx, fields.agent, fields.parent, fields.close) == ("h", "a", "sp", True)
    assert fields.origin is FieldOrigin.HEADER
    assert read_lifecycle_fields(plain, {"ctx": "b"}).ctx == "b"
    alone = read_lifecycle_fields(plain)
    assert (alone.ctx, alone.origin) == ("s", FieldOrigin.PLAIN_HEADER)


def test_a_malformed_name_gives_way_to_the_next() -> None:
    fields = read_lifecycle_fields([(b"x-kv-session-id", b"s"), *header('ctx="a/b"')], {"ctx": 1})
    assert (fields.ctx, fields.origin) == ("s", FieldOrigin.PLAIN_HEADER)
    assert len(fields.errors) == 2


MALFORMED = [
    'ctx=""',
    "ctx=7",
    'ctx="a/b"',
    'ctx="%s"' % ("x" * 257),
    'call="%s"' % ("x" * 129),
    "fork_at=-1",
    'fork_at="1"',
    "fork_at=1",
    "one_off=1",
    "pin=system",
    'pin=("3:1")',
    'pin=("a:b")',
    'pin=("1:2");ttl=-1',
    'pin=("1:2");ttl=0',
    "waiting=decode",
    "waiting=nap",
    "eta=-1",
    "eta=?1",
    "seq=1",
    "nonsense=1",
]


@pytest.mark.parametrize("value", MALFORMED)
def test_a_malformed_value_is_ignored_and_told(value: str) -> None:
    fields = read_lifecycle_fields(header(f'agent="a", {value}'))
    assert fields.agent == "a"
    assert len(fields.errors) == 1
    assert fields == LifecycleFields(agent="a", errors=fields.errors)


@pytest.mark.parametrize("value", ['ctx="a', "ctx=é", "Ctx=1", "ctx==", 'ctx="a", "', "x" * 5000])
def test_a_header_that_is_no_dictionary(value: str) -> None:
    fields = read_lifecycle_fields(header(value))
    assert fields == LifecycleFields(errors=fields.errors)
    assert len(fields.errors) == 1


def test_operations_need_a_source_and_room() -> None:
    op = {"op": "append", "seq": 1, "n": 1}
    without = read_lifecycle_fields([], {"ctx": "c", "ops": [op]})
    assert (without.ops, len(without.errors)) == ((), 1)
    large = read_lifecycle_fields([], {"ctx": "c", "source": "s", "ops": [op] * 2000})
    assert (large.ops, len(large.errors)) == ((), 1)
    mixed = read_lifecycle_fields([], {"ctx": "c", "source": "s", "ops": [{"op": "x"}, op]})
    assert mixed.ops == (AppendMessages(seq=1, ctx="c", n=1),)
    assert len(mixed.errors) == 1


@pytest.mark.parametrize(
    "op",
    [
        "\ud800",
        {"op": "\ud800"},
        {"op": "close", "seq": 1, "ctx": "\ud800"},
        {"op": "waiting", "kind": "tool", "tool": "\ud800", "seq": 1},
        {"op": "append", "seq": 10**30, "n": 1},
        {"op": "append", "seq": 1, "n": 10**12},
    ],
)
def test_what_no_log_could_hold_is_rejected(op: Any) -> None:
    fields = read_lifecycle_fields([], {"ctx": "c", "source": "s", "agent": "\ud800", "ops": [op]})
    assert (fields.ops, fields.agent, len(fields.errors)) == ((), "", 2)


def test_errors_fit_into_a_header() -> None:
    value = read_lifecycle_fields([], {"é\r\n" * 2000: 1, "ctx": "é/"}).error_header()
    assert value
    assert len(value) <= 1024
    assert all(0x20 <= byte < 0x7F for byte in value)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(st.characters(codec=None), max_size=5),
    lambda v: st.lists(v, max_size=3) | st.dictionaries(st.text(max_size=5), v, max_size=3),
)
KEYS = (
    "ctx",
    "call",
    "parent",
    "fork_at",
    "one_off",
    "pin",
    "unpin",
    "close",
    "waiting",
    "eta",
    "seq",
    "ops",
)

names_of_ops = st.sampled_from(("op", "seq", "ctx", "n", "span", "tool", "kind"))
declarations = st.fixed_dictionaries(
    {
        "source": st.just("s"),
        "ops": st.lists(json_values | st.dictionaries(names_of_ops, json_values), max_size=3),
    },
    optional={key: json_values for key in KEYS if key != "ops"},
)


@given(st.binary(), json_values | declarations)
def test_nothing_a_client_sends_fails_its_call(raw: bytes, body_object: Any) -> None:
    names = (b"x-kv-lifecycle", b"x-kv-session-id", b"x-kv-parent-session-id", b"x-kv-session-final")
    fields = read_lifecycle_fields([(name, raw) for name in names], body_object)
    fields.error_header()
    assert "/" not in fields.ctx


@given(st.lists(st.sampled_from([*MALFORMED, 'ctx="c"', 'pin=("1:2");ttl=3', "close"])))
def test_any_mixture_reads_its_good_parts(parts: list[str]) -> None:
    fields = read_lifecycle_fields(header(*parts))
    last = [part for part in parts if part.startswith("close")]
    assert fields.close is bool(last)
