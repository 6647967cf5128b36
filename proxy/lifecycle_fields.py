"""What a call says about its lifecycle: the header, the body object and the plain headers, typed.

Nothing malformed ever fails a call: it is ignored, key by key, and reported in words.
"""

import json
import re
from collections.abc import Callable, Mapping
from decimal import Decimal
from enum import StrEnum
from typing import Any

import http_sf
import msgspec

from lifecycle.core.observations import Operation, PinRequest, SpanName
from lifecycle.vocabulary import (
    LIFECYCLE_BODY_FIELD,
    LIFECYCLE_HEADER,
    PARENT_SESSION_HEADER,
    SESSION_FINAL_HEADER,
    SESSION_HEADER,
    WaitKind,
)
from proxy.engine_connection import Headers
from proxy.operations import (
    DECLARABLE_WAITS,
    MAX_CONTEXT_LENGTH,
    MAX_MESSAGES,
    MAX_SEQ,
    OperationProblem,
    is_context_id,
    is_label,
    parse_operation_list,
)

MAX_HEADER_BYTES = 4 * 1024
MAX_BODY_OPS_BYTES = 32 * 1024
MAX_NAME_LENGTH = 128

_SPAN = re.compile(r"(\d{1,9}):(\d{1,9})")
_SPAN_NAMES = frozenset({"system", "tools"})


class FieldOrigin(StrEnum):
    """Where the context's name came from; `none` when nothing was said."""

    HEADER = "header"
    BODY = "body"
    PLAIN_HEADER = "plain_header"
    NONE = "none"


class LifecycleFields(msgspec.Struct, frozen=True, kw_only=True):
    """Everything a call declared. Absent text is empty, absent numbers are None, spans are half-open.

    `pins` holds pins and unpins in the order given; `ttl` in seconds. `eta` in seconds from now. `origin`
    says who named `ctx`. `errors` are sentences for `x-kv-lifecycle-error`.
    """

    ctx: str = ""
    call: str = ""
    parent: str = ""
    fork_at: int | None = None
    one_off: bool = False
    pins: tuple[PinRequest, ...] = ()
    close: bool = False
    agent: str = ""
    flow: str = ""
    waiting: WaitKind | None = None
    tool: str = ""
    eta: float | None = None
    source: str = ""
    seq: int | None = None
    ops: tuple[Operation, ...] = ()
    origin: FieldOrigin = FieldOrigin.NONE
    errors: tuple[str, ...] = ()

    def error_header(self) -> bytes:
        """The errors as one header value of printable ASCII."""
        text = "; ".join(self.errors)
        return re.sub(r"[^\x20-\x7e]", "?", text).encode()[:1024]


def read_lifecycle_fields(headers: Headers, body_object: object = None) -> LifecycleFields:
    """Fields of one call; header names in lower case, `body_object` the decoded `kv_lifecycle`.

    Per key the header wins over the body, and both over the plain headers.
    """
    errors: list[str] = []
    raw = [value for name, value in headers if name == LIFECYCLE_HEADER.encode()]
    from_header = _header_keys(b", ".join(raw), errors) if raw else {}
    from_body = _body_keys(body_object, errors)
    plain = _plain_keys(headers)
    values: dict[str, Any] = {}
    for keys, where in (
        (plain, "header"),
        (from_body, LIFECYCLE_BODY_FIELD),
        (from_header, LIFECYCLE_HEADER),
    ):
        for name, value in keys.items():
            read = _READERS.get(name)
            if read is None:
                errors.append(f"{where}: unknown key {name[:64]!r}")
                continue
            try:
                values[name] = read(value)
            except ValueError as error:
                errors.append(f"{where}: {name}: {error}")
    values.pop("ops", None)
    pins = (*values.pop("pin", ()), *(_release(pin) for pin in values.pop("unpin", ())))
    ops = _operations(from_body.get("ops"), values.get("ctx", ""), errors)
    _check_together(values, bool(ops), errors)
    origin = _origin(values, from_header, from_body)
    if "source" not in values:
        ops = ()
    return LifecycleFields(**values, pins=pins, ops=ops, origin=origin, errors=tuple(errors))


def parse_span(text: str) -> SpanName:
    """A span `"i:j"` with 0 <= i < j, or the name of a part of the head. Raises `ValueError`."""
    if text in _SPAN_NAMES:
        return text
    match = _SPAN.fullmatch(text)
    if match is None or not int(match[1]) < int(match[2]) <= MAX_MESSAGES:
        raise ValueError('spans are "i:j" with i < j, "system" or "tools"')
    return int(match[1]), int(match[2])


def _header_keys(raw: bytes, errors: list[str]) -> dict[str, Any]:
    if len(raw) > MAX_HEADER_BYTES:
        errors.append(f"{LIFECYCLE_HEADER}: longer than {MAX_HEADER_BYTES} bytes")
        return {}
    try:
        parsed = http_sf.parse(raw, tltype="dictionary")
    except (http_sf.StructuredFieldError, ValueError):
        errors.append(f"{LIFECYCLE_HEADER}: not a structured dictionary")
        return {}
    assert isinstance(parsed, dict)
    return {name: _Structured(*item) for name, item in parsed.items()}  # type: ignore[misc]


def _body_keys(body_object: object, errors: list[str]) -> dict[str, Any]:
    if body_object is None:
        return {}
    if not isinstance(body_object, dict):
        errors.append(f"{LIFECYCLE_BODY_FIELD}: not an object")
        return {}
    return {str(name): value for name, value in body_object.items() if value is not None}


def _plain_keys(headers: Headers) -> dict[str, Any]:
    names = {
        SESSION_HEADER.encode(): "ctx",
        PARENT_SESSION_HEADER.encode(): "parent",
        SESSION_FINAL_HEADER.encode(): "close",
    }
    found: dict[str, Any] = {}
    for name, value in headers:
        key = names.get(name)
        if key == "close":
            found[key] = value.strip().lower() in (b"1", b"true", b"yes", b"?1")
        elif key is not None:
            found[key] = value.decode("utf-8", "replace").strip()
    return found


class _Structured(msgspec.Struct, frozen=True):
    """A dictionary member as `http_sf` gives it: a bare item, or a list of items, and parameters."""

    value: Any
    parameters: Mapping[str, Any]


def _bare(value: object) -> object:
    if isinstance(value, _Structured):
        value = value.value
    if isinstance(value, http_sf.Token | http_sf.DisplayString):
        return str(value)
    return float(value) if isinstance(value, Decimal) else value


def _text(limit: int) -> Callable[[object], str]:
    def read(value: object) -> str:
        value = _bare(value)
        if not isinstance(value, str) or not is_label(value, limit):
            raise ValueError(f"a string of 1 to {limit} printable characters")
        return value

    return read


def _context_id(value: object) -> str:
    value = _bare(value)
    if not isinstance(value, str) or not is_context_id(value):
        raise ValueError(f"1 to {MAX_CONTEXT_LENGTH} printable characters, without '/'")
    return value


def _integer(value: object) -> int:
    value = _bare(value)
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value <= MAX_SEQ:
        raise ValueError(f"an integer from 0 to {MAX_SEQ}")
    return value


def _flag(value: object) -> bool:
    value = _bare(value)
    if not isinstance(value, bool):
        raise ValueError("a boolean")
    return value


def _seconds(value: object) -> float:
    value = _bare(value)
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 <= value < float("inf"):
        raise ValueError("seconds from 0")
    return float(value)


def _wait_kind(value: object) -> WaitKind:
    value = _bare(value)
    if not isinstance(value, str) or value not in DECLARABLE_WAITS:
        raise ValueError("tool, human or subagent")
    return WaitKind(value)


def _pins(value: object) -> tuple[PinRequest, ...]:
    """Inner list of spans; `ttl` stands at the list or at a span. In a body: strings or `{span, ttl}`."""
    if isinstance(value, _Structured):
        if not isinstance(value.value, list):
            raise ValueError("an inner list of spans")
        shared = value.parameters.get("ttl")
        return tuple(
            PinRequest(_span(span), _ttl(parameters.get("ttl", shared))) for span, parameters in value.value
        )
    if not isinstance(value, list):
        raise ValueError("a list of spans")
    pins = []
    for entry in value:
        if isinstance(entry, dict):
            pins.append(PinRequest(_span(entry.get("span")), _ttl(entry.get("ttl"))))
        else:
            pins.append(PinRequest(_span(entry)))
    return tuple(pins)


def _span(value: object) -> SpanName:
    value = _bare(value)
    if isinstance(value, list) and len(value) == 2:
        value = f"{value[0]}:{value[1]}"
    if not isinstance(value, str):
        raise ValueError('spans are "i:j", "system" or "tools"')
    return parse_span(value)


def _ttl(value: object) -> float | None:
    if value is None:
        return None
    seconds = _seconds(value)
    if seconds == 0:
        raise ValueError("ttl is more than 0 seconds")
    return seconds


def _release(pin: PinRequest) -> PinRequest:
    return PinRequest(pin.span, release=True)


_READERS: Mapping[str, Callable[[object], Any]] = {
    "ctx": _context_id,
    "call": _text(MAX_NAME_LENGTH),
    "parent": _context_id,
    "fork_at": _integer,
    "one_off": _flag,
    "pin": _pins,
    "unpin": _pins,
    "close": _flag,
    "agent": _text(MAX_CONTEXT_LENGTH),
    "flow": _text(MAX_CONTEXT_LENGTH),
    "waiting": _wait_kind,
    "tool": _text(MAX_CONTEXT_LENGTH),
    "eta": _seconds,
    "source": _text(MAX_NAME_LENGTH),
    "seq": _integer,
    "ops": lambda value: value,
}


def _operations(raw: object, ctx: str, errors: list[str]) -> tuple[Operation, ...]:
    if raw is None:
        return ()
    where = f"{LIFECYCLE_BODY_FIELD}: ops"
    if not isinstance(raw, list):
        errors.append(f"{where}: not a list")
        return ()
    if len(json.dumps(raw)) > MAX_BODY_OPS_BYTES:
        errors.append(f"{where}: longer than {MAX_BODY_OPS_BYTES} bytes")
        return ()
    good: list[Operation] = []
    for item in parse_operation_list(raw, default_ctx=ctx):
        if isinstance(item, OperationProblem):
            errors.append(f"{where}[{item.index}]: {item.reason}")
        else:
            good.append(item)
    return tuple(good)


def _check_together(values: dict[str, Any], has_ops: bool, errors: list[str]) -> None:
    if "fork_at" in values and "parent" not in values:
        del values["fork_at"]
        errors.append("fork_at: nothing without parent")
    if "source" not in values and ("seq" in values or has_ops):
        values.pop("seq", None)
        errors.append("source: required with seq and ops")


def _origin(
    values: Mapping[str, Any], from_header: Mapping[str, Any], from_body: Mapping[str, Any]
) -> FieldOrigin:
    if "ctx" not in values:
        return FieldOrigin.NONE
    for keys, origin in ((from_header, FieldOrigin.HEADER), (from_body, FieldOrigin.BODY)):
        # a malformed one does not count: the next in line named the context
        if "ctx" in keys and _is_context_id(keys["ctx"]):
            return origin
    return FieldOrigin.PLAIN_HEADER


def _is_context_id(value: object) -> bool:
    try:
        _context_id(value)
    except ValueError:
        return False
    return True
