"""Writes into the log what is lost with an engine, and has the rest looked at."""

import asyncio
from collections.abc import Callable

import structlog

from engine_bridge.cache_events import EventBatch, IncarnationChanged
from engine_bridge.placement_watch import PlacementWatch
from lifecycle.core.events import BackendLost
from lifecycle.errors import LogUnavailable
from lifecycle.tracker import Tracker
from proxy.backends import Backend
from proxy.tasks import Tasks

log = structlog.get_logger(__name__)

AGAIN_SECONDS = 1.0
"""Pause before the log is tried again."""


class BackendLoss:
    """Hears that engines are gone, from their health and from their own event streams. `begun` is set when
    there are books to write to; of several proxies the one that `owns` them writes."""

    def __init__(
        self,
        tracker: Tracker,
        placement: PlacementWatch,
        tasks: Tasks,
        begun: asyncio.Event,
        owns: Callable[[], bool],
    ) -> None:
        self._tracker = tracker
        self._placement = placement
        self._tasks = tasks
        self._begun = begun
        self._owns = owns
        self._told: set[str] = set()

    def gone(self, backend: Backend, reason: str) -> None:
        """It takes no calls any more. What its memory holds counts as lost, though it may only be silent."""
        self._told.add(backend.name)
        self._tasks.spawn(self._record(backend.name, reason))

    def heard(self, backend: Backend, batch: EventBatch) -> None:
        """Its own events say that it started anew; once, if it was seen to be away before."""
        if any(isinstance(event, IncarnationChanged) for event in batch.events):
            if backend.name in self._told:
                self._told.discard(backend.name)
            elif backend.name:
                self._tasks.spawn(self._record(backend.name, "it started anew"))

    async def _record(self, name: str, reason: str) -> None:
        await self._begun.wait()
        states = self._tracker.contexts.states.values()
        lost = sorted({s.namespace.cache for s in states if s.backend == name}) if self._owns() else []
        for namespace in lost:
            event = BackendLost(
                at_ns=self._tracker.clock.now_ns(), namespace=namespace, backend=name, reason=reason
            )
            while True:
                try:
                    await self._tracker.record(namespace, [event])
                except LogUnavailable as error:
                    log.warning("the loss of an engine waits for the event log", error=str(error))
                    await asyncio.sleep(AGAIN_SECONDS)
                else:
                    break
        self._placement.doubt(f"engine {name} is gone: {reason}")
