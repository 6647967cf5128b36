"""The data listener: the engine's whole surface, with the lifecycle of calls beside it."""

import time
from collections.abc import Callable, Sequence, Set
from contextlib import ExitStack, suppress

import msgspec
import structlog

from lifecycle.core.ids import Namespace
from lifecycle.vocabulary import BACKEND_HEADER, CACHE_SALT, MAX_OFFLOAD_TOKENS, CallEnd, Mode
from proxy.auth import Authenticator, Caller, KeyScope
from proxy.backends import Backends, Route
from proxy.body_edit import RETURN_TOKEN_IDS, RequestEdit, edit_request_body
from proxy.call_listener import CallObserver
from proxy.call_readers import READERS, decode_request, read_calls
from proxy.engine_admin import is_engine_admin
from proxy.engine_connection import SWITCHING_PROTOCOLS, Headers
from proxy.errors import ClientGone, InvalidRequest, ProxyError
from proxy.followed_call import MessageHasher, NotFollowed
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
        self._held_by_mode = {mode: metrics.held_seconds.labels(mode) for mode in Mode}

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
        asked = _Inference(caller.tenant, scope, normalised)
        await self._look_at(asked)
        # What nothing is added to may leave before it is known whose it is. With several engines its place
        # follows from that, unless nobody is to know.
        observes = asked.mode is Mode.OBSERVE and not self._backends.several
        leaves_first = observes or asked.mode is Mode.BYPASS
        if not leaves_first:
            await self._follow(asked)
        edited = await edit_request_body(normalised.body, self._edit(asked.salt, asked.call))
        held = time.perf_counter() - arrived
        self._held_by_mode[asked.mode].observe(held)
        record = the_request()
        record.held_seconds, record.mode, record.speaks = (
            held,
            asked.mode.value,
            asked.mode is not Mode.BYPASS,
        )
        record.normalised = tuple(normalised.counts)
        route = self._route(caller.tenant, asked.model, asked.calls, scope["headers"])

        def added() -> Headers:
            ours = [*asked.call.response_headers()] if asked.call is not None else []
            if self._backends.several:
                ours.append((_BACKEND_HEADER, route.taken_by.encode()))
            return [*ours, (b"server-timing", f"kvtether;dur={held * 1000:.2f}".encode())]

        with ExitStack() as unknown:
            if leaves_first and not asked.broken:
                try:
                    unknown.enter_context(self._tracking.expecting(asked.namespace))
                except Exception:
                    log.exception("a call is not tracked", path=asked.path)
                    self._not_tracked(asked)

            async def listener() -> CallObserver | None:
                if leaves_first:
                    await self._follow(asked, has_left=True)
                    unknown.close()
                call = asked.call
                if call is None:
                    return None
                record.context, record.call = call.request.identity.context_id, call.request.call_id
                return record.listening(TrackedBatch(asked.calls) if len(asked.calls) > 1 else call)

            outcome = await forward_call(
                scope,
                receive,
                send,
                self._observed(route),
                edited.body,
                credentials=self._auth.upstream_credentials(),
                response_headers=added if asked.mode is not Mode.BYPASS else None,
                listener=listener,
                cut_ids=asked.call is not None and asked.call.asks_ids,
            )
        record.ended(outcome)
        call = asked.call
        if call is not None and call.mapping is not None and call.mapping.done():
            record.mapping = call.mapping_kind
        if asked.untracked is not None and 0 < outcome.status < FIRST_ERROR_STATUS:
            # A name that is not ours held us up only if the engine knew it: a typo must not stop reclaim.
            self._tracking.untracked.note(asked.untracked, f"inference of {asked.untracked.model!r}")

    async def _look_at(self, asked: "_Inference") -> None:
        """Which model and salt, and so which mode. Never raises: what cannot be read is forwarded."""
        client_salt: object = None
        try:
            with suppress(NotFollowed):
                asked.document = await decode_request(asked.body)
            if isinstance(asked.document, dict):
                model, client_salt = asked.document.get("model"), asked.document.get(CACHE_SALT)
                asked.named = model if isinstance(model, str) else ""
            asked.salt = self.salt(asked.tenant, client_salt)
            asked.takes(self._tracking.served(asked.named) if asked.path in READERS else asked.named)
            asked.namespace = self._tracking.namespace(asked.model, asked.salt)
            asked.mode = self._modes.of(asked.model, asked.tenant)
        except Exception:
            # The lifecycle side may be broken in any way: the answer is the engine's all the same.
            log.exception("a call is not tracked", path=asked.path)
            self._not_tracked(asked)
            asked.salt = self.salt(asked.tenant, client_salt)

    async def _follow(self, asked: "_Inference", *, has_left: bool = False) -> None:
        """Find whose calls these are and take them in, or note that nobody follows them. Never raises."""
        if asked.broken:
            return
        try:
            reason = "bypass"
            if asked.mode is not Mode.BYPASS:
                try:
                    asked.calls = await self._begin(asked, has_left)
                except NotFollowed as refusal:
                    reason = str(refusal)
                else:
                    return
            self._metrics.untracked.inc()
            asked.takes(asked.named)
            namespace = self._tracking.namespace(asked.model, asked.salt)
            if self._tracking.untracked.knows(asked.model):
                self._tracking.untracked.note(namespace, reason)
            else:
                asked.untracked = namespace
        except Exception:
            log.exception("a call is not tracked", path=asked.path)
            self._not_tracked(asked)

    def _not_tracked(self, asked: "_Inference") -> None:
        asked.broken = True
        with suppress(Exception):
            self._tracking.untracked.note(None, "tracking failed")

    async def _begin(self, asked: "_Inference", has_left: bool) -> Sequence[TrackedCall]:
        """Raises `NotFollowed`."""
        size_bytes, tenant = len(asked.body), asked.tenant
        found = await read_calls(asked.path, asked.document, size_bytes, self._hasher)
        seen = {
            "model": self._tracking.served(found[0].model),
            "size_bytes": size_bytes,
            "normalised": tuple(sorted(asked.normalised.counts)),
        }
        calls = [msgspec.structs.replace(each, **seen) for each in found]
        said = read_lifecycle_fields(asked.headers, calls[0].lifecycle)
        if calls[0].pins:
            said = msgspec.structs.replace(said, pins=(*calls[0].pins, *said.pins))
        harness, of_harness = harness_of(asked.headers), read_harness_call(asked.headers, calls[0].document)
        of_harness = self._hooks.told_of(tenant, of_harness)
        requests = [
            self._tracking.calls.request(
                tenant,
                asked.namespace,
                each,
                fields_of_prompt(said, at, len(calls)),
                harness,
                of_harness,
            )
            for at, each in enumerate(calls)
        ]
        first = await self._tracking.begin(requests[0], has_left=has_left)
        more = [await self._tracking.begin(each, first.placed, has_left=has_left) for each in requests[1:]]
        return [first, *more]

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


class _Inference:
    """A request for inference, and what is known of it by now.

    `named` is the model by the client's word, `model` the one that it means. `untracked` is the cache that it
    uses without being followed, if the engine takes it; `broken` says that the lifecycle side failed over it.
    """

    def __init__(self, tenant: str, scope: Scope, normalised: Normalised) -> None:
        self.tenant = tenant
        self.path: str = scope["path"]
        self.headers: Headers = scope["headers"]
        self.normalised = normalised
        self.document: object = None
        self.named = self.model = self.salt = ""
        self.namespace = Namespace("")
        self.mode = Mode.BYPASS
        self.calls: Sequence[TrackedCall] = ()
        self.untracked: Namespace | None = None
        self.broken = False

    @property
    def body(self) -> bytes:
        return self.normalised.body

    @property
    def call(self) -> TrackedCall | None:
        """The first of its calls, None where it is not followed."""
        return self.calls[0] if self.calls else None

    def takes(self, model: str) -> None:
        """It means that model."""
        self.model = model
        the_request().asks_for(model)
