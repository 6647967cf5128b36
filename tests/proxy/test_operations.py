"""Each entry becomes an operation of the core or a reason; a bad one never spoils the others."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lifecycle.core.observations import (
    AppendMessages,
    CloseContext,
    DeclareOutcome,
    DeclareResumed,
    DeclareWaiting,
    ForkContext,
    MarkOneOff,
    PinSpan,
    RemoveMessages,
    ReplaceMessages,
    SpawnContext,
    UnpinSpan,
)
from lifecycle.vocabulary import OutcomeResult, WaitKind
from proxy.errors import BodyTooLarge, InvalidRequest
from proxy.operations import OperationProblem, parse_operation_batch, parse_operation_list

BASE = {"seq": 1, "ctx": "c"}
GOOD: list[tuple[dict[str, Any], Any]] = [
    ({"op": "append", "n": 2}, AppendMessages(seq=1, ctx="c", n=2)),
    ({"op": "append", "ids": ["a", "b"]}, AppendMessages(seq=1, ctx="c", n=2)),
    ({"op": "replace", "span": [1, 3], "n": 1}, ReplaceMessages(seq=1, ctx="c", span=(1, 3), n=1)),
    ({"op": "replace", "span": [1, 3], "ids": []}, ReplaceMessages(seq=1, ctx="c", span=(1, 3), n=0)),
    ({"op": "replace", "span": [2, 2], "n": 1}, ReplaceMessages(seq=1, ctx="c", span=(2, 2), n=1)),
    ({"op": "remove", "span": [0, 1]}, RemoveMessages(seq=1, ctx="c", span=(0, 1))),
    ({"op": "fork", "parent": "p", "upto": 4}, ForkContext(seq=1, ctx="c", parent="p", upto=4)),
    ({"op": "fork", "parent": "p"}, ForkContext(seq=1, ctx="c", parent="p")),
    ({"op": "spawn"}, SpawnContext(seq=1, ctx="c")),
    ({"op": "spawn", "agent": "a", "flow": "f"}, SpawnContext(seq=1, ctx="c", agent="a", flow="f")),
    ({"op": "one_off"}, MarkOneOff(seq=1, ctx="c")),
    ({"op": "pin", "span": "system", "ttl": 60}, PinSpan(seq=1, ctx="c", span="system", ttl=60.0)),
    (
        {"op": "pin", "span": [0, 2], "ttl": 1.5, "priority": 3},
        PinSpan(seq=1, ctx="c", span=(0, 2), ttl=1.5, priority=3),
    ),
    ({"op": "unpin", "span": "tools"}, UnpinSpan(seq=1, ctx="c", span="tools")),
    (
        {"op": "waiting", "kind": "tool", "tool": "pytest", "eta": 20},
        DeclareWaiting(seq=1, ctx="c", kind=WaitKind.TOOL, tool="pytest", eta=20.0),
    ),
    (
        {"op": "outcome", "span": [1, 2], "result": "verified"},
        DeclareOutcome(seq=1, ctx="c", span=(1, 2), result=OutcomeResult.VERIFIED),
    ),
    ({"op": "resumed"}, DeclareResumed(seq=1, ctx="c")),
    ({"op": "close", "unknown_field": 1}, CloseContext(seq=1, ctx="c")),
]
BAD: list[Any] = [
    1,
    None,
    {},
    {"op": "explode"},
    {"op": "append"},
    {"op": "append", "n": "2"},
    {"op": "append", "n": -1},
    {"op": "append", "n": 3, "ids": ["a"]},
    {"op": "append", "ids": [1]},
    {"op": "remove", "span": [2, 2]},
    {"op": "replace", "span": [3, 2], "n": 1},
    {"op": "remove", "span": [-1, 2]},
    {"op": "remove", "span": [1]},
    {"op": "remove", "span": "system"},
    {"op": "pin", "span": "head"},
    {"op": "pin", "span": "1:2"},
    {"op": "pin", "span": [0, 1], "ttl": -1},
    {"op": "waiting", "kind": "decode"},
    {"op": "waiting", "kind": "nap"},
    {"op": "waiting", "kind": "tool", "eta": -0.5},
    {"op": "outcome", "span": [0, 1], "result": "great"},
    {"op": "fork"},
    {"op": "fork", "parent": "a/b"},
    {"op": "fork", "parent": "p", "agent": "a\n"},
    {"op": "waiting", "kind": "tool", "tool": ""},
    {"op": "close", "seq": 0},
    {"op": "close", "seq": True},
    {"op": "close", "seq": "1"},
    {"op": "close", "ctx": ""},
    {"op": "close", "ctx": "a/b"},
    {"op": "close", "ctx": "a\n"},
    {"op": "close", "ctx": "x" * 257},
]


@pytest.mark.parametrize(("entry", "operation"), GOOD)
def test_every_operation_of_the_table(entry: dict[str, Any], operation: Any) -> None:
    assert parse_operation_list([{**BASE, **entry}]) == [operation]


@given(st.permutations([*range(len(GOOD) + len(BAD))]))
def test_one_bad_entry_never_spoils_another(order: list[int]) -> None:
    entries = [{**BASE, **entry} for entry, _ in GOOD]
    entries += [{**BASE, **entry} if isinstance(entry, dict) else entry for entry in BAD]
    items = parse_operation_list([entries[i] for i in order])
    for position, (source, item) in enumerate(zip(order, items, strict=True)):
        if source < len(GOOD):
            assert item == GOOD[source][1]
        else:
            assert isinstance(item, OperationProblem)
            assert item.index == position
            assert item.reason


def test_a_problem_says_which_operation_it_was() -> None:
    (problem,) = parse_operation_list([{"op": "append", "seq": 7, "ctx": "c"}])
    assert isinstance(problem, OperationProblem)
    assert (problem.seq, problem.ctx) == (7, "c")


def test_entries_on_a_call_may_leave_the_context_out() -> None:
    assert parse_operation_list([{"op": "close", "seq": 1}], "d") == [CloseContext(seq=1, ctx="d")]


def test_a_batch() -> None:
    body = {"source": "sdk", "ops": [{"op": "close", **BASE}, {"op": "nonsense", **BASE}]}
    batch = parse_operation_batch(json.dumps(body).encode())
    assert batch.source == "sdk"
    assert batch.items[0] == CloseContext(seq=1, ctx="c")
    assert isinstance(batch.items[1], OperationProblem)


@pytest.mark.parametrize(
    "body",
    [b"", b"[]", b"{}", b'{"source":"","ops":[]}', b'{"source":"s","ops":{}}', b'{"ops":[]}', b"[" * 100_000],
)
def test_a_batch_that_cannot_be_read(body: bytes) -> None:
    with pytest.raises(InvalidRequest):
        parse_operation_batch(body)


def test_a_batch_that_is_too_large() -> None:
    with pytest.raises(BodyTooLarge):
        parse_operation_batch(b" " * (1024 * 1024 + 1))


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=4),
    lambda v: st.lists(v, max_size=3) | st.dictionaries(st.text(max_size=4), v, max_size=3),
)
NAMES = ("op", "seq", "ctx", "span", "n", "ids", "ttl", "kind", "parent", "upto", "eta", "result")


@given(st.lists(json_values | st.dictionaries(st.sampled_from(NAMES), json_values)))
def test_nothing_makes_the_parser_fail(entries: list[Any]) -> None:
    assert len(parse_operation_list(entries, "c")) == len(entries)
