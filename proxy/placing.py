"""Which engine each context's calls go to: what is remembered of it, and what the log says."""

from collections import OrderedDict
from collections.abc import Sequence

from lifecycle.core.events import CallArrived, CallEnded, RecordedEvent
from lifecycle.core.ids import ContextKey, Namespace, context_stream
from lifecycle.core.state import ContextState
from lifecycle.tracker import Tracker
from proxy.affinity import STAYS, Kinship, Placed
from proxy.backends import Backends, Route
from proxy.tracked_call import CallRequest, TrackedCall

MAX_REMEMBERED = 100_000
"""Contexts whose engine is known here before the log says it; the log knows all."""

MAX_GENERATIONS = 64
"""Forks of forks that are followed up to what they have in common."""


class Placing:
    """Places calls, and remembers who took them. The log has every context's last engine, after a restart
    too; what is remembered here is only what it may not have yet."""

    def __init__(self, backends: Backends, tracker: Tracker) -> None:
        self._backends = backends
        self._tracker = tracker
        self._served: OrderedDict[str, str] = OrderedDict()
        tracker.listeners.append(self._heard)

    def place(self, request: CallRequest, beside: Placed | None = None) -> Placed:
        """Where a call of a context goes. Nothing is sent yet.

        `beside` is where the first prompt of its request goes: the others go with it, for one engine takes
        a request.
        """
        if not self._backends.several:
            return Placed("")
        if beside is not None:
            stays = self._held_by(request.uid) == beside.backend
            placed = Placed(beside.backend, STAYS if stays else "with its request's first prompt")
        else:
            placed = self._backends.place(self._kinship(request), request.namespace.model)
        self._remember(request.uid, placed.backend)
        return placed

    def route(self, calls: Sequence[TrackedCall]) -> Route:
        """The way for a request whose calls, one for each prompt, were placed beside the first."""
        first = calls[0]

        def reached(name: str) -> None:
            for call in calls:
                call.backend = name
                if name != call.placed.backend:
                    self._remember(call.request.uid, name)

        root = self._kinship(first.request).root
        return self._backends.route(first.placed, root, first.request.namespace.model, reached)

    def route_unfollowed(self, tenant: str, model: str, context_id: str) -> Route:
        """The way for inference that is not followed: beside the context that it names, if it names one."""
        if not context_id or not self._backends.several:
            return self._backends.anywhere(model)
        state = self._tracker.contexts.latest(ContextKey(tenant, context_id))
        root = self._root(tenant, context_id, state)
        held_by = self._held_by(state.uid) if state is not None else ""
        placed = self._backends.place(Kinship(root=root, held_by=held_by), model)
        return self._backends.route(placed, root, model)

    def _kinship(self, request: CallRequest) -> Kinship:
        identity, fields = request.identity, request.fields
        states = self._tracker.contexts.states
        state = states.get(request.uid)
        parent: ContextState | None = None
        if state is not None:
            parent = states.get(state.parent_uid) if state.forked else None
        elif identity.fork_at is not None and identity.parent:
            parent = self._find(request.tenant, identity.parent, request.namespace)
        return Kinship(
            root=self._root(request.tenant, identity.context_id, state or parent),
            held_by=self._held_by(request.uid),
            parent_on=self._held_by(parent.uid) if parent is not None else "",
            alone=fields.one_off or (state is not None and state.one_off),
        )

    def _find(self, tenant: str, context_id: str, namespace: Namespace) -> ContextState | None:
        return self._tracker.contexts.find(ContextKey(tenant, context_id), namespace)

    def _held_by(self, uid: str) -> str:
        state = self._tracker.contexts.states.get(uid)
        return self._served.get(uid) or (state.backend if state is not None else "")

    def _root(self, tenant: str, context_id: str, state: ContextState | None) -> str:
        """Name of the first ancestor that a prefix is shared with; of the context itself without any."""
        states = self._tracker.contexts.states
        for _ in range(MAX_GENERATIONS):
            if state is None or not state.forked:
                break
            parent = states.get(state.parent_uid)
            if parent is None:
                break
            state = parent
        return str(state.key) if state is not None else f"{tenant}/{context_id}"

    def _heard(self, batch: Sequence[RecordedEvent]) -> None:
        """What the log knows is not remembered here: another proxy may have moved the context since."""
        for recorded in batch:
            if isinstance(recorded.event, CallArrived | CallEnded) and recorded.event.backend:
                uid = recorded.stream.removeprefix(context_stream(""))
                if self._served.get(uid) == recorded.event.backend:
                    del self._served[uid]

    def _remember(self, uid: str, name: str) -> None:
        self._served[uid] = name
        self._served.move_to_end(uid)
        while len(self._served) > MAX_REMEMBERED:
            self._served.popitem(last=False)
