"""What it costs to watch a request: its record and metrics, its line in the log, its spans.

`python -m bench.observing [--requests 3000] [--repeats 5]`. Processor time of this process around an
application that answers at once, less that of the application alone; the best of the repeats. Lines go to
nowhere, spans to a collector that is away: their making is measured, not their reader.
"""

import argparse
import asyncio
import os
import sys
import time
from collections.abc import MutableMapping
from typing import Any

from prometheus_client import CollectorRegistry

from lifecycle.vocabulary import CallEnd
from proxy.call_listener import ForwardOutcome
from proxy.config import TracingConfig
from proxy.log_output import configure_logging
from proxy.observed_upstream import ObservedUpstream
from proxy.request_log import App, RequestLog
from proxy.request_metrics import RequestMetrics
from proxy.request_record import the_request
from proxy.system import RandomIds
from proxy.tracing import open_tracing
from proxy.upstream import UpstreamRequest

PATH = "/v1/chat/completions"
HEADERS = [
    (b"host", b"bench"),
    (b"content-type", b"application/json"),
    (b"traceparent", b"00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"),
]
REQUEST = UpstreamRequest(method="POST", raw_target=PATH.encode(), headers=HEADERS, body=b"{}")


class _Engine:
    """Answers at once."""

    status = 200

    async def open(self, request: UpstreamRequest) -> Any:
        return self

    async def close(self) -> None:
        """Nothing is open."""


def _application(upstream: Any) -> App:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        record = the_request()
        record.tenant, record.model, record.mode = "default", "qwen3-8b", "observe"
        record.context, record.call, record.speaks = "run-7:main", "call_aaaaaaaaaaaaaaaa", True
        record.input_tokens, record.cached_tokens, record.output_tokens = 5120, 4864, 211
        record.held_seconds = 0.0005
        await upstream.open(REQUEST)
        headers = [(b"content-type", b"application/json")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": b"{}"})
        record.ended(ForwardOutcome(CallEnd.COMPLETED, 200))

    return app


async def _send(message: MutableMapping[str, Any]) -> None:
    """Nobody reads it."""


async def _microseconds(app: App, requests: int, repeats: int) -> float:
    scope = {"type": "http", "method": "POST", "path": PATH, "headers": HEADERS}
    found = []
    for _ in range(repeats):
        began = time.process_time()
        for _ in range(requests):
            await asyncio.ensure_future(app(dict(scope), _send, _send))
        found.append((time.process_time() - began) / requests * 1e6)
    return min(found)


async def measure(requests: int, repeats: int) -> dict[str, float]:
    """Microseconds of processor time that each adds to a request, by what is on."""
    metrics = RequestMetrics(CollectorRegistry())
    observed = _application(ObservedUpstream(_Engine(), metrics))
    configure_logging("warning", "json")
    bare = await _microseconds(_application(_Engine()), requests, repeats)
    found = {}
    log = RequestLog(observed, metrics, RandomIds())
    found["record and metrics"] = await _microseconds(log, requests, repeats) - bare
    configure_logging("info", "json")
    found["and a line of JSON"] = await _microseconds(log, requests, repeats) - bare
    tracing = open_tracing(TracingConfig(endpoint="http://127.0.0.1:9"))
    traced = _application(ObservedUpstream(_Engine(), metrics, tracing))
    log = RequestLog(traced, metrics, RandomIds(), tracing)
    found["and two spans"] = await _microseconds(log, requests, repeats) - bare
    return found


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--requests", type=int, default=3000)
    parser.add_argument("--repeats", type=int, default=5)
    wanted = parser.parse_args()
    with open(os.devnull, "w") as nowhere:
        sys.stderr = nowhere
        found = asyncio.run(measure(wanted.requests, wanted.repeats))
    print("| on | added to a request, µs of processor time |")
    print("|---|---|")
    for name, microseconds in found.items():
        print(f"| {name} | {microseconds:.0f} |")
    sys.stdout.flush()
    os._exit(0)  # the collector that is away is waited for by nobody


if __name__ == "__main__":
    main()
