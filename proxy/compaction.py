"""A compaction that the engine makes: its answer stands in place of what it summed up."""

import structlog

from lifecycle.core.ids import ContextKey
from lifecycle.core.observations import ReplaceMessages
from lifecycle.core.tree import editable_list
from lifecycle.errors import LogUnavailable
from lifecycle.tracker import Tracker
from proxy.answer_facts import AnswerFacts
from proxy.declarations import Declarations
from proxy.tasks import Tasks
from proxy.tracked_call import CallRequest

log = structlog.get_logger(__name__)

SOURCE = "compaction"
"""Whose numbering these operations follow."""


class Compactions:
    """Declares, in the name of the agent, that the list of a context was replaced."""

    def __init__(self, tracker: Tracker, declarations: Declarations, tasks: Tasks) -> None:
        self._tracker = tracker
        self._declarations = declarations
        self._tasks = tasks

    def answered(self, request: CallRequest, facts: AnswerFacts) -> None:
        """A call was answered; if it was a compaction of a known context, its list is declared replaced."""
        if request.asked.compacts and request.identity.parent and facts.num_items:
            self._tasks.spawn(self._declare(request.tenant, request.identity.parent, facts.num_items))

    async def _declare(self, tenant: str, context_id: str, num_items: int) -> None:
        state = self._tracker.contexts.latest(ContextKey(tenant, context_id))
        if state is None:
            return
        source = state.sources.get(SOURCE)
        operation = ReplaceMessages(
            seq=(source.applied if source is not None else 0) + 1,
            ctx=context_id,
            span=(0, len(editable_list(state))),
            n=num_items,
        )
        try:
            await self._declarations.submit(tenant, SOURCE, [operation])
        except LogUnavailable as error:
            log.warning("a compaction is not declared", context=context_id, error=str(error))
