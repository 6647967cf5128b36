"""Operations as they come over the wire: named by `op`, nothing extra needed."""

import msgspec
import pytest

from lifecycle.core.observations import (
    AppendMessages,
    CloseContext,
    DeclareOutcome,
    DeclareResumed,
    DeclareWaiting,
    ForkContext,
    MarkOneOff,
    Operation,
    PinSpan,
    RemoveMessages,
    ReplaceMessages,
    SpawnContext,
    UnpinSpan,
)
from lifecycle.vocabulary import OutcomeResult, WaitKind

WIRE = [
    ({"op": "append", "n": 2}, AppendMessages(seq=1, ctx="c", n=2)),
    ({"op": "replace", "span": [1, 3], "n": 1}, ReplaceMessages(seq=1, ctx="c", span=(1, 3), n=1)),
    ({"op": "remove", "span": [1, 3]}, RemoveMessages(seq=1, ctx="c", span=(1, 3))),
    ({"op": "fork", "parent": "p"}, ForkContext(seq=1, ctx="c", parent="p")),
    ({"op": "fork", "parent": "p", "upto": 4}, ForkContext(seq=1, ctx="c", parent="p", upto=4)),
    ({"op": "spawn"}, SpawnContext(seq=1, ctx="c")),
    ({"op": "one_off"}, MarkOneOff(seq=1, ctx="c")),
    ({"op": "pin", "span": "system", "ttl": 60}, PinSpan(seq=1, ctx="c", span="system", ttl=60.0)),
    ({"op": "unpin", "span": [0, 2]}, UnpinSpan(seq=1, ctx="c", span=(0, 2))),
    ({"op": "waiting", "kind": "tool"}, DeclareWaiting(seq=1, ctx="c", kind=WaitKind.TOOL)),
    (
        {"op": "outcome", "span": [0, 2], "result": "verified"},
        DeclareOutcome(seq=1, ctx="c", span=(0, 2), result=OutcomeResult.VERIFIED),
    ),
    ({"op": "resumed"}, DeclareResumed(seq=1, ctx="c")),
    ({"op": "close"}, CloseContext(seq=1, ctx="c")),
]


@pytest.mark.parametrize(("wire", "operation"), WIRE, ids=lambda x: x["op"] if isinstance(x, dict) else "")
def test_every_operation_has_its_wire_name(wire: dict[str, object], operation: Operation) -> None:
    sent = msgspec.json.encode({"seq": 1, "ctx": "c", **wire})
    assert msgspec.json.decode(sent, type=Operation) == operation
    assert msgspec.json.decode(msgspec.json.encode(operation), type=Operation) == operation


@pytest.mark.parametrize(
    "wire",
    [
        {"op": "rewind"},
        {"op": "append"},
        {"op": "replace", "span": [1, 2, 3], "n": 1},
        {"op": "waiting", "kind": "godot"},
    ],
)
def test_what_is_no_operation_is_refused(wire: dict[str, object]) -> None:
    with pytest.raises(msgspec.ValidationError):
        msgspec.json.decode(msgspec.json.encode({"seq": 1, "ctx": "c", **wire}), type=Operation)
