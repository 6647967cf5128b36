"""Writes into the log what is lost with an engine, and has the rest looked at."""

import asyncio
from collections.abc import Callable, Sequence

import msgspec
import structlog

from engine_bridge.cache_events import EventBatch, IncarnationChanged
from engine_bridge.placement_watch import PlacementWatch
from lifecycle.core.events import BackendLost, RecordedEvent
from lifecycle.errors import LogUnavailable
from lifecycle.tracker import Tracker
from proxy.backends import Backend

log = structlog.get_logger(__name__)

AGAIN_SECONDS = 1.0
"""Pause before the log is tried again."""

SAME_NS = 60 * 10**9
"""Proxies do not see a loss at the same moment: what two of them say within this time is one loss, and for so
long a loss that the owner may not have lived to record is worth recording, though the engine is back."""


class _Loss(msgspec.Struct, frozen=True):
    """A loss that the log does not tell of yet, as far as is known here."""

    backend: Backend
    reason: str
    at_ns: int


class BackendLoss:
    """Hears that engines are gone, from their health and from their own event streams.

    Of several proxies the one that `owns` the books writes. The others keep what they saw until they read it
    in the log: an owner may die with an engine, and then its successor writes.
    """

    def __init__(self, tracker: Tracker, placement: PlacementWatch, owns: Callable[[], bool]) -> None:
        self._tracker = tracker
        self._placement = placement
        self._owns = owns
        self._told: set[str] = set()
        self._due: list[_Loss] = []
        self._recorded_ns: dict[str, int] = {}
        self._wake = asyncio.Event()
        tracker.listeners.append(self._read)

    def gone(self, backend: Backend, reason: str) -> None:
        """It takes no calls any more. What its memory holds counts as lost, though it may only be silent."""
        self._told.add(backend.name)
        self._falls_due(backend, reason)

    def back(self, backend: Backend) -> None:
        """It takes calls again: the next loss is another one."""
        self._recorded_ns.pop(backend.name, None)

    def heard(self, backend: Backend, batch: EventBatch) -> None:
        """Its own events say that it started anew; once, if it was seen to be away before.

        If instead they go on as before while it is well, it was only silent: its end is still to come.
        """
        if not backend.name:
            return
        if not any(isinstance(event, IncarnationChanged) for event in batch.events):
            if not backend.down:
                self._told.discard(backend.name)
        elif backend.name in self._told:
            self._told.discard(backend.name)
        else:
            self._falls_due(backend, "it started anew")

    async def run(self) -> None:
        """Write what is due, as long as this proxy is the owner, until cancelled."""
        while True:
            while self._due:
                loss = self._due[0]
                if loss.backend.down or self._tracker.clock.now_ns() - loss.at_ns < SAME_NS:
                    await self._record(loss)
                self._due = [each for each in self._due if each is not loss]
            await self._wake.wait()
            self._wake.clear()

    def _falls_due(self, backend: Backend, reason: str) -> None:
        """One for each engine at most: a later one says all that an earlier one says."""
        now_ns = self._tracker.clock.now_ns()
        self._placement.doubt(f"engine {backend.name} is gone: {reason}")
        if not self._owns() and now_ns - self._recorded_ns.get(backend.name, 0) < SAME_NS:
            return
        self._due = [each for each in self._due if each.backend is not backend]
        self._due.append(_Loss(backend, reason, now_ns))
        self._wake.set()

    def _read(self, batch: Sequence[RecordedEvent]) -> None:
        """What the log tells of is due no more."""
        for recorded in batch:
            if isinstance(event := recorded.event, BackendLost):
                self._recorded_ns[event.backend] = event.at_ns
                until_ns = event.at_ns + (0 if self._owns() else SAME_NS)
                self._due = [d for d in self._due if d.backend.name != event.backend or d.at_ns > until_ns]

    async def _record(self, loss: _Loss) -> None:
        name = loss.backend.name
        states = self._tracker.contexts.states.values()
        for namespace in sorted({s.namespace.cache for s in states if s.backend == name}):
            event = BackendLost(
                at_ns=self._tracker.clock.now_ns(), namespace=namespace, backend=name, reason=loss.reason
            )
            while True:
                try:
                    await self._tracker.record(namespace, [event])
                except LogUnavailable as error:
                    log.warning("the loss of an engine waits for the event log", error=str(error))
                    await asyncio.sleep(AGAIN_SECONDS)
                else:
                    break
