"""What hooks tell, applied to contexts as operations: numbered by the books, once, in the order it came.

Whoever posted a hook waits for it only for a moment: a harness must never be held up. A hook that finds no
context, or nothing to change, changes nothing.
"""

import asyncio
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Iterable
from functools import partial
from itertools import takewhile
from typing import TypeVar, assert_never

import structlog

from lifecycle.core.ids import ContextKey
from lifecycle.core.leases import LEASE_OVER
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

COMPACTION_SECONDS = 600.0
"""Longest that a compaction is taken to be under way where no other hook says that it is not."""

NUM_COMPACTIONS_KEPT = 4096
"""Compactions under way that are remembered, those that began last."""

_TRIES = 3
"""How often an operation is numbered anew where another proxy took its number."""

_CALM_LOOKS, _CALM_SECONDS = 40, 0.05
"""How often and how long it is waited for the end of a call that a wait follows."""

_INSTRUCTIONS = ("system", "developer")
_ASKED = (*_INSTRUCTIONS, "user")

V = TypeVar("V")

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
        self._tasks = tasks
        self._open: set[asyncio.Task[str]] = set()
        self._newest: dict[ContextKey, HookFact] = {}
        self._compacting: OrderedDict[ContextKey, float] = OrderedDict()
        self._histories: OrderedDict[ContextKey, tuple[str, int]] = OrderedDict()

    def post(self, tenant: str, harness: str, fact: HookFact) -> asyncio.Task[str]:
        """Queue what a hook tells. The result is why nothing came of it, or empty; it never raises."""
        key = ContextKey(tenant, fact.ctx)
        self._newest[key] = fact
        self._compacting.pop(key, None)
        if isinstance(fact, CompactionBegins):
            _put(self._compacting, key, asyncio.get_running_loop().time() + COMPACTION_SECONDS)
        task = self._tasks.run(self._applied(key, SOURCE_PREFIX + harness, fact))
        self._open.add(task)
        task.add_done_callback(self._open.discard)
        return task

    def compacting(self, tenant: str, context_id: str) -> bool:
        """Whether the next call of a context is the one that sums it up."""
        until = self._compacting.get(ContextKey(tenant, context_id), 0.0) if self._compacting else 0.0
        return until > asyncio.get_running_loop().time()

    async def settled(self) -> None:
        """Wait until everything that was posted is applied."""
        while self._open:
            await asyncio.wait(self._open)

    async def _applied(self, key: ContextKey, source: str, fact: HookFact) -> str:
        try:
            return await self._take(key, source, fact)
        except LogUnavailable as error:
            log.warning("what a hook told is not recorded", source=source, error=str(error))
            return str(error)
        except Exception:
            log.exception("what a hook told is not recorded", source=source)
            return "internal error"
        finally:
            if self._newest.get(key) is fact:
                del self._newest[key]

    async def _take(self, key: ContextKey, source: str, fact: HookFact) -> str:
        match fact:
            case CompactionBegins():
                return await self._note_history(key)
            case CompactionDone(keeps_asked=keeps_asked):
                uid, last = self._histories.get(key, ("", -1))
                if not uid:
                    return "no compaction began"
                return await self._edit(key, source, partial(_replacement, keeps_asked, last), uid)
            case SubagentBegan(parent=parent):
                return await self._spawn(key, source, parent)
            case Waits(kind=kind, tool=tool):
                return await self._wait(key, source, fact, partial(_waiting, kind, tool))
            case GoesOn():
                return await self._edit(key, source, _resumed)
            case TurnOver():
                return await self._wait(key, source, fact, _turn_over)
            case Over(subagents=subagents):
                return await self._end(key, source, subagents)
            case _:
                assert_never(fact)

    async def _wait(self, key: ContextKey, source: str, fact: HookFact, write: Writer) -> str:
        """Declare a wait behind the end of the call that it follows, which the harness may have seen before
        us. A hook that comes meanwhile knows better."""
        for _ in range(_CALM_LOOKS):
            state = self._tracker.contexts.latest(key)
            if state is None or not state.flights:
                break
            await asyncio.sleep(_CALM_SECONDS)
            if self._newest.get(key) is not fact:
                return "a later hook tells otherwise"
        return await self._edit(key, source, write)

    async def _note_history(self, key: ContextKey) -> str:
        """Remember where the history ends that is about to be replaced.

        Of several models' contexts under one name it is that of the longest list: the others' are asides.
        """

        async def note() -> str:
            states = [s for s in self._tracker.contexts.of_tenant(key.tenant) if s.key == key and s.open]
            state = max(states, key=lambda s: (len(editable_list(s)), s.uid), default=None)
            messages = editable_list(state) if state is not None else ()
            if state is None or not messages:
                return NO_SUCH_CONTEXT
            _put(self._histories, key, (state.uid, messages[-1].id))
            return ""

        return await self._in_turn(key, note)

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


def _put(into: OrderedDict[ContextKey, V], key: ContextKey, value: V) -> None:
    into[key] = value
    into.move_to_end(key)
    while len(into) > NUM_COMPACTIONS_KEPT:
        into.popitem(last=False)


def _replacement(keeps_asked: bool, last: int, state: ContextState, seq: int) -> Operation | None:
    """What takes out the history that ended with the message `last` when the compaction began.

    Nothing, if a call has shown the list behind it already. How many messages there are now the next call
    shows.
    """
    messages = editable_list(state)
    if all(message.id != last for message in messages):
        return None
    stays = _ASKED if keeps_asked else _INSTRUCTIONS
    kept = sum(1 for _ in takewhile(lambda message: message.role in stays, messages))
    if kept == len(messages):
        return None
    return ReplaceMessages(seq=seq, ctx=state.key.context_id, span=(kept, len(messages)), n=1)


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
    is_over = not state.open and not state.closed.startswith(LEASE_OVER)
    return None if is_over else CloseContext(seq=seq, ctx=state.key.context_id)


def _descendants(uids: set[str], states: Iterable[ContextState]) -> list[ContextState]:
    """Whoever was begun by one of these, or by one that was."""
    found: list[ContextState] = []
    left = [s for s in states if s.parent_uid]
    while more := [s for s in left if s.parent_uid in uids and s.uid not in uids]:
        found += more
        uids |= {s.uid for s in more}
    return found
