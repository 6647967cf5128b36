"""Traces of requests, for whoever follows one through client, proxy and engine. Off unless configured."""

from typing import Protocol

from proxy.config import InvalidConfig, TracingConfig
from proxy.engine_connection import Headers
from proxy.request_record import RequestRecord
from proxy.upstream import UpstreamRequest


class Tracing(Protocol):
    """Makes a request's spans. Nothing here waits or raises."""

    def begin(self, record: RequestRecord, headers: Headers) -> None:
        """A request has come, with these headers."""
        ...

    def outgoing(self, record: RequestRecord, request: UpstreamRequest) -> UpstreamRequest:
        """It leaves for the engine: as it is, or with our span for the engine's parent."""
        ...

    def end(self, record: RequestRecord) -> None:
        """It is over."""
        ...

    async def close(self) -> None:
        """Send what was not sent yet, for a few seconds at most."""
        ...


def open_tracing(config: TracingConfig) -> Tracing | None:
    """What the configuration asks for; None for nothing, and then nothing is loaded either.

    Raises `InvalidConfig` where the libraries are missing.
    """
    if not config.endpoint:
        return None
    try:
        from proxy.otel_tracing import OtelTracing
    except ImportError as error:
        raise InvalidConfig(
            f"tracing.endpoint: {error}; install kvtether[tracing], or leave the setting empty"
        ) from error
    return OtelTracing(config.endpoint, config.sample)
