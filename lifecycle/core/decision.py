"""A decision under construction: the events so far and the state they lead to."""

from typing import Final

from lifecycle.core.events import ContextEvent
from lifecycle.core.evolve import evolve
from lifecycle.core.state import ContextState


class Decision:
    """Collects events; every one is evolved at once, so that the next is decided on what is true by then."""

    def __init__(self, state: ContextState, at_ns: int) -> None:
        self.state = state
        self.at_ns: Final = max(at_ns, state.last_ns)
        self.events: list[ContextEvent] = []

    def emit(self, event: ContextEvent) -> None:
        """Record an event. Its `at_ns` is `self.at_ns`: time never runs backwards in a stream."""
        self.events.append(event)
        self.state = evolve(self.state, event)
