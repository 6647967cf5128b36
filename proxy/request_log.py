"""Around the data listener: each request has an id, and one line in the log when it is over."""

import time
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any, TypeAlias

import structlog

from lifecycle.ports import IdSource
from lifecycle.vocabulary import CallEnd
from proxy.forward import Send
from proxy.request_body import Receive, Scope
from proxy.request_metrics import OTHER_API, RequestMetrics, api_of
from proxy.request_record import REQUEST_ID_HEADER, UNEXPECTED, RequestRecord, given_id, run_for
from proxy.tracing import Tracing

log = structlog.get_logger(__name__)

App: TypeAlias = Callable[[Scope, Receive, Send], Awaitable[None]]

MAX_SHOWN = 200
"""Characters of what a client chose that go into a line."""

_SERVER_ERROR = 500


class RequestLog:
    """Pure ASGI. The id is the client's `x-request-id` if it is well-formed, or one of ours.

    The client reads it in `x-request-id` on answers of our own and on those that carry headers of ours
    anyway, unless the engine gave one: the engine's passes as it is. Towards the engine nothing is added.
    """

    def __init__(
        self, app: App, metrics: RequestMetrics, ids: IdSource, tracing: Tracing | None = None
    ) -> None:
        self._app = app
        self._metrics = metrics
        self._ids = ids
        self._tracing = tracing

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """One request, its answer, and its line."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        request_id = given_id(scope["headers"]) or self._ids.new("req")
        record = RequestRecord(request_id, scope["method"], scope["path"])
        run_for(record)
        if self._tracing is not None:
            self._tracing.begin(record, scope["headers"])

        async def answer(message: MutableMapping[str, Any]) -> None:
            if message["type"] == "http.response.start":
                _note_answer(record, message)
            await send(message)

        try:
            await self._app(scope, receive, answer)
            record.outcome = record.outcome or CallEnd.COMPLETED.value
        finally:
            record.outcome = record.outcome or UNEXPECTED
            record.status = record.status or record.engine_status
            seconds = time.perf_counter() - record.began
            self._metrics.answered(record, seconds)
            if self._tracing is not None:
                self._tracing.end(record)
            _write(record, seconds)


def _note_answer(record: RequestRecord, message: MutableMapping[str, Any]) -> None:
    record.status = message["status"]
    if record.engine_status and not record.speaks:
        return
    headers = list(message["headers"])
    if all(name.lower() != REQUEST_ID_HEADER for name, _ in headers):
        message["headers"] = [*headers, (REQUEST_ID_HEADER, record.id.encode())]


def _write(record: RequestRecord, seconds: float) -> None:
    """Calls, and whatever went wrong, at info; the rest, lists of models and the like, at debug."""
    failed = record.outcome != CallEnd.COMPLETED.value or record.status >= _SERVER_ERROR
    say = log.info if record.model or failed or api_of(record.path) != OTHER_API else log.debug
    fields: dict[str, object] = {
        "method": record.method,
        "path": record.path[:MAX_SHOWN],
        "status": record.status,
        "outcome": record.outcome,
        "ms": _ms(seconds),
    }
    for name, text in (
        ("reason", record.reason),
        ("tenant", record.tenant),
        ("model", record.model),
        ("mode", record.mode),
        ("ctx", record.context),
        ("call", record.call),
        ("mapping", record.mapping.value if record.mapping is not None else ""),
        ("normalised", " ".join(record.normalised)),
        ("backend", record.backend),
        ("engine_id", record.engine_id),
    ):
        if text:
            fields[name] = text[:MAX_SHOWN]
    if record.held_seconds:
        fields["held_ms"] = _ms(record.held_seconds)
    if record.sent and record.first_byte:
        fields["first_byte_ms"] = _ms(record.first_byte - record.sent)
    for name, tokens in (
        ("input_tokens", record.input_tokens),
        ("cached_tokens", record.cached_tokens),
        ("output_tokens", record.output_tokens),
    ):
        if tokens >= 0:
            fields[name] = tokens
    say("request", **fields)


def _ms(seconds: float) -> float:
    return round(seconds * 1e3, 2)
