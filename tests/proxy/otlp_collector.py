"""An OpenTelemetry collector, as a test tool: takes OTLP over HTTP and keeps the spans."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)
from opentelemetry.proto.trace.v1.trace_pb2 import Span

from tests.proxy.live_server import serve


@dataclass
class Collector:
    """What arrived. `raw` are the documents as they came over the wire."""

    url: str = ""
    raw: list[bytes] = field(default_factory=list)
    paths: list[str] = field(default_factory=list)
    resources: list[dict[str, Any]] = field(default_factory=list)
    spans: list[Span] = field(default_factory=list)

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        body = b""
        more = True
        while more:
            message = await receive()
            body += message.get("body", b"")
            more = message.get("more_body", False)
        self.raw.append(body)
        self.paths.append(scope["path"])
        document = ExportTraceServiceRequest.FromString(body)
        for resource in document.resource_spans:
            self.resources.append(attributes(resource.resource))
            for scoped in resource.scope_spans:
                self.spans += scoped.spans
        headers = [(b"content-type", b"application/x-protobuf")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": ExportTraceServiceResponse().SerializeToString()})

    def of_kind(self, kind: int) -> list[Span]:
        return [span for span in self.spans if span.kind == kind]


def attributes(owner: Any) -> dict[str, Any]:
    """Attributes of a span or resource, as plain values."""
    found = {}
    for each in owner.attributes:
        kind = each.value.WhichOneof("value")
        value = getattr(each.value, kind)
        found[each.key] = [v.string_value for v in value.values] if kind == "array_value" else value
    return found


@asynccontextmanager
async def collector() -> AsyncIterator[Collector]:
    it = Collector()
    async with serve(it) as port:
        it.url = f"http://127.0.0.1:{port}"
        yield it
