"""What an operator asks first: what runs here, since when, on which configuration, and what is wrong."""

from importlib.metadata import PackageNotFoundError, version

import msgspec
from fastapi import FastAPI, Response

from proxy.config_reload import ConfigReload
from proxy.runtime import Runtime


def add_status_routes(app: FastAPI, runtime: Runtime, reload: ConfigReload) -> None:
    """`GET /kv/v1/status` and `POST /kv/v1/config/reload` on the admin application."""
    began_ns = runtime.clock.now_ns()

    def status() -> Response:
        document = {
            "version": own_version(),
            "uptime_seconds": (runtime.clock.now_ns() - began_ns) // 10**9,
            "control": runtime.self_test.ok,
            "level": runtime.cache.capabilities.level,
            "calls_under_way": sum(runtime.limits.calls().values()),
            "log_position": runtime.tracker.contexts.position,
            "log_waiting": runtime.tracker.num_waiting,
            "config": {
                "file": str(reload.file) if reload.file is not None else "",
                "problem": reload.problem,
                "needs_restart": reload.waiting,
            },
            "problems": runtime.problems,
            "warnings": runtime.warnings,
            **runtime.modes.describe(),
        }
        return Response(msgspec.json.encode(document), media_type="application/json")

    @app.get("/kv/v1/status")
    async def read_status() -> Response:
        return status()

    @app.post("/kv/v1/config/reload")
    async def reload_config() -> Response:
        """Read the configuration anew, as SIGHUP does; the answer says whether it is in force."""
        await reload.reload()
        return status()


def own_version() -> str:
    """The version that is installed; empty for a bare checkout."""
    try:
        return version("kvtether")
    except PackageNotFoundError:
        return ""
