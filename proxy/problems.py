"""Which HTTP status each error means, and how it is written: the only module that knows statuses.

Callers of the engine's API get the shape of the API they speak, OpenAI's or Anthropic's, so that every SDK
can show the message and knows what to do; callers of `/kv/v1` get an RFC 9457 problem. The engine's own
errors never pass through here: they are forwarded as they came.
"""

from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

import msgspec

from engine_bridge.errors import BridgeError, CacheUnavailable
from lifecycle.errors import (
    CorruptLog,
    InvalidObservation,
    LifecycleError,
    LogUnavailable,
    UnknownContext,
    VersionConflict,
)
from proxy.errors import (
    BodyTooLarge,
    ConnectFailed,
    Draining,
    EngineFull,
    FirstByteTimeout,
    Forbidden,
    InvalidRequest,
    MethodRefused,
    NoSuchPath,
    ProxyError,
    TooManyCalls,
    Unauthenticated,
    UpstreamBroken,
)

PROBLEM_TYPE_PREFIX = "urn:kvtether:problem:"
OPENAI_TYPE_PREFIX = "kvtether_"

ANTHROPIC_PATH = "/v1/messages"
_ANTHROPIC_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}

_KINDS: tuple[tuple[type[Exception], int, str], ...] = (
    (Unauthenticated, 401, "unauthenticated"),
    (Forbidden, 403, "forbidden"),
    (InvalidRequest, 400, "invalid_request"),
    (NoSuchPath, 404, "no_such_path"),
    (MethodRefused, 405, "method_not_allowed"),
    (BodyTooLarge, 413, "body_too_large"),
    (TooManyCalls, 429, "too_many_calls"),
    (Draining, 503, "draining"),
    (ConnectFailed, 502, "upstream_unreachable"),
    (EngineFull, 503, "upstream_full"),
    (FirstByteTimeout, 504, "upstream_timeout"),
    (UpstreamBroken, 502, "upstream_broken"),
    (InvalidObservation, 422, "invalid_observation"),
    (UnknownContext, 404, "unknown_context"),
    (VersionConflict, 409, "version_conflict"),
    (LogUnavailable, 503, "log_unavailable"),
    (CorruptLog, 500, "corrupt_log"),
    (CacheUnavailable, 503, "cache_unavailable"),
)
_RETRY_SOON = (Draining, EngineFull, LogUnavailable, TooManyCalls)
_RETRY_AFTER_SECONDS = b"1"


class ErrorResponse(msgspec.Struct, frozen=True):
    """A complete response that says what went wrong."""

    status: int
    headers: tuple[tuple[bytes, bytes], ...]
    body: bytes


def status_and_kind(error: Exception) -> tuple[int, str]:
    """The HTTP status of an error and its stable name; what we do not know is 500 `internal`."""
    for error_type, status, kind in _KINDS:
        if isinstance(error, error_type):
            return status, kind
    return 500, "internal"


def caller_error(error: Exception, path: str) -> ErrorResponse:
    """The error as the API of this path would write it."""
    spoken = path == ANTHROPIC_PATH or path.startswith(ANTHROPIC_PATH + "/")
    return anthropic_error(error) if spoken else openai_error(error)


def anthropic_error(error: Exception) -> ErrorResponse:
    """The error as the Anthropic API would write it: the type is one of theirs, for clients act on it."""
    status, _ = status_and_kind(error)
    kind = _ANTHROPIC_TYPES.get(status, "api_error")
    document = {"type": "error", "error": {"type": kind, "message": _message(error)}}
    return _response(status, b"application/json", msgspec.json.encode(document), error)


def openai_error(error: Exception) -> ErrorResponse:
    """The error as the OpenAI API would write it, with `type: "kvtether_<kind>"`."""
    status, kind = status_and_kind(error)
    document = {
        "error": {
            "message": _message(error),
            "type": OPENAI_TYPE_PREFIX + kind,
            "param": None,
            "code": status,
        }
    }
    return _response(status, b"application/json", msgspec.json.encode(document), error)


def problem(error: Exception, instance: str = "") -> ErrorResponse:
    """The error as an RFC 9457 problem; `instance` is the path it happened at."""
    status, kind = status_and_kind(error)
    document = {
        "type": PROBLEM_TYPE_PREFIX + kind,
        "title": kind.replace("_", " "),
        "status": status,
        "detail": _message(error),
    }
    if instance:
        document["instance"] = instance
    return _response(status, b"application/problem+json", msgspec.json.encode(document), error)


async def send_response(
    send: Callable[[MutableMapping[str, Any]], Awaitable[None]],
    response: ErrorResponse,
    *,
    close: bool = False,
) -> None:
    """Send it over ASGI. `close` ends the connection behind it: its framing cannot be trusted any more."""
    headers = list(response.headers)
    if close:
        headers.append((b"connection", b"close"))
    await send({"type": "http.response.start", "status": response.status, "headers": headers})
    await send({"type": "http.response.body", "body": response.body, "more_body": False})


def _message(error: Exception) -> str:
    if isinstance(error, ProxyError | LifecycleError | BridgeError):
        return str(error) or type(error).__name__
    return "internal error"


def _response(status: int, media_type: bytes, body: bytes, error: Exception) -> ErrorResponse:
    headers = [(b"content-type", media_type), (b"content-length", str(len(body)).encode())]
    if isinstance(error, Unauthenticated):
        headers.append((b"www-authenticate", b"Bearer"))
    if isinstance(error, _RETRY_SOON):
        headers.append((b"retry-after", _RETRY_AFTER_SECONDS))
    return ErrorResponse(status, tuple(headers), body)
