"""What holds text in memory and is let go: the mapping states of contexts that are over, for nobody maps on
from them, and the conversations of a tenant that is erased, at whichever proxy of the log."""

from collections.abc import Mapping, Sequence

from lifecycle.core.events import ContextClosed, RecordedEvent
from lifecycle.core.ids import context_stream
from lifecycle.tracker import Tracker
from proxy.models import MappedModel
from proxy.response_chains import ResponseChains

ERASED = "the tenant is erased"
"""Why the contexts of an erased tenant are closed: by this the other proxies know."""

_PREFIX = context_stream("")


class Forgetting:
    """A listener of the tracker. What is pinned keeps its state: a cache may ask for its tokens."""

    def __init__(self, tracker: Tracker, models: Mapping[str, MappedModel], chains: ResponseChains) -> None:
        self._tracker = tracker
        self._models = models
        self._chains = chains

    def heard(self, batch: Sequence[RecordedEvent]) -> None:
        """Drop the states of contexts that have nothing left after these events, and what was said before by
        tenants that these erase."""
        erased = {r.stream for r in batch if isinstance(r.event, ContextClosed) and r.event.reason == ERASED}
        states = self._tracker.contexts.states
        closed = (states.get(stream.removeprefix(_PREFIX)) for stream in erased)
        for tenant in {state.key.tenant for state in closed if state is not None}:
            self._chains.forget_tenant(tenant)
        for uid in {r.stream.removeprefix(_PREFIX) for r in batch if r.stream.startswith(_PREFIX)}:
            state = states.get(uid)
            if state is None or state.open or state.pins or state.flights:
                continue
            model = self._models.get(state.namespace.model)
            if model is not None and model.service is not None:
                model.service.forget(uid)
