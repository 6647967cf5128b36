"""Declared operations as clients write them, turned into the core's own: one verdict each, the rest goes
on."""

import json
from collections.abc import Sequence
from typing import Any

import msgspec

from lifecycle.core.observations import DeclareWaiting, Operation, ReplaceMessages
from lifecycle.vocabulary import WaitKind
from proxy.errors import BodyTooLarge, InvalidRequest

MAX_OPS_BYTES = 1024 * 1024
MAX_SOURCE_LENGTH = 128
MAX_CONTEXT_LENGTH = 256
MAX_LABEL_LENGTH = 256
MAX_MESSAGES = 1 << 20
"""Most messages an operation may speak of; far beyond any list that fits into a context."""
MAX_SEQ = 10**15 - 1
"""Largest integer of a structured header field."""

DECLARABLE_WAITS = frozenset({WaitKind.TOOL, WaitKind.HUMAN, WaitKind.SUBAGENT})
"""What a client may say it waits for; the other kinds are our own conclusions."""

_SPAN_NAMES = ("system", "tools")
_YEAR_SECONDS = 366 * 24 * 3600
_LIMITS = {"n": MAX_MESSAGES, "upto": MAX_MESSAGES, "eta": _YEAR_SECONDS, "ttl": _YEAR_SECONDS}


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
    if not isinstance(source, str) or not is_label(source, MAX_SOURCE_LENGTH):
        raise InvalidRequest(f"source is a string of 1 to {MAX_SOURCE_LENGTH} printable characters")
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
    if not 1 <= operation.seq <= MAX_SEQ:
        raise ValueError(f"seq counts from 1 to {MAX_SEQ}")
    for name in ("ctx", "parent"):
        value = getattr(operation, name, None)
        if value is not None and not is_context_id(value):
            raise ValueError(f"{name} is no context id")
    if isinstance(operation, DeclareWaiting) and operation.kind not in DECLARABLE_WAITS:
        raise ValueError("kind is tool, human or subagent")
    for name in ("tool", "agent", "flow"):
        value = getattr(operation, name, None)
        if value is not None and not is_label(value, MAX_LABEL_LENGTH):
            raise ValueError(f"{name} is 1 to {MAX_LABEL_LENGTH} printable characters")
    span = getattr(operation, "span", None)
    if isinstance(span, str):
        if span not in _SPAN_NAMES:
            raise ValueError('span is [i, j], "system" or "tools"')
    elif span is not None:
        # An empty span says where: only putting messages in needs no messages to be there.
        shortest = 0 if isinstance(operation, ReplaceMessages) else 1
        if not (0 <= span[0] <= MAX_MESSAGES and span[0] + shortest <= span[1] <= MAX_MESSAGES):
            raise ValueError("span is [i, j] with 0 <= i < j")
    for name, limit in _LIMITS.items():
        value = getattr(operation, name, None)
        if value is not None and not 0 <= value <= limit:
            raise ValueError(f"{name} is from 0 to {limit}")


def is_context_id(text: str) -> bool:
    """Whether a text may name a context: 1 to 256 printable characters, no `/`."""
    return is_label(text, MAX_CONTEXT_LENGTH) and "/" not in text


def is_label(text: str, max_length: int) -> bool:
    """Whether a text has 1 to `max_length` characters, all printable: no control characters, no
    surrogates."""
    return 0 < len(text) <= max_length and text.isprintable()
