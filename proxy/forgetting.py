"""Mapping states of contexts that are over: nobody maps on from them, and each holds a prompt's text."""

from collections.abc import Mapping, Sequence

from lifecycle.core.events import RecordedEvent
from lifecycle.core.ids import context_stream
from lifecycle.tracker import Tracker
from proxy.models import MappedModel

_PREFIX = context_stream("")


class Forgetting:
    """A listener of the tracker. What is pinned keeps its state: a cache may ask for its tokens."""

    def __init__(self, tracker: Tracker, models: Mapping[str, MappedModel]) -> None:
        self._tracker = tracker
        self._models = models

    def heard(self, batch: Sequence[RecordedEvent]) -> None:
        """Drop the states of contexts that have nothing left after these events."""
        for uid in {r.stream.removeprefix(_PREFIX) for r in batch if r.stream.startswith(_PREFIX)}:
            state = self._tracker.contexts.states.get(uid)
            if state is None or state.open or state.pins or state.flights:
                continue
            model = self._models.get(state.namespace.model)
            if model is not None and model.service is not None:
                model.service.forget(uid)
