"""Inference that goes out without being followed: whose chunks nobody can tell from dead ones for a while."""

from collections.abc import Mapping

import structlog

from lifecycle.core.ids import Namespace
from lifecycle.errors import LogUnavailable
from lifecycle.tracker import Tracker
from proxy.models import MappedModel
from proxy.tasks import Tasks

log = structlog.get_logger(__name__)


class UntrackedNotes:
    """Notes it for every cache that it may have used. Returns at once; the log is written behind."""

    def __init__(self, tracker: Tracker, models: Mapping[str, MappedModel], tasks: Tasks) -> None:
        self._tracker = tracker
        self._models = models
        self._tasks = tasks

    def knows(self, model: str) -> bool:
        """Whether the model is one of ours; another name may be any engine model, or none at all."""
        return model in self._models

    def note(self, namespace: Namespace | None, reason: str) -> None:
        """Untracked inference used this namespace; None, or a model that is not known: any."""
        if namespace is None or not self.knows(namespace.model):
            configured = [Namespace(name) for name in self._models]
            affected = sorted({*self._tracker.contexts.index.namespaces(), *configured})
        else:
            affected = [namespace]
        for each in affected:
            self._tasks.spawn(self._record(each, reason))

    async def _record(self, namespace: Namespace, reason: str) -> None:
        try:
            await self._tracker.untracked(namespace, reason)
        except LogUnavailable as error:
            log.warning("an untracked call waits for the event log", error=str(error))
