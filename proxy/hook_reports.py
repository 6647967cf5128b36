"""What hooks tell, applied to contexts as operations: numbered by the books, once, in the order it came.

Each context has a queue. Whoever posted a hook waits for it only for a moment: a harness must never be held
up, and a hook that finds no context, or nothing to change, changes nothing.
"""

import asyncio
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Iterable, Sequence
from functools import partial
from itertools import takewhile
from typing import assert_never

import structlog

from lifecycle.core.ids import ContextKey
from lifecycle.core.observations import (
    CloseContext,
    DeclareResumed,
    DeclareWaiting,
    Operation,
    ReplaceMessages,
    SpawnContext,
)
from lifecycle.core.state import ContextState
from lifecycle.core.tree import editable_list
from lifecycle.errors import LogUnavailable
from lifecycle.tracker import Tracker
from lifecycle.vocabulary import OperationStatus, WaitKind
from proxy.declarations import NO_SUCH_CONTEXT, Declarations
from proxy.hook_facts import (
    CompactionBegins,
    CompactionDone,
    GoesOn,
    HookFact,
    Over,
    SubagentBegan,
    TurnOver,
    Waits,
)
from proxy.limits import Limits
from proxy.mailbox import Mailboxes
from proxy.tasks import Tasks

log = structlog.get_logger(__name__)

SOURCE_PREFIX = "hooks:"
"""Before the harness's name: whose numbering these operations follow."""

NUM_COMPACTIONS_KEPT = 4096
"""Compactions under way that are remembered, those that began last."""

_TRIES = 3
"""How often an operation is numbered anew where another proxy took its number."""

_CALM_LOOKS, _CALM_SECONDS = 40, 0.05
"""A wait is declared behind the end of the call that it follows; the harness may have seen that end first."""

_ASKED_ROLES = ("system", "developer", "user")

Writer = Callable[[ContextState, int], Operation | None]
"""The operation that a context's state asks for, under a number; None if there is nothing to change."""


class HookReports:
    """Applies what hooks tell, for a tenant's own contexts."""

    def __init__(
        self,
        tracker: Tracker,
        declarations: Declarations,
        mailboxes: Mailboxes,
        limits: Limits,
        tasks: Tasks,
    ) -> None:
        self._tracker = tracker
        self._declarations = declarations
        self._mailboxes = mailboxes
        self._limits = limits
        self._queues = Mailboxes(tasks)
        self._compactions: OrderedDict[ContextKey, tuple[str, int]] = OrderedDict()

    def post(self, tenant: str, harness: str, facts: Sequence[HookFact]) -> asyncio.Future[str]:
        """Queue what a hook tells. The result is why nothing came of it, or empty; it never raises."""
        answer: asyncio.Future[str] = asyncio.get_running_loop().create_future()

        async def work() -> None:
            reasons: list[str] = []
            try:
                for fact in facts:
                    reasons.append(await self._take(tenant, SOURCE_PREFIX + harness, fact))
            except LogUnavailable as error:
                reasons.append(str(error))
                log.warning("what a hook told is not recorded", harness=harness, error=str(error))
            except Exception:
                reasons.append("internal error")
                log.exception("what a hook told is not recorded", harness=harness)
            finally:
                answer.set_result("; ".join(filter(None, reasons)))

        parent = next((fact.parent for fact in facts if isinstance(fact, SubagentBegan)), None)
        self._queues.post((tenant, facts[0].ctx), work, behind=(tenant, parent) if parent else None)
        return answer

    async def settled(self) -> None:
        """Wait until everything that was posted is applied."""
        await self._queues.settled()

    async def _take(self, tenant: str, source: str, fact: HookFact) -> str:
        key = ContextKey(tenant, fact.ctx)
        match fact:
            case CompactionBegins():
                return await self._begin_compaction(key)
            case CompactionDone(keeps_asked=keeps_asked):
                return await self._edit(key, source, partial(self._replacement, keeps_asked))
            case SubagentBegan(parent=parent):
                return await self._spawn(key, source, parent)
            case Waits(kind=kind, tool=tool):
                await self._calm(key)
                return await self._edit(key, source, partial(_waiting, kind, tool))
            case GoesOn():
                return await self._edit(key, source, _resumed)
            case TurnOver():
                await self._calm(key)
                return await self._edit(key, source, _turn_over)
            case Over(subagents=subagents):
                return await self._end(key, source, subagents)
            case _:
                assert_never(fact)

    async def _calm(self, key: ContextKey) -> None:
        """Until the context has no call in flight, for a moment at most."""
        for _ in range(_CALM_LOOKS):
            state = self._tracker.contexts.latest(key)
            if state is None or not state.flights:
                return
            await asyncio.sleep(_CALM_SECONDS)

    async def _begin_compaction(self, key: ContextKey) -> str:
        """Remember where the history ends that is about to be replaced."""

        async def note() -> str:
            state = self._tracker.contexts.latest(key)
            messages = editable_list(state) if state is not None else ()
            if state is None or not messages:
                return NO_SUCH_CONTEXT
            self._compactions[key] = (state.uid, messages[-1].id)
            self._compactions.move_to_end(key)
            while len(self._compactions) > NUM_COMPACTIONS_KEPT:
                self._compactions.popitem(last=False)
            return ""

        return await self._in_turn(key, note)

    def _replacement(self, keeps_asked: bool, state: ContextState, seq: int) -> Operation | None:
        """What takes out the history that the compaction found.

        Nothing, if no compaction was seen to begin, or if a call has shown the list behind it already. How
        many messages there are now the next call shows.
        """
        uid, last = self._compactions.get(state.key, ("", -1))
        messages = editable_list(state)
        if uid != state.uid or all(message.id != last for message in messages):
            return None
        asked = takewhile(lambda message: message.role in _ASKED_ROLES, messages)
        kept = sum(1 for _ in asked) if keeps_asked else 0
        if kept == len(messages):
            return None
        return ReplaceMessages(seq=seq, ctx=state.key.context_id, span=(kept, len(messages)), n=1)

    async def _spawn(self, key: ContextKey, source: str, parent: str) -> str:
        async def spawn() -> str:
            if self._tracker.contexts.latest(key) is not None:
                return ""
            refusal = self._refusal(key.tenant)
            if refusal:
                return refusal
            operation = SpawnContext(seq=1, ctx=key.context_id, parent=parent)
            [result] = await self._declarations.apply(key.tenant, source, [operation])
            return result.reason

        return await self._in_turn(key, spawn, behind=ContextKey(key.tenant, parent))

    async def _end(self, key: ContextKey, source: str, subagents: bool) -> str:
        over = [s for s in self._tracker.contexts.of_tenant(key.tenant) if s.key == key]
        if not over:
            return NO_SUCH_CONTEXT
        if subagents:
            over += _descendants({s.uid for s in over}, self._tracker.contexts.of_tenant(key.tenant))
        reasons = [await self._edit(s.key, source, _close, s.uid) for s in over if s.open]
        return "; ".join(filter(None, reasons))

    async def _edit(self, key: ContextKey, source: str, write: Writer, uid: str = "") -> str:
        """Apply what `write` says of the context as it is when its turn comes."""

        async def edit() -> str:
            for _ in range(_TRIES):
                contexts = self._tracker.contexts
                state = contexts.states.get(uid) if uid else contexts.latest(key)
                if state is None:
                    return NO_SUCH_CONTEXT
                known = state.sources.get(source)
                operation = write(state, (known.applied if known is not None else 0) + 1)
                if operation is None:
                    return ""
                refusal = self._refusal(key.tenant)
                if refusal:
                    return refusal
                [result] = await self._declarations.apply(key.tenant, source, [operation], state.uid)
                if result.status is not OperationStatus.DUPLICATE:
                    return result.reason
            return "another proxy numbers its operations all the time"

        return await self._in_turn(key, edit)

    def _refusal(self, tenant: str) -> str:
        return self._limits.operation_refusal(tenant) if self._limits.operation(tenant) else ""

    async def _in_turn(
        self, key: ContextKey, work: Callable[[], Awaitable[str]], behind: ContextKey | None = None
    ) -> str:
        """Do it behind whatever the context saw before."""
        answer: asyncio.Future[str] = asyncio.get_running_loop().create_future()

        async def job() -> None:
            try:
                answer.set_result(await work())
            except Exception as error:  # noqa: BLE001 - whoever posted it is told
                answer.set_exception(error)

        before = (behind.tenant, behind.context_id) if behind is not None else None
        self._mailboxes.post((key.tenant, key.context_id), job, before)
        return await answer


def _waiting(kind: WaitKind, tool: str, state: ContextState, seq: int) -> Operation | None:
    waits = (state.wait, state.wait_tool) == (kind, tool) and state.wait_eta != 0.0
    if not state.open or waits:
        return None
    return DeclareWaiting(seq=seq, ctx=state.key.context_id, kind=kind, tool=tool or None)


def _resumed(state: ContextState, seq: int) -> Operation | None:
    """A context whose wait is over, or whose call is under way, is told nothing new."""
    if not state.open or state.flights or state.wait_eta == 0.0:
        return None
    return DeclareResumed(seq=seq, ctx=state.key.context_id)


def _turn_over(state: ContextState, seq: int) -> Operation | None:
    if state.parent_uid:
        return _close(state, seq)
    return _waiting(WaitKind.HUMAN, "", state, seq)


def _close(state: ContextState, seq: int) -> Operation | None:
    return CloseContext(seq=seq, ctx=state.key.context_id) if state.open else None


def _descendants(uids: set[str], states: Iterable[ContextState]) -> list[ContextState]:
    """Whoever was begun by one of these, or by one that was."""
    found: list[ContextState] = []
    left = [s for s in states if s.parent_uid]
    while more := [s for s in left if s.parent_uid in uids and s.uid not in uids]:
        found += more
        uids |= {s.uid for s in more}
    return found
