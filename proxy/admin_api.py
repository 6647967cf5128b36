"""The admin listener: health, metrics, and everything that is true, read back and steered."""

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Sequence
from typing import Any, TypeVar
from urllib.parse import urlsplit

import msgspec
from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import StreamingResponse
from starlette.exceptions import HTTPException

from engine_bridge.errors import BridgeError
from lifecycle.core.events import RecordedEvent
from lifecycle.core.ids import KEY_BYTES, context_stream
from lifecycle.core.observations import CloseRequested, Operation, PinsDropped, PinSpan, UnpinSpan
from lifecycle.core.state import ContextState
from lifecycle.errors import LifecycleError, UnknownContext
from lifecycle.vocabulary import Mode
from proxy.auth import KeyScope
from proxy.config import ModeRule
from proxy.erasure import erase_tenant, observe_now
from proxy.errors import Forbidden, InvalidRequest, MethodRefused, NoSuchPath, ProxyError
from proxy.forward import Send
from proxy.health_api import add_health_routes
from proxy.key_watch import is_address
from proxy.lifecycle_fields import parse_span
from proxy.presentation import (
    call_view,
    context_summary,
    context_view,
    directive_view,
    event_view,
    namespace_views,
)
from proxy.problems import problem, send_response
from proxy.report_api import add_report_routes
from proxy.request_body import Receive, Scope
from proxy.runtime import Runtime

MAX_PAGE = 1000
ADMIN_SOURCE = "admin"
EVENT_BACKLOG = 10_000
"""Events that one slow reader of the event stream may be behind before it is cut off."""

_ROUTING: dict[int, type[ProxyError]] = {404: NoSuchPath, 405: MethodRefused}

OPEN_PATHS = frozenset(("/livez", "/readyz", "/metrics"))
LOCAL_NAMES = frozenset(("localhost", "127.0.0.1", "::1"))


class ConfigPatch(msgspec.Struct, forbid_unknown_fields=True):
    """What can be changed at run time."""

    mode: Mode | None = None
    modes: list[ModeRule] = []
    holdout: float | None = None


class PinBody(msgspec.Struct, forbid_unknown_fields=True):
    """Span of a pin or unpin: `"i:j"`, `"system"` or `"tools"`; `ttl` in seconds."""

    span: str
    ttl: float | None = None


class AdminGuard:
    """Pure ASGI: only the admin scope comes in, and no other site's page can steer us through a browser."""

    def __init__(self, app: FastAPI, runtime: Runtime) -> None:
        self._app = app
        self._runtime = runtime

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Let the request through, or answer a problem."""
        if scope["type"] == "http":
            try:
                self._check(scope)
            except ProxyError as refusal:
                await send_response(send, problem(refusal, scope["path"]))
                return
        await self._app(scope, receive, send)

    def _check(self, scope: Scope) -> None:
        headers = scope["headers"]
        host = next((v.decode("latin-1") for n, v in headers if n == b"host"), "")
        name = urlsplit(f"//{host}").hostname or ""
        bound = self._runtime.config.admin.host
        if self._runtime.auth.open and name not in LOCAL_NAMES and name != bound and not self._far(name):
            raise Forbidden(f"the admin API answers on {bound} only, not as {name!r}")
        origin = next((v.decode("latin-1") for n, v in headers if n == b"origin"), "")
        if origin and urlsplit(origin).netloc != host:
            raise Forbidden("another site's page must not steer the admin API")
        if scope["path"] not in OPEN_PATHS:
            self._runtime.auth.authenticate(headers).require(KeyScope.ADMIN)

    def _far(self, name: str) -> bool:
        """Whether it is reached from elsewhere by permission: by address, for names can be pointed at us."""
        return self._runtime.config.keyless_network and is_address(name)


def create_admin_app(runtime: Runtime) -> FastAPI:
    """The application; every route reads or steers `runtime`. Serve it behind `AdminGuard`."""
    app = FastAPI(title="KVTether admin", openapi_url="/kv/v1/openapi.json", docs_url=None, redoc_url=None)
    tracker = runtime.tracker

    add_health_routes(app, runtime)
    add_report_routes(app, runtime)
    for kind in (LifecycleError, ProxyError, BridgeError, HTTPException, RequestValidationError):
        app.add_exception_handler(kind, _answer_problem)

    @app.get("/metrics")
    async def metrics() -> Response:
        return Response(runtime.metrics.render(), media_type="text/plain; version=0.0.4")

    @app.get("/kv/v1/contexts")
    async def list_contexts(
        tenant: str = "", ctx: str = "", state: str = "", limit: int = 100, cursor: str = ""
    ) -> Response:
        rows = [
            context_summary(s)
            for s in sorted(tracker.contexts.states.values(), key=lambda s: s.uid)
            if (not tenant or s.key.tenant == tenant) and (not ctx or s.key.context_id == ctx)
        ]
        return _page([r for r in rows if not state or r["state"] == state], limit, cursor, "uid")

    @app.get("/kv/v1/contexts/{uid}")
    async def one_context(uid: str) -> Response:
        return _json(context_view(_state(runtime, uid), tracker.contexts.index))

    @app.get("/kv/v1/contexts/{uid}/events")
    async def context_events(uid: str, limit: int = 100, after: int = 0) -> Response:
        _state(runtime, uid)
        rows = []
        async for recorded in runtime.event_log.read_stream(context_stream(uid), after):
            rows.append(event_view(recorded))
            if len(rows) == min(max(limit, 1), MAX_PAGE):
                break
        return _json({"events": rows, "after": rows[-1]["version"] if rows else after})

    @app.get("/kv/v1/calls/{call_id}")
    async def one_call(call_id: str) -> Response:
        found = [
            {
                "uid": s.uid,
                "attempts": s.attempts[call_id],
                "in_flight": [call_view(f) for f in s.flights if f.call_id == call_id],
            }
            for s in tracker.contexts.states.values()
            if call_id in s.attempts
        ]
        if not found:
            raise UnknownContext(f"no context knows a call {call_id!r}")
        return _json({"call_id": call_id, "contexts": found})

    @app.get("/kv/v1/chunks/{key}")
    async def one_chunk(key: str) -> Response:
        raw = _key(key)
        rows = []
        for namespace in tracker.contexts.index.namespaces():
            described = tracker.contexts.index.describe(namespace, raw)
            if described is not None:
                document = msgspec.to_builtins(described)
                rows.append({**document, "key": key, "model": namespace.model, "salt": namespace.salt})
        return _json({"key": key, "books": rows})

    @app.get("/kv/v1/directives")
    async def directives(outcome: str = "", limit: int = 100, cursor: str = "") -> Response:
        rows = [directive_view(r) for r in reversed(tracker.contexts.directives.values())]
        rows = [r for r in rows if not outcome or r["outcome"] == outcome]
        return _page(rows, limit, cursor, "directive_id")

    @app.get("/kv/v1/tiers")
    async def tiers() -> Response:
        capabilities = msgspec.to_builtins(runtime.cache.capabilities)
        return _json({"capabilities": capabilities, "namespaces": namespace_views(tracker.contexts.index)})

    @app.get("/kv/v1/diagnostics")
    async def diagnostics() -> Response:
        return _json(
            {
                "problems": runtime.problems,
                "models": [
                    {
                        "name": m.name,
                        "mapped": m.service is not None and not m.reason,
                        "reason": m.reason,
                        "fingerprint": m.fingerprint,
                    }
                    for m in runtime.models.values()
                ],
                "log_position": tracker.contexts.position,
                "events_followed": runtime.blocks.live,
            }
        )

    @app.get("/kv/v1/events")
    async def events(after: int | None = None) -> StreamingResponse:
        start = tracker.contexts.position if after is None else after
        return StreamingResponse(_event_stream(runtime, start), media_type="text/event-stream")

    @app.post("/kv/v1/contexts/{uid}/pin")
    async def pin(uid: str, request: Request) -> Response:
        body = await _body(request, PinBody)
        ctx = _state(runtime, uid).key.context_id
        return await _operate(runtime, uid, PinSpan(seq=1, ctx=ctx, span=_span(body.span), ttl=body.ttl))

    @app.post("/kv/v1/contexts/{uid}/unpin")
    async def unpin(uid: str, request: Request) -> Response:
        body = await _body(request, PinBody)
        ctx = _state(runtime, uid).key.context_id
        return await _operate(runtime, uid, UnpinSpan(seq=1, ctx=ctx, span=_span(body.span)))

    @app.post("/kv/v1/contexts/{uid}/close")
    async def close(uid: str) -> Response:
        _state(runtime, uid)
        await observe_now(
            runtime.tracker,
            uid,
            CloseRequested(at_ns=runtime.clock.now_ns(), reason="closed by an operator"),
        )
        return _json(context_summary(_state(runtime, uid)))

    @app.post("/kv/v1/contexts/{uid}/reclaim")
    async def reclaim(uid: str) -> Response:
        """Free the namespace's dead now, without waiting for the next pass."""
        namespace = _state(runtime, uid).namespace
        runtime.reclaimer.wake()
        return _json(msgspec.to_builtins(tracker.contexts.index.stats(namespace)))

    @app.patch("/kv/v1/config")
    async def patch_config(request: Request) -> Response:
        patch = await _body(request, ConfigPatch)
        if patch.holdout is not None and not 0 <= patch.holdout <= 1:
            raise InvalidRequest("holdout is a share from 0 to 1")
        default = [ModeRule(mode=patch.mode)] if patch.mode is not None else []
        for rule in [*default, *patch.modes]:
            runtime.modes.set(rule)
            if rule.mode is Mode.ENFORCE:
                await runtime.reporting.rearm(rule.model, rule.tenant)
        if patch.holdout is not None:
            runtime.modes.holdout = patch.holdout
        return _json(runtime.modes.describe())

    @app.post("/kv/v1/bypass")
    async def bypass(on: bool = True) -> Response:
        """The emergency switch: a byte pipe for everybody, at once."""
        runtime.modes.bypass_all = on
        return _json(runtime.modes.describe())

    @app.post("/kv/v1/release-all")
    async def release_all() -> Response:
        """Give back every hold: the pins of all contexts, and what the cache holds for us."""
        released, held = 0, runtime.holds.num_held
        for state in list(tracker.contexts.states.values()):
            if state.pins:
                released += len(state.pins)
                await observe_now(
                    runtime.tracker,
                    state.uid,
                    PinsDropped(at_ns=runtime.clock.now_ns(), reason="released by an operator"),
                )
        await runtime.pins.settled()
        left = await runtime.holds.release_all()
        return _json({"pins": released, "cache_holds": max(held, left)})

    @app.delete("/kv/v1/tenants/{tenant}")
    async def delete_tenant(tenant: str) -> Response:
        return _json(msgspec.to_builtins(await erase_tenant(runtime, tenant)))

    return app


def _json(document: object) -> Response:
    return Response(msgspec.json.encode(document), media_type="application/json")


def _page(rows: Sequence[dict[str, Any]], limit: int, cursor: str, key: str) -> Response:
    """One page in the order given, behind the row whose `key` is `cursor`; `next` is empty on the last."""
    start = 0
    if cursor:
        start = next((i + 1 for i, row in enumerate(rows) if row[key] == cursor), len(rows))
    size = min(max(limit, 1), MAX_PAGE)
    page = rows[start : start + size]
    following = page[-1][key] if page and start + size < len(rows) else ""
    return _json({"items": page, "next": following})


def _state(runtime: Runtime, uid: str) -> ContextState:
    state = runtime.tracker.contexts.states.get(uid)
    if state is None:
        raise UnknownContext(f"no context {uid!r}")
    return state


def _key(text: str) -> bytes:
    try:
        key = bytes.fromhex(text)
    except ValueError:
        key = b""
    if len(key) != KEY_BYTES:
        raise InvalidRequest(f"a chunk key is {KEY_BYTES} bytes in hex")
    return key


def _span(text: str) -> tuple[int, int] | str:
    try:
        return parse_span(text)
    except ValueError as error:
        raise InvalidRequest(str(error)) from error


T = TypeVar("T")


async def _body(request: Request, kind: type[T]) -> T:
    try:
        return msgspec.json.decode(await request.body(), type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise InvalidRequest(str(error)) from error


async def _operate(runtime: Runtime, uid: str, operation: Operation) -> Response:
    """An operator's own operation: a numbering of its own, so that it waits for nobody's."""
    tenant = _state(runtime, uid).key.tenant
    results = await runtime.declarations.apply(tenant, runtime.ids.new(ADMIN_SOURCE), [operation], uid)
    return _json(results[0])


async def _event_stream(runtime: Runtime, after: int) -> AsyncIterator[bytes]:
    """Recorded events as server-sent events: first what is in the log behind `after`, then as they come.

    Ends, never skips: when the process stops, and for a reader that is `EVENT_BACKLOG` behind.
    """
    fresh: deque[RecordedEvent] = deque()
    heard = asyncio.Event()

    def listen(batch: Sequence[RecordedEvent]) -> None:
        if len(fresh) < EVENT_BACKLOG:
            fresh.extend(batch)
        heard.set()

    async def stop() -> None:
        await runtime.stopping.wait()
        heard.set()

    runtime.tracker.listeners.append(listen)
    stopping = runtime.tasks.spawn(stop())
    try:
        position = after
        async for recorded in runtime.event_log.read_all(after):
            position = recorded.position
            yield _sse(recorded)
        while not runtime.stopping.is_set():
            heard.clear()
            while fresh:
                recorded = fresh.popleft()
                if recorded.position > position + 1:
                    return
                if recorded.position > position:
                    position = recorded.position
                    yield _sse(recorded)
            await heard.wait()
    finally:
        stopping.cancel()
        runtime.tracker.listeners.remove(listen)


def _sse(recorded: RecordedEvent) -> bytes:
    return b"id: %d\ndata: %s\n\n" % (recorded.position, msgspec.json.encode(event_view(recorded)))


async def _answer_problem(request: Request, error: Exception) -> Response:
    if isinstance(error, HTTPException):
        error = _ROUTING.get(error.status_code, InvalidRequest)(str(error.detail))
    elif isinstance(error, RequestValidationError):
        error = InvalidRequest("; ".join(f"{e['loc'][-1]}: {e['msg']}" for e in error.errors()))
    answer = problem(error, request.url.path)
    headers = {n.decode(): v.decode() for n, v in answer.headers if n != b"content-length"}
    return Response(answer.body, status_code=answer.status, headers=headers)
