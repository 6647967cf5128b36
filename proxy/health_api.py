"""Whether this proxy lives, forwards, and may touch the cache: what balancers and operators ask first."""

from typing import Any

import msgspec
from fastapi import FastAPI, Response

from proxy.runtime import Runtime

NOT_READY_STATUS = 503


def add_health_routes(app: FastAPI, runtime: Runtime) -> None:
    """`/livez` and `/readyz`."""

    @app.get("/livez")
    async def livez() -> dict[str, str]:
        return {"status": "alive"}

    @app.get("/readyz")
    async def readyz() -> Response:
        draining = runtime.drain.began
        return Response(
            msgspec.json.encode(readiness(runtime)),
            status_code=NOT_READY_STATUS if draining else 200,
            media_type="application/json",
        )


def readiness(runtime: Runtime) -> dict[str, Any]:
    """Ready means calls are forwarded. `control` says whether the cache may be touched, and why not; `owns`,
    whether it is this proxy that touches it."""
    return {
        "status": "draining" if runtime.drain.began else "ready",
        "control": runtime.self_test.ok,
        "level": runtime.cache.capabilities.level,
        "proxy": runtime.office.name,
        "owns": runtime.office.holds,
        "owner": runtime.office.owner,
        "problems": runtime.problems,
        "warnings": runtime.warnings,
        **runtime.modes.describe(),
    }
