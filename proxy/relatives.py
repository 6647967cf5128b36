"""What a call means to another context than its own, said there in the name of the agent.

A compaction by the engine replaces the list that it summed up; the last word of a session ends its context;
whoever sent a subagent waits for it.
"""

from collections.abc import Callable

import structlog

from lifecycle.core.ids import ContextKey
from lifecycle.core.observations import CloseContext, DeclareWaiting, Operation, ReplaceMessages
from lifecycle.core.state import ContextState
from lifecycle.core.tree import editable_list
from lifecycle.errors import LogUnavailable
from lifecycle.tracker import Tracker
from lifecycle.vocabulary import WaitKind
from proxy.answer_facts import AnswerFacts
from proxy.declarations import Declarations
from proxy.known_lists import Relation
from proxy.mailbox import Mailboxes
from proxy.tracked_call import CallRequest

log = structlog.get_logger(__name__)

COMPACTION = "compaction"
RECOGNITION = "recognition"
"""Whose numbering these operations follow."""

_AGENT_WAITS = frozenset({WaitKind.TOOL, WaitKind.SUBAGENT})


class Relatives:
    """Declares, in the order of each context's own events, what calls of others tell of it."""

    def __init__(self, tracker: Tracker, declarations: Declarations, mailboxes: Mailboxes) -> None:
        self._tracker = tracker
        self._declarations = declarations
        self._mailboxes = mailboxes

    def began(self, request: CallRequest) -> None:
        """A call was given to a context; if that is a new subagent, whoever sent it waits for it.

        Its lease is then that of a subagent's wait: a tool's would be over before many of them.
        """
        identity = request.identity

        def wait(state: ContextState, seq: int) -> Operation | None:
            if not state.open or state.flights or state.wait not in _AGENT_WAITS:
                return None
            return DeclareWaiting(
                seq=seq, ctx=identity.parent, kind=WaitKind.SUBAGENT, tool=state.wait_tool or None
            )

        if identity.relation is Relation.SUBAGENT and identity.parent:
            self._declare(request.tenant, identity.parent, RECOGNITION, wait)

    def ended(self, request: CallRequest, facts: AnswerFacts | None) -> None:
        """A call is over; `facts` are its answer if it completed."""
        identity = request.identity

        def replace(state: ContextState, seq: int) -> Operation | None:
            num_items = facts.num_items if facts is not None else 0
            span = (0, len(editable_list(state)))
            return ReplaceMessages(seq=seq, ctx=identity.parent, span=span, n=num_items)

        def close(state: ContextState, seq: int) -> Operation | None:
            return CloseContext(seq=seq, ctx=identity.ends) if state.open else None

        if request.asked.compacts and identity.parent and facts is not None and facts.num_items:
            self._declare(request.tenant, identity.parent, COMPACTION, replace)
        if identity.ends:
            self._declare(request.tenant, identity.ends, RECOGNITION, close)

    def _declare(
        self,
        tenant: str,
        context_id: str,
        source: str,
        operation: Callable[[ContextState, int], Operation | None],
    ) -> None:
        async def job() -> None:
            state = self._tracker.contexts.latest(ContextKey(tenant, context_id))
            if state is None:
                return
            known = state.sources.get(source)
            declared = operation(state, (known.applied if known is not None else 0) + 1)
            if declared is None:
                return
            try:
                await self._declarations.apply(tenant, source, [declared])
            except LogUnavailable as error:
                log.warning(
                    "what a call told of another context is lost", context=context_id, error=str(error)
                )

        self._mailboxes.post((tenant, context_id), job)
