"""Declared operations as clients write them, turned into the core's own: one verdict each, the rest goes
on."""

import json
from collections.abc import Sequence
from typing import Any

import msgspec

from lifecycle.core.observations import DeclareWaiting, Operation
from lifecycle.vocabulary import WaitKind
from proxy.errors import BodyTooLarge, InvalidRequest

MAX_OPS_BYTES = 1024 * 1024
MAX_SOURCE_LENGTH = 128
MAX_CONTEXT_LENGTH = 256
MAX_SPAN_INDEX = 1 << 31

DECLARABLE_WAITS = frozenset({WaitKind.TOOL, WaitKind.HUMAN, WaitKind.SUBAGENT})
"""What a client may say it waits for; the other kinds are our own conclusions."""

_SPAN_NAMES = ("system", "tools")


class OperationProblem(msgspec.Struct, frozen=True):
    """Why entry `index` of a list was rejected; `seq` and `ctx` as far as they could be read."""

    index: int
    reason: str
    seq: int | None = None
    ctx: str = ""


class OperationBatch(msgspec.Struct, frozen=True):
    """The body of an operations request: who numbers them, and each entry's operation or problem, in
    order."""

    source: str
    items: tuple[Operation | OperationProblem, ...]


def parse_operation_batch(body: bytes) -> OperationBatch:
    """`{"source": …, "ops": […]}`. Raises `BodyTooLarge`, or `InvalidRequest` if no entry can be read at
    all."""
    if len(body) > MAX_OPS_BYTES:
        raise BodyTooLarge(f"operations are limited to {MAX_OPS_BYTES} bytes a request")
    try:
        document = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise InvalidRequest("the body is no JSON") from error
    if not isinstance(document, dict):
        raise InvalidRequest("the body is no object")
    source, ops = document.get("source"), document.get("ops")
    if not isinstance(source, str) or not 0 < len(source) <= MAX_SOURCE_LENGTH:
        raise InvalidRequest(f"source is a string of 1 to {MAX_SOURCE_LENGTH} characters")
    if not isinstance(ops, list):
        raise InvalidRequest("ops is a list")
    return OperationBatch(source, tuple(parse_operation_list(ops)))


def parse_operation_list(
    entries: Sequence[object], default_ctx: str = ""
) -> list[Operation | OperationProblem]:
    """Each entry by itself. `default_ctx` stands in for entries that name no context."""
    return [_parse(index, entry, default_ctx) for index, entry in enumerate(entries)]


def _parse(index: int, entry: object, default_ctx: str) -> Operation | OperationProblem:
    if not isinstance(entry, dict):
        return OperationProblem(index, "not an object")
    fields = dict(entry)
    if default_ctx:
        fields.setdefault("ctx", default_ctx)
    seq, ctx = fields.get("seq"), fields.get("ctx")
    known_seq = seq if isinstance(seq, int) and not isinstance(seq, bool) else None
    known_ctx = ctx if isinstance(ctx, str) else ""
    try:
        _fold_ids(fields)
        operation: Operation = msgspec.convert(fields, type=Operation)
        _check(operation)
    except (msgspec.ValidationError, ValueError) as error:
        return OperationProblem(index, str(error), known_seq, known_ctx)
    return operation


def _fold_ids(fields: dict[str, Any]) -> None:
    """`ids` name new messages; the core only counts them."""
    ids = fields.pop("ids", None)
    if ids is None:
        return
    if not isinstance(ids, list) or not all(isinstance(entry, str) for entry in ids):
        raise ValueError("ids is a list of strings")
    if fields.setdefault("n", len(ids)) != len(ids):
        raise ValueError("n is not the number of ids")


def _check(operation: Operation) -> None:
    if operation.seq < 1:
        raise ValueError("seq counts from 1")
    for name in ("ctx", "parent"):
        value = getattr(operation, name, None)
        if value is not None and not is_context_id(value):
            raise ValueError(f"{name} is no context id")
    if isinstance(operation, DeclareWaiting) and operation.kind not in DECLARABLE_WAITS:
        raise ValueError("kind is tool, human or subagent")
    span = getattr(operation, "span", None)
    if isinstance(span, str):
        if span not in _SPAN_NAMES:
            raise ValueError('span is [i, j], "system" or "tools"')
    elif span is not None and not 0 <= span[0] < span[1] <= MAX_SPAN_INDEX:
        raise ValueError("span is [i, j] with 0 <= i < j")
    for name in ("n", "upto", "eta", "ttl"):
        value = getattr(operation, name, None)
        if value is not None and not 0 <= value < float("inf"):
            raise ValueError(f"{name} is not negative and not endless")


def is_context_id(text: str) -> bool:
    """Whether a text may name a context: 1 to 256 characters, no control characters, no `/`."""
    return 0 < len(text) <= MAX_CONTEXT_LENGTH and "/" not in text and all(c.isprintable() for c in text)
