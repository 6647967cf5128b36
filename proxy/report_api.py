"""`/kv/v1/report`: what the lifecycle was worth, over a span of time. Part of the admin listener."""

import re

import msgspec
from fastapi import FastAPI, Response

from lifecycle.projections.report_counts import DIMENSIONS, Dimension
from proxy.errors import InvalidRequest
from proxy.report_view import report_view, samples_view
from proxy.runtime import Runtime

_UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86400}
_SPAN = re.compile(r"(\d{1,6})([smhd])")


def span_seconds(text: str) -> int:
    """A span as people write it, such as `90s`, `15m`, `24h` or `7d`. Raises `InvalidRequest`."""
    found = _SPAN.fullmatch(text)
    if found is None or not int(found[1]):
        raise InvalidRequest(f"since={text}: a span like 90s, 15m, 24h or 7d is expected")
    return int(found[1]) * _UNITS[found[2]]


def dimension(text: str) -> Dimension:
    """What to group by. Raises `InvalidRequest`."""
    for known in DIMENSIONS:
        if text == known:
            return known
    raise InvalidRequest(f"by={text}: one of {', '.join(DIMENSIONS)} is expected")


def add_report_routes(app: FastAPI, runtime: Runtime) -> None:
    """The report's routes; served behind the admin scope like all of `app`."""

    def start_ns(since: str) -> int:
        return max(runtime.clock.now_ns() - span_seconds(since) * 10**9, 0)

    @app.get("/kv/v1/report")
    async def report(since: str = "1h", by: str = "tenant") -> Response:
        """Dead, freed, regretted, avoidable, verified, and held out against enforced."""
        document = report_view(runtime.reporting, start_ns(since), runtime.clock.now_ns(), dimension(by))
        return Response(msgspec.json.encode(document), media_type="application/json")

    @app.get("/kv/v1/report/dead")
    async def dead(since: str = "15m") -> Response:
        """How much lay dead in the cache over time."""
        document = samples_view(runtime.reporting, start_ns(since))
        return Response(msgspec.json.encode(document), media_type="application/json")
