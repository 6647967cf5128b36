"""What is let go from memory: the mapping states of contexts that are over, for nobody maps on from them, the
lists of those that were closed, and the conversations of a tenant that is erased, at whichever proxy of the
log."""

from collections.abc import Mapping, Sequence

from lifecycle.core.events import ContextClosed, Event, OperationApplied, RecordedEvent
from lifecycle.core.ids import context_stream
from lifecycle.core.leases import LEASE_OVER
from lifecycle.core.observations import CloseContext
from lifecycle.core.state import ContextState
from lifecycle.tracker import Tracker
from proxy.call_recognition import CallRecognition
from proxy.models import MappedModel

ERASED = "the tenant is erased"
"""Why the contexts of an erased tenant are closed: by this the other proxies know."""

_PREFIX = context_stream("")


class Forgetting:
    """A listener of the tracker. What is pinned keeps its mapping: a cache may ask for its tokens."""

    def __init__(self, tracker: Tracker, models: Mapping[str, MappedModel], calls: CallRecognition) -> None:
        self._tracker = tracker
        self._models = models
        self._calls = calls

    def heard(self, batch: Sequence[RecordedEvent]) -> None:
        """Drop the states of contexts that have nothing left after these events, the lists of those that are
        over, and what was said before by tenants that these erase."""
        states = self._tracker.contexts.states
        erased = {r.stream for r in batch if isinstance(r.event, ContextClosed) and r.event.reason == ERASED}
        closed = (states.get(stream.removeprefix(_PREFIX)) for stream in erased)
        for tenant in {state.key.tenant for state in closed if state is not None}:
            self._calls.forget_tenant(tenant)
        told = {r.stream.removeprefix(_PREFIX) for r in batch if _says_over(r.event)}
        for uid in {r.stream.removeprefix(_PREFIX) for r in batch if r.stream.startswith(_PREFIX)}:
            state = states.get(uid)
            if state is None or state.open or state.flights:
                continue
            latest = self._tracker.contexts.latest(state.key) or state
            if _is_over(latest, uid in told):
                self._calls.forget(latest)
            model = self._models.get(state.namespace.model)
            if not state.pins and model is not None and model.service is not None:
                model.service.forget(uid)


def _says_over(event: Event) -> bool:
    return isinstance(event, OperationApplied) and isinstance(event.operation, CloseContext)


def _is_over(state: ContextState, told: bool) -> bool:
    """Whether somebody said so, now (`told`) or when it was closed. A list whose lease ended may yet be gone
    on with, and a one-off may turn out to be none."""
    if state.open or state.flights or state.one_off:
        return False
    return told or not state.closed.startswith(LEASE_OVER)
