"""Declared operations, as they reach contexts: those that create one, and those that speak of one."""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from functools import partial
from weakref import WeakValueDictionary

import msgspec

from lifecycle.core.events import OperationApplied, OperationHeld, OperationRejected
from lifecycle.core.ids import ContextKey, Namespace
from lifecycle.core.observations import (
    ContextOpened,
    ForkContext,
    MarkOneOff,
    Operation,
    OperationReceived,
    PinSpan,
    SpawnContext,
)
from lifecycle.core.operations import edit_cost
from lifecycle.core.pins import PinRoom
from lifecycle.core.state import ContextState
from lifecycle.errors import LogUnavailable
from lifecycle.ports import CacheCapabilities, IdSource
from lifecycle.tracker import Tracker
from lifecycle.vocabulary import IdentityRung, OperationStatus, Tier
from proxy.limits import Limits
from proxy.mailbox import Mailboxes
from proxy.tracked_call import CallRequest

NO_SUCH_CONTEXT = "no such context"


class OperationResult(msgspec.Struct, frozen=True, omit_defaults=True):
    """Answer to one operation. `granted` says of a pin what each tier does about it.

    `retry_after` is set where the same operation may be sent again, and says in how many seconds.
    """

    status: OperationStatus
    seq: int
    ctx: str
    reason: str = ""
    granted: dict[str, str] = {}
    retry_after: float = 0.0


class OperationCost(msgspec.Struct, frozen=True, omit_defaults=True):
    """What an operation would cost: tokens that must be computed again, absent if that is not known."""

    seq: int
    ctx: str
    prefill_tokens: int | None = None
    reason: str = ""


class Declarations:
    """Applies operations on behalf of a tenant. Only its own contexts can be reached.

    `bytes_per_token` is 0 while the cache has not told.
    """

    def __init__(
        self,
        tracker: Tracker,
        mailboxes: Mailboxes,
        ids: IdSource,
        limits: Limits,
        bytes_per_token: Callable[[], int],
        capabilities: Callable[[], CacheCapabilities],
        default_namespace: Callable[[], Namespace | None],
    ) -> None:
        self._tracker = tracker
        self._mailboxes = mailboxes
        self._ids = ids
        self._limits = limits
        self._bytes_per_token = bytes_per_token
        self._capabilities = capabilities
        self._default_namespace = default_namespace
        # Weak: a lock lives as long as somebody holds it or waits for it.
        self._pinning: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
        self._changed = asyncio.Event()
        tracker.listeners.append(lambda batch: self._changed.set())

    async def taken_in_before(self, request: CallRequest) -> None:
        """Wait until the operation that a call names as sent before it has been taken in.

        Those that ride on the call itself are taken in with its arrival: only what comes before them is
        waited for.
        """
        fields = request.fields
        if fields.seq is None:
            return
        awaited = min([fields.seq, *(operation.seq - 1 for operation in fields.ops)])
        key = ContextKey(request.tenant, request.identity.context_id)
        while True:
            state = self._tracker.contexts.find(key, request.namespace)
            source = state.sources.get(fields.source) if state is not None else None
            if (source.applied if source is not None else 0) >= awaited:
                return
            self._changed.clear()
            await self._changed.wait()

    @asynccontextmanager
    async def pin_room(self, tenant: str, sets_pins: bool) -> AsyncIterator[PinRoom]:
        """What the tenant may still pin. It stays true as long as the block runs if that `sets_pins`:
        contexts of one tenant must not spend the same room twice."""
        if not sets_pins:
            yield self._limits.pin_room(tenant, self._bytes_per_token())
            return
        lock = self._pinning.get(tenant)
        if lock is None:
            lock = self._pinning[tenant] = asyncio.Lock()
        async with lock:
            yield self._limits.pin_room(tenant, self._bytes_per_token())

    async def submit(
        self, tenant: str, source: str, operations: Sequence[Operation]
    ) -> list[OperationResult]:
        """Apply operations, each behind whatever its context saw before. Raises `LogUnavailable`."""
        results = []
        for operation in operations:
            answer: asyncio.Future[list[OperationResult]] = asyncio.get_running_loop().create_future()
            job = partial(self._answer, answer, tenant, source, operation)
            parent = getattr(operation, "parent", None)
            self._mailboxes.post((tenant, operation.ctx), job, behind=(tenant, parent) if parent else None)
            results += await answer
        return results

    def cost(self, tenant: str, operation: Operation) -> OperationCost:
        """What an edit would cost if it were applied now, by itself. Changes nothing."""
        state = self._tracker.contexts.latest(ContextKey(tenant, operation.ctx))
        if state is None:
            return OperationCost(operation.seq, operation.ctx, reason=NO_SUCH_CONTEXT)
        return OperationCost(operation.seq, operation.ctx, edit_cost(state, operation))

    async def _answer(
        self,
        answer: asyncio.Future[list[OperationResult]],
        tenant: str,
        source: str,
        operation: Operation,
    ) -> None:
        """The job of one operation; whoever asked may have gone meanwhile."""
        try:
            result = await self.apply(tenant, source, [operation])
        except Exception as error:  # noqa: BLE001 - whoever asked is told
            if not answer.done():
                answer.set_exception(error)
        else:
            if not answer.done():
                answer.set_result(result)

    async def apply(
        self, tenant: str, source: str, operations: Sequence[Operation], uid: str = ""
    ) -> list[OperationResult]:
        """One after another; a rejected one does not stop the next.

        `uid` names the context of operations that rode on a call. Raises `LogUnavailable`: what was not
        answered by then was not applied.
        """
        return [await self._apply_one(tenant, source, operation, uid) for operation in operations]

    async def _apply_one(self, tenant: str, source: str, operation: Operation, uid: str) -> OperationResult:
        key = ContextKey(tenant, operation.ctx)
        if uid:
            state: ContextState | None = self._tracker.contexts.states.get(uid)
        else:
            state = self._tracker.contexts.latest(key)
            if state is None and self._tracker.shared:  # another proxy may have begun it just now
                await self._tracker.catch_up()
                state = self._tracker.contexts.latest(key)
        if state is None and isinstance(operation, ForkContext | SpawnContext | MarkOneOff):
            uid = self._ids.new("c")
            refusal = self._limits.open_context(tenant, uid)
            if refusal:
                return _rejected(operation, refusal)
            try:
                state = await self._create(key, uid, operation)
            finally:
                self._limits.opened(tenant, uid)
        if state is None:
            if self._tracker.degraded:
                raise LogUnavailable(self._tracker.degraded)
            return _rejected(operation, NO_SUCH_CONTEXT)
        async with self.pin_room(tenant, _sets_pins(state, source, operation)) as room:
            recorded = await self._tracker.observe(
                state.uid,
                OperationReceived(
                    at_ns=self._tracker.clock.now_ns(),
                    source=source,
                    operation=operation,
                    bytes_per_token=room.bytes_per_token,
                    budget_left_bytes=room.bytes_left,
                    pins_left=room.pins_left,
                ),
            )
        if not recorded and self._tracker.degraded:
            raise LogUnavailable(self._tracker.degraded)
        for entry in recorded:
            match entry.event:
                case OperationApplied(operation=applied) if applied.seq == operation.seq:
                    granted = self._granted() if isinstance(operation, PinSpan) else {}
                    return OperationResult(
                        OperationStatus.APPLIED, operation.seq, operation.ctx, granted=granted
                    )
                case OperationHeld(operation=held) if held.seq == operation.seq:
                    return OperationResult(OperationStatus.HELD, operation.seq, operation.ctx)
                case OperationRejected(seq=seq, reason=reason) if seq == operation.seq:
                    return _rejected(operation, reason)
                case _:
                    pass
        return OperationResult(OperationStatus.DUPLICATE, operation.seq, operation.ctx)

    async def _create(
        self, key: ContextKey, uid: str, operation: ForkContext | SpawnContext | MarkOneOff
    ) -> ContextState | None:
        parent_name = "" if isinstance(operation, MarkOneOff) else operation.parent or ""
        parent_key = ContextKey(key.tenant, parent_name) if parent_name else None
        parent = self._tracker.contexts.latest(parent_key) if parent_key else None
        namespace = parent.namespace if parent is not None else self._default_namespace()
        if namespace is None:
            return None
        return await self._tracker.open(
            ContextOpened(
                at_ns=self._tracker.clock.now_ns(),
                uid=uid,
                tenant=key.tenant,
                context_id=key.context_id,
                namespace=namespace,
                rung=IdentityRung.EXPLICIT,
                reason="declared by an operation",
                parent=parent_name,
                fork=isinstance(operation, ForkContext),
                upto=operation.upto if isinstance(operation, ForkContext) else None,
                one_off=isinstance(operation, MarkOneOff),
                agent=operation.agent or "",
                flow=operation.flow or "",
            ),
            parent_key,
        )

    def _granted(self) -> dict[str, str]:
        """What a granted pin means in each tier: a pin is first of all our own promise not to free."""
        pins_below = "pin" in self._capabilities().supported
        return {
            Tier.L1: "not reclaimed; the cache may evict",
            Tier.L2: "held" if pins_below else "not reclaimed; the cache may evict",
        }


def _sets_pins(state: ContextState, source: str, operation: Operation) -> bool:
    """Whether the operation, or one that waits for it, may set a pin."""
    known = state.sources.get(source)
    held = known.held.values() if known is not None else ()
    return any(isinstance(each, PinSpan) for each in (operation, *held))


def _rejected(operation: Operation, reason: str) -> OperationResult:
    return OperationResult(OperationStatus.REJECTED, operation.seq, operation.ctx, reason)
