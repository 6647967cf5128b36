"""The engine as a request's record sees it: when it left, when the answer began, and how it failed."""

import time

from proxy.errors import UpstreamError
from proxy.problems import status_and_kind
from proxy.request_metrics import RequestMetrics
from proxy.request_record import current_request
from proxy.tracing import Tracing
from proxy.upstream import Upstream, UpstreamRequest, UpstreamResponse


class ObservedUpstream:
    """An `Upstream` that tells of each exchange; bytes and errors pass as they are.

    With `tracing` the engine's span becomes a child of ours, by the `traceparent` header.
    """

    def __init__(self, inner: Upstream, metrics: RequestMetrics, tracing: Tracing | None = None) -> None:
        self._inner = inner
        self._metrics = metrics
        self._tracing = tracing

    async def open(self, request: UpstreamRequest) -> UpstreamResponse:
        """See `Upstream`."""
        record = current_request()
        if record is not None:
            record.sent = time.perf_counter()
            if self._tracing is not None:
                request = self._tracing.outgoing(record, request)
        try:
            response = await self._inner.open(request)
        except UpstreamError as error:
            self._metrics.upstream_failed(status_and_kind(error)[1])
            raise
        if record is not None:
            record.first_byte = time.perf_counter()
            record.engine_status = response.status
        return response

    async def close(self) -> None:
        """Close the engine's connections."""
        await self._inner.close()
