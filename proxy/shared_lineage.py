"""What other processes know of whose list is whose, told by the log: any proxy knows any context again.

A process keeps the lists of the calls that it took in. Those of the others, and of itself before it started,
are in the books: digests and roles of the messages, and of each answer what clients give back of it.
"""

import asyncio
from collections.abc import Sequence

from engine_bridge.errors import Unmappable
from engine_bridge.mapping.service import Prompt
from lifecycle.core.events import CallArrived, CallEnded, RecordedEvent
from lifecycle.core.ids import context_stream
from lifecycle.core.observations import MessageFact
from lifecycle.core.state import ContextState, Version, facts, path
from lifecycle.tracker import Tracker
from proxy.followed_call import FollowedCall, MessageShape
from proxy.lineage import LineageIndex

_NO_FACT = MessageFact(b"", "assistant")
"""Of an answer only what ties it to its context counts."""

CONTEXTS_PER_TURN = 20
"""Contexts that are recalled before calls get their turn."""


class SharedLineage:
    """Listens to a tracker and tells an index. `recall` tells it what was true when the books were read."""

    def __init__(self, tracker: Tracker, index: LineageIndex) -> None:
        self._tracker = tracker
        self._index = index
        tracker.listeners.append(self._heard)

    async def recall(self) -> None:
        """Know the open contexts of the books that were read at the start, the last used one last."""
        await self._tracker.read.wait()
        states = self._tracker.contexts.states
        before = [s for s in states.values() if s.open and not s.flights]
        for number, known in enumerate(sorted(before, key=lambda s: (s.active_ns, s.uid)), start=1):
            state = states.get(known.uid)  # others had their turn since
            if state is None or not state.open or state.flights:
                continue
            branch = state.current_branch()
            if branch is not None and not self._index.knows(state.key.tenant, state.key.context_id):
                call_id = next(reversed(list(state.attempts)), "")
                self._know(state, branch.tip, call_id)
                self._index.observe_end(state.key.tenant, state.key.context_id, call_id)
            if number % CONTEXTS_PER_TURN == 0:
                await asyncio.sleep(0)

    def _heard(self, batch: Sequence[RecordedEvent]) -> None:
        if not self._tracker.shared:  # this process told the index itself, when it happened
            return
        for recorded in batch:
            event = recorded.event
            if isinstance(event, CallArrived | CallEnded):
                state = self._tracker.contexts.states.get(recorded.stream.removeprefix(context_stream("")))
                if state is not None:
                    self._take(state, event)

    def _take(self, state: ContextState, event: CallArrived | CallEnded) -> None:
        tenant, context_id = state.key.tenant, state.key.context_id
        if isinstance(event, CallEnded):
            shapes = [MessageShape(_NO_FACT, a.echo, a.tool_calls) for a in event.answers]
            self._index.observe_end(tenant, context_id, event.call_id, shapes)
        elif event.proxy != self._tracker.name:
            flight = state.flight(event.call_id, event.attempt)
            branch = state.current_branch()
            if flight is not None:
                self._know(state, flight.tip, event.call_id)
            elif branch is not None:  # it ended in the same breath
                self._know(state, branch.tip, event.call_id)

    def _know(self, state: ContextState, tip: int, call_id: str) -> None:
        head, *rest = path(state.versions, tip)
        messages: list[Version] = [v for v in rest if v.index >= 0]
        call = FollowedCall(
            document={},
            model=state.namespace.model,
            messages=tuple(MessageShape(fact) for fact in facts(messages)),
            head=head.digest,
            prompt=_no_prompt,
        )
        if messages:
            self._index.observe_call(state.key.tenant, state.key.context_id, call_id, call)


def _no_prompt() -> Prompt:
    """The texts of a call that another process took in are not known here."""
    raise Unmappable("its texts are not known here")
