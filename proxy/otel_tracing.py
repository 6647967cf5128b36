"""Traces by OpenTelemetry, sent as OTLP over HTTP. Loaded only where tracing is on.

Two spans a request: a server's for the whole of it, a child of the client's, and a client's for the exchange
with the engine, whose child the engine's own span is. Attributes follow the GenAI semantic conventions; none
is text of a message.
"""

import asyncio
import threading
from urllib.parse import urlsplit

import msgspec
from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import SERVICE_NAME, Resource
from opentelemetry.sdk.trace import SpanLimits, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.sdk.trace.sampling import ParentBased, TraceIdRatioBased
from opentelemetry.trace import (
    NonRecordingSpan,
    Span,
    SpanContext,
    SpanKind,
    Status,
    StatusCode,
    TraceFlags,
    set_span_in_context,
)

from lifecycle.vocabulary import CallEnd
from proxy.engine_connection import Headers
from proxy.request_record import RequestRecord
from proxy.trace_context import SAMPLED, TraceParent, read_traceparent, traceparents, with_traceparent
from proxy.upstream import UpstreamRequest

EXPORT_SECONDS = 5
MAX_ATTRIBUTE_CHARACTERS = 256

_CLIENT_ERROR, _SERVER_ERROR = 400, 500
_METHODS = frozenset(("GET", "HEAD", "POST", "PUT", "DELETE", "CONNECT", "OPTIONS", "TRACE", "PATCH"))
_OPERATIONS = {
    "/v1/chat/completions": ("chat", "openai"),
    "/v1/completions": ("text_completion", "openai"),
    "/v1/responses": ("chat", "openai"),
    "/v1/messages": ("chat", "anthropic"),
    "/generate": ("text_completion", "sglang"),
}
"""What a path asks for, and whose API it is."""


class OtelTracing:
    """Satisfies `Tracing`. `sample` is the share of requests traced that come without a trace of their own;
    one that is part of a trace follows its decision."""

    def __init__(self, endpoint: str, sample: float) -> None:
        self._processor = BatchSpanProcessor(
            OTLPSpanExporter(endpoint=traces_url(endpoint), timeout=EXPORT_SECONDS)
        )
        provider = TracerProvider(
            sampler=ParentBased(TraceIdRatioBased(sample)),
            resource=_resource(),
            span_limits=SpanLimits(max_span_attribute_length=MAX_ATTRIBUTE_CHARACTERS),
            shutdown_on_exit=False,
        )
        provider.add_span_processor(self._processor)
        self._tracer = provider.get_tracer("kvtether")

    def begin(self, record: RequestRecord, headers: Headers) -> None:
        """See `Tracing`."""
        method = record.method if record.method in _METHODS else "_OTHER"
        known = record.path if record.path in _OPERATIONS else ""
        record.span = self._tracer.start_span(
            f"{method} {known}" if known else method,
            context=_context(headers),
            kind=SpanKind.SERVER,
            attributes={
                "http.request.method": method,
                "url.path": record.path,
                "kvtether.request_id": record.id,
            },
        )

    def outgoing(self, record: RequestRecord, request: UpstreamRequest) -> UpstreamRequest:
        """See `Tracing`. A trace that nobody records passes as it came, and so does a header that is no
        trace's: what we cannot continue we do not touch."""
        sent = traceparents(request.headers)
        parent = read_traceparent(sent[0]) if len(sent) == 1 else None
        span: Span | None = record.span
        if span is None or (sent and (parent is None or not span.is_recording())):
            return request
        if span.is_recording():
            operation, _ = _OPERATIONS.get(record.path, ("", ""))
            name = f"{operation} {record.model}".rstrip() if operation else request.method
            span = record.exchange_span = self._tracer.start_span(
                name, context=set_span_in_context(span), kind=SpanKind.CLIENT
            )
        own = span.get_span_context()
        kept = parent.flags & ~SAMPLED if parent is not None else 0
        place = TraceParent(own.trace_id, own.span_id, kept | (own.trace_flags & SAMPLED))
        return msgspec.structs.replace(request, headers=with_traceparent(request.headers, place))

    def end(self, record: RequestRecord) -> None:
        """See `Tracing`."""
        exchange: Span | None = record.exchange_span
        if exchange is not None:
            _describe_exchange(exchange, record)
            exchange.end()
        span: Span | None = record.span
        if span is not None:
            if span.is_recording():
                _describe(span, record)
            span.end()

    async def close(self) -> None:
        """See `Tracing`."""
        # A collector that is away holds the library for longer than anybody should wait for a shutdown.
        last = threading.Thread(target=self._processor.shutdown, daemon=True)
        last.start()
        await asyncio.to_thread(last.join, EXPORT_SECONDS)


def traces_url(endpoint: str) -> str:
    """Where spans go: the endpoint, behind which `/v1/traces` may be left out."""
    return endpoint if urlsplit(endpoint).path.strip("/") else endpoint.rstrip("/") + "/v1/traces"


def _resource() -> Resource:
    """Who we are: by the environment's word if it has one, as for every program with OpenTelemetry."""
    told = Resource.create()
    named = not str(told.attributes[SERVICE_NAME]).startswith("unknown_service")
    return told if named else told.merge(Resource({SERVICE_NAME: "kvtether"}))


def _context(headers: Headers) -> Context:
    """The client's trace, or a new one."""
    given = traceparents(headers)
    parent = read_traceparent(given[0]) if len(given) == 1 else None
    if parent is None:
        return Context()
    remote = SpanContext(
        parent.trace_id, parent.span_id, is_remote=True, trace_flags=TraceFlags(parent.flags)
    )
    return set_span_in_context(NonRecordingSpan(remote), Context())


def _describe(span: Span, record: RequestRecord) -> None:
    attributes: dict[str, str | int | float] = {"kvtether.outcome": record.outcome}
    for name, text in (
        ("kvtether.tenant", record.tenant),
        ("kvtether.mode", record.mode),
        ("kvtether.context", record.context),
        ("kvtether.call", record.call),
        ("kvtether.mapping", record.mapping.value if record.mapping is not None else ""),
    ):
        if text:
            attributes[name] = text
    if record.held_seconds:
        attributes["kvtether.held_seconds"] = record.held_seconds
    if record.status:
        attributes["http.response.status_code"] = record.status
    span.set_attributes(attributes)
    _mark(span, record, record.status, _SERVER_ERROR)


def _describe_exchange(span: Span, record: RequestRecord) -> None:
    attributes: dict[str, str | int | float | tuple[str, ...]] = {"http.request.method": record.method}
    operation, provider = _OPERATIONS.get(record.path, ("", ""))
    if operation:
        attributes |= {"gen_ai.operation.name": operation, "gen_ai.provider.name": provider}
    for name, text in (
        ("gen_ai.request.model", record.model),
        ("gen_ai.response.model", record.response_model),
        ("gen_ai.response.id", record.engine_id),
        ("gen_ai.conversation.id", record.context),
    ):
        if text:
            attributes[name] = text
    for name, tokens in (
        ("gen_ai.usage.input_tokens", record.input_tokens),
        ("gen_ai.usage.output_tokens", record.output_tokens),
        ("gen_ai.usage.cache_read.input_tokens", record.cached_tokens),
    ):
        if tokens >= 0:
            attributes[name] = tokens
    if record.finish_reasons:
        attributes["gen_ai.response.finish_reasons"] = record.finish_reasons
    if record.first_token and record.sent:
        attributes["gen_ai.response.time_to_first_chunk"] = record.first_token - record.sent
    if record.engine_status:
        attributes["http.response.status_code"] = record.engine_status
    span.set_attributes(attributes)
    _mark(span, record, record.engine_status, _CLIENT_ERROR)


def _mark(span: Span, record: RequestRecord, status: int, first_error: int) -> None:
    """Whether it went wrong: a status from `first_error` on, or none. A client that left is no fault."""
    if record.outcome == CallEnd.COMPLETED.value:
        return
    span.set_attribute("error.type", str(status) if status >= _CLIENT_ERROR else record.outcome)
    broken = record.outcome != CallEnd.ABORTED.value and status < _CLIENT_ERROR
    if status >= first_error or broken:
        span.set_status(Status(StatusCode.ERROR, record.reason or None))
