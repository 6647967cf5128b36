"""The data listener: the engine's whole surface, with the lifecycle of calls beside it."""

import asyncio
import time
from collections.abc import Callable, Sequence, Set
from contextlib import suppress

import msgspec
import structlog

from lifecycle.core.ids import Namespace
from lifecycle.vocabulary import BACKEND_HEADER, CACHE_SALT, MAX_OFFLOAD_TOKENS, CallEnd, Mode
from proxy.auth import Authenticator, Caller, KeyScope
from proxy.backends import Backends, Route
from proxy.body_edit import RETURN_TOKEN_IDS, RequestEdit, edit_request_body
from proxy.call_readers import OFF_LOOP_BYTES, READERS, read_calls
from proxy.engine_admin import is_engine_admin
from proxy.engine_connection import SWITCHING_PROTOCOLS, Headers
from proxy.errors import ClientGone, InvalidRequest, ProxyError
from proxy.followed_call import FollowedCall, MessageHasher, NotFollowed, decode_body
from proxy.forward import Send, forward_call, pipe, raw_target, request_headers
from proxy.harness import harness_of
from proxy.harness_identity import read_harness_call
from proxy.hooks_api import HOOKS_PATH, HooksApi
from proxy.lifecycle_fields import read_lifecycle_fields
from proxy.limits import Limits
from proxy.merged_models import MODELS_PATH, answer_models
from proxy.metrics import Metrics
from proxy.modes import Modes
from proxy.normalise import Normalised, Normalising
from proxy.ops_api import OpsApi
from proxy.placing import Placing
from proxy.problems import caller_error, send_response
from proxy.request_body import Receive, Scope, read_body
from proxy.request_record import REFUSED, the_request
from proxy.tracked_batch import TrackedBatch, fields_of_prompt
from proxy.tracked_call import TrackedCall
from proxy.tracking import Tracking
from proxy.tunnel import HANDOVER, Tunnel
from proxy.upstream import Upstream

log = structlog.get_logger(__name__)

FIRST_ERROR_STATUS = 400

INFERENCE_PATHS = frozenset(
    (
        *READERS,
        "/v1/chat/completions/batch",
        "/v1/systemone",
        "/v1/decisions",
        "/v1/score",
        "/inference/v1/generate",
        "/generative_scoring",
        "/invocations",
        "/vertex_generate",
        "/cohere/v2/chat",
        "/api/chat",
        "/api/generate",
    )
)
"""Paths whose bodies may carry KV parameters and whose tokens land in the cache."""

_INFERENCE_METHODS = ("POST", "PUT")
_BACKEND_HEADER = BACKEND_HEADER.encode()


class DataApp:
    """Raw ASGI application. `salted` are the tenants with a cache of their own; more may come."""

    def __init__(
        self,
        backends: Backends,
        placing: Placing,
        observed: Callable[[Upstream], Upstream],
        auth: Authenticator,
        tracking: Tracking,
        modes: Modes,
        hasher: MessageHasher,
        metrics: Metrics,
        ops: OpsApi,
        hooks: HooksApi,
        limits: Limits,
        normalising: Normalising,
        salted: Set[str],
        max_body_bytes: int,
    ) -> None:
        self._backends = backends
        self._placing = placing
        self._observed = observed
        self._auth = auth
        self._tracking = tracking
        self._modes = modes
        self._hasher = hasher
        self._metrics = metrics
        self._ops = ops
        self._hooks = hooks
        self._limits = limits
        self._normalising = normalising
        self._salted = salted
        self._max_body_bytes = max_body_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """One request. Every answer is the engine's, except for `/kv/v1` and our own refusals."""
        if scope["type"] != "http":
            return
        path: str = scope["path"]
        if path.startswith("/kv/"):
            app = self._hooks if path.startswith(HOOKS_PATH) else self._ops
            await app(scope, receive, send)
            return
        self._metrics.in_flight.inc()
        try:
            caller = self._auth.authenticate(scope["headers"])
            the_request().tenant = caller.tenant
            caller.require(KeyScope.ADMIN if is_engine_admin(path) else KeyScope.CALL)
            if scope["method"] in _INFERENCE_METHODS or HANDOVER in scope.get("extensions", {}):
                with self._limits.call(caller.tenant):
                    if scope["method"] in _INFERENCE_METHODS and path in INFERENCE_PATHS:
                        await self._infer(caller, scope, receive, send)
                    else:
                        await self._pass_through(scope, receive, send)
            elif self._backends.several and (scope["method"], path) == ("GET", MODELS_PATH):
                await self._list_models(scope, send)
            else:
                await self._pass_through(scope, receive, send)
        except ClientGone as gone:
            the_request().gave_up(CallEnd.ABORTED, str(gone))
        except ProxyError as refusal:
            the_request().gave_up(REFUSED, str(refusal))
            await send_response(send, caller_error(refusal, path), close=isinstance(refusal, InvalidRequest))
        finally:
            self._metrics.in_flight.dec()

    async def _pass_through(self, scope: Scope, receive: Receive, send: Send) -> None:
        handover = scope.get("extensions", {}).get(HANDOVER)
        tunnel = Tunnel(handover, self._note_tunnel) if handover is not None else None
        try:
            outcome = await pipe(
                scope,
                receive,
                send,
                self._observed(self._way(scope)),
                credentials=self._auth.upstream_credentials(),
                limit_bytes=self._max_body_bytes,
                tunnel=tunnel,
            )
            the_request().ended(outcome)
            if outcome.status == SWITCHING_PROTOCOLS:
                self._metrics.untracked.inc()
        finally:
            if tunnel is not None:
                tunnel.abort()

    def _way(self, scope: Scope) -> Upstream:
        """To the engine that the request names, or to any. Raises `InvalidRequest`.

        What changes an engine, or lays it open, is meant for one: with several it must be named.
        """
        path: str = scope["path"]
        named = next((v.decode("latin-1") for n, v in scope["headers"] if n == _BACKEND_HEADER), "")
        if not self._backends.several or not (named or is_engine_admin(path)):
            _, _, model = path.partition(f"{MODELS_PATH}/")
            return self._backends.anywhere(model)
        backend = self._backends.find(named)
        if backend is None:
            known = ", ".join(self._backends.names)
            raise InvalidRequest(f"{BACKEND_HEADER} must name the engine that is meant: one of {known}")
        return self._backends.to(backend)

    async def _list_models(self, scope: Scope, send: Send) -> None:
        headers = request_headers(scope["headers"], self._auth.upstream_credentials(), keep_length=False)
        await answer_models(self._backends.usable(), raw_target(scope), headers, send)

    def _note_tunnel(self) -> None:
        """What passes in a tunnel is not read: it may be inference, by any model."""
        try:
            self._tracking.untracked.note(None, "a WebSocket is not followed")
        except Exception:
            log.exception("a WebSocket's use of the cache is not noted")

    async def _infer(self, caller: Caller, scope: Scope, receive: Receive, send: Send) -> None:
        given = await read_body(scope, receive, self._max_body_bytes)
        arrived = time.perf_counter()
        normalised = await self._normalising.body(scope["path"], caller.tenant, given)
        body = normalised.body
        mode = Mode.BYPASS
        calls: Sequence[TrackedCall] = ()
        model = salt = ""
        untracked: list[Namespace] = []
        try:
            asked, reason = await self._asked(scope["path"], normalised)
            model, client_salt = (
                (asked[0].model, asked[0].document.get(CACHE_SALT)) if asked else await _hints(body)
            )
            salt = self.salt(caller.tenant, client_salt)
            mode = self._modes.of(model, caller.tenant)
            the_request().asks_for(model)
            namespace = self._tracking.namespace(model, salt)
            if asked and mode is not Mode.BYPASS:
                calls = await self._begin(caller.tenant, namespace, asked, scope["headers"])
            else:
                reason = "bypass" if mode is Mode.BYPASS else reason
                self._metrics.untracked.inc()
                untracked.append(namespace)
                if self._tracking.untracked.knows(model):
                    self._tracking.untracked.note(untracked.pop(), reason)
        except Exception:
            # The lifecycle side may be broken in any way: the answer is the engine's all the same.
            log.exception("a call is not tracked", path=scope["path"])
            salt = self.salt(caller.tenant, (await _hints(body))[1])
            with suppress(Exception):
                self._tracking.untracked.note(None, "tracking failed")
        call = calls[0] if calls else None
        edit = self._edit(salt, call)
        edited = await edit_request_body(body, edit)
        held = time.perf_counter() - arrived
        self._metrics.held_seconds.labels(mode).observe(held)
        record = the_request()
        record.held_seconds, record.mode, record.speaks = held, mode.value, mode is not Mode.BYPASS
        record.normalised = tuple(normalised.counts)
        if call is not None:
            record.context, record.call = call.request.identity.context_id, call.request.call_id

        route = self._route(caller.tenant, model, calls, scope["headers"])

        def added() -> Headers:
            ours = [*call.response_headers()] if call is not None else []
            if self._backends.several:
                ours.append((_BACKEND_HEADER, route.taken_by.encode()))
            return [*ours, (b"server-timing", f"kvtether;dur={held * 1000:.2f}".encode())]

        outcome = await forward_call(
            scope,
            receive,
            send,
            self._observed(route),
            edited.body,
            credentials=self._auth.upstream_credentials(),
            response_headers=added if mode is not Mode.BYPASS else None,
            observer=record.listening(TrackedBatch(calls) if len(calls) > 1 else call),
            cut_ids=call is not None and call.asks_ids,
        )
        record.ended(outcome)
        if call is not None and call.mapping is not None and call.mapping.done():
            record.mapping = call.mapping_kind
        if untracked and 0 < outcome.status < FIRST_ERROR_STATUS:
            # A name that is not ours held us up only if the engine knew it: a typo must not stop reclaim.
            self._tracking.untracked.note(untracked[0], f"inference of {untracked[0].model!r}")

    async def _asked(self, path: str, given: Normalised) -> tuple[Sequence[FollowedCall], str]:
        """The calls if they can be followed, or why not; reading is spared while everything is bypassed."""
        if self._modes.pipes_everything:
            return (), "bypass"
        try:
            asked = await read_calls(path, given.body, self._hasher)
            seen = {
                "model": self._tracking.served(asked[0].model),
                "size_bytes": len(given.body),
                "normalised": tuple(sorted(given.counts)),
            }
            return [msgspec.structs.replace(each, **seen) for each in asked], ""
        except NotFollowed as reason:
            return (), str(reason)

    async def _begin(
        self, tenant: str, namespace: Namespace, asked: Sequence[FollowedCall], headers: Headers
    ) -> Sequence[TrackedCall]:
        said = read_lifecycle_fields(headers, asked[0].lifecycle)
        said = msgspec.structs.replace(said, pins=(*asked[0].pins, *said.pins))
        harness, of_harness = harness_of(headers), read_harness_call(headers, asked[0].document)
        of_harness = self._hooks.told_of(tenant, of_harness)
        requests = [
            self._tracking.calls.request(
                tenant, namespace, each, fields_of_prompt(said, at, len(asked)), harness, of_harness
            )
            for at, each in enumerate(asked)
        ]
        first = await self._tracking.begin(requests[0])
        return [first, *[await self._tracking.begin(each, first.placed) for each in requests[1:]]]

    def _route(self, tenant: str, model: str, calls: Sequence[TrackedCall], headers: Headers) -> Route:
        if not self._backends.several:
            return self._backends.anywhere(model)
        try:
            if calls:
                return self._placing.route(calls)
            return self._placing.route_unfollowed(tenant, model, read_lifecycle_fields(headers).ctx)
        except Exception:
            log.exception("a call goes to any engine")
            return self._backends.anywhere(model)

    def _edit(self, salt: str, call: TrackedCall | None) -> RequestEdit:
        fields: dict[str, object] = {CACHE_SALT: salt} if salt else {}
        if call is not None and call.asks_ids:
            fields[RETURN_TOKEN_IDS] = True
        if call is not None:
            fields |= call.label()
        if call is None or call.bypass_from_token is None:
            return RequestEdit(fields=fields)
        return RequestEdit(fields=fields, transfer_params={MAX_OFFLOAD_TOKENS: call.bypass_from_token})

    def salt(self, tenant: str, client_salt: object) -> str:
        """The cache salt of a call: a salt that a client chose counts within its tenant only."""
        chosen = client_salt if isinstance(client_salt, str) else ""
        if tenant not in self._salted and not chosen:
            return ""
        return self._hasher.salt(tenant, chosen)


async def _hints(body: bytes) -> tuple[str, object]:
    """Model and client's salt of a body that is not followed, as far as it can be read; off the event loop
    for large bodies."""
    try:
        document = (
            await asyncio.to_thread(decode_body, body) if len(body) > OFF_LOOP_BYTES else decode_body(body)
        )
    except NotFollowed:
        return "", None
    if not isinstance(document, dict):
        return "", None
    model = document.get("model")
    return model if isinstance(model, str) else "", document.get(CACHE_SALT)
