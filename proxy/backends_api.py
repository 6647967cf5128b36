"""`/kv/v1/backends`: which engines there are, how they are, and taking them out of service. Part of the admin
listener."""

from collections.abc import Mapping

import msgspec
from fastapi import FastAPI, Response

from proxy.backends import Backend
from proxy.errors import NoSuchPath
from proxy.runtime import Runtime


def add_backend_routes(app: FastAPI, runtime: Runtime) -> None:
    """The routes for engines; served behind the admin scope like all of `app`."""

    def find(name: str) -> Backend:
        backend = runtime.backends.find(name)
        if backend is None:
            known = ", ".join(runtime.backends.names)
            raise NoSuchPath(f"no engine is called {name!r}" + (f": there are {known}" if known else ""))
        return backend

    @app.get("/kv/v1/backends")
    async def backends() -> Response:
        served = runtime.contexts_by_backend()
        return _json({"items": [_view(each, served) for each in runtime.backends.all]})

    @app.post("/kv/v1/backends/{name}/drain")
    async def drain(name: str) -> Response:
        """No new contexts, and those it has go elsewhere with their next call; calls under way end there."""
        find(name).draining = True
        return _json(_view(find(name), runtime.contexts_by_backend()))

    @app.post("/kv/v1/backends/{name}/resume")
    async def resume(name: str) -> Response:
        """It takes new contexts again. Those that went elsewhere stay there."""
        find(name).draining = False
        return _json(_view(find(name), runtime.contexts_by_backend()))


def _view(backend: Backend, contexts: Mapping[str, int]) -> dict[str, object]:
    """`calls` are under way now; `contexts` are open and were served there last."""
    return {
        "name": backend.name,
        "url": backend.config.url,
        "state": "down" if backend.down else "draining" if backend.draining else "up",
        "reason": backend.down,
        "models": None if backend.models is None else sorted(backend.models),
        "calls": backend.load,
        "contexts": contexts.get(backend.name, 0),
    }


def _json(document: object) -> Response:
    return Response(msgspec.json.encode(document), media_type="application/json")
