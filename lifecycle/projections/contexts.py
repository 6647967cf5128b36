"""Every context's state and the chunk index above them: what is true, read from the log and nothing else."""

from collections import OrderedDict
from collections.abc import AsyncIterable, Iterator
from typing import get_args

import msgspec

from lifecycle.core.directives import Directive, DirectiveResult
from lifecycle.core.events import (
    ContextCreated,
    ContextEvent,
    DirectiveProposed,
    DirectiveSettled,
    EnforcementRearmed,
    HarmBudgetExceeded,
    RecordedEvent,
)
from lifecycle.core.evolve import evolve
from lifecycle.core.ids import ContextKey, Namespace, context_stream
from lifecycle.core.state import ContextState
from lifecycle.errors import CorruptLog
from lifecycle.projections.chunk_index import ChunkIndex

CONTEXT_EVENTS = get_args(ContextEvent)

NUM_CLOSED_KEPT = 10_000
"""Closed contexts without pins and calls that stay readable, newest first."""

NUM_DIRECTIVES_KEPT = 10_000
"""Directives that stay readable, newest first."""


class DirectiveRecord(msgspec.Struct, frozen=True):
    """A directive and what became of it; `result` None while it is under way."""

    directive: Directive
    as_of: int
    proposed_ns: int
    result: DirectiveResult | None = None
    settled_ns: int = 0


class Contexts:
    """Read model over the whole log. `apply` must see every event once, in the order of positions."""

    def __init__(self) -> None:
        self.states: dict[str, ContextState] = {}
        self.index = ChunkIndex()
        self.directives: OrderedDict[str, DirectiveRecord] = OrderedDict()
        self.stream_versions: dict[str, int] = {}
        self.position = 0
        self.demotions: dict[tuple[str, str], HarmBudgetExceeded] = {}
        """By model and tenant: whose harm budget was exceeded, and who was not rearmed since."""
        self._uids: dict[ContextKey, dict[Namespace, str]] = {}
        self._finished: OrderedDict[str, None] = OrderedDict()
        self._pinned_bytes: dict[str, int] = {}

    def apply(self, recorded: RecordedEvent) -> None:
        """Take one event in. Raises `CorruptLog` if it cannot follow what came before."""
        event = recorded.event
        if isinstance(event, CONTEXT_EVENTS):
            self._apply_to_context(recorded)
        else:
            self.index.apply(event, None, None)
            if isinstance(event, DirectiveProposed):
                record = DirectiveRecord(event.directive, event.as_of, event.at_ns)
                self.directives[event.directive.directive_id] = record
                while len(self.directives) > NUM_DIRECTIVES_KEPT:
                    self.directives.popitem(last=False)
            elif isinstance(event, DirectiveSettled) and event.directive_id in self.directives:
                record = self.directives[event.directive_id]
                self.directives[event.directive_id] = msgspec.structs.replace(
                    record, result=event.result, settled_ns=event.at_ns
                )
            elif isinstance(event, HarmBudgetExceeded):
                self.demotions[event.namespace.model, event.tenant] = event
            elif isinstance(event, EnforcementRearmed):
                self.demotions.pop((event.namespace.model, event.tenant), None)
        self.stream_versions[recorded.stream] = recorded.version
        self.position = recorded.position

    async def rebuild(self, events: AsyncIterable[RecordedEvent]) -> None:
        """Take in a whole log, oldest first."""
        async for recorded in events:
            self.apply(recorded)

    def find(self, key: ContextKey, namespace: Namespace) -> ContextState | None:
        """The context of that name whose tokens live in `namespace`."""
        uid = self._uids.get(key, {}).get(namespace)
        return self.states.get(uid) if uid else None

    def latest(self, key: ContextKey) -> ContextState | None:
        """The context of that name that was used last, in whatever namespace."""
        states = [self.states[uid] for uid in self._uids.get(key, {}).values() if uid in self.states]
        return max(states, key=lambda s: (s.active_ns, s.uid), default=None)

    def superseded(self, key: ContextKey, namespace: Namespace) -> list[ContextState]:
        """Open contexts of that name in the same cache whose tokens were mapped otherwise."""
        named = self._uids.get(key, {})
        return [
            self.states[uid]
            for other, uid in named.items()
            if other.cache == namespace.cache and other != namespace and self.states[uid].open
        ]

    def of_tenant(self, tenant: str) -> Iterator[ContextState]:
        """Every context of a tenant that is still readable."""
        return (s for s in self.states.values() if s.key.tenant == tenant)

    def pinned_bytes(self, tenant: str) -> int:
        """Bytes that the tenant's pins hold."""
        return self._pinned_bytes.get(tenant, 0)

    def version_of(self, stream: str) -> int:
        """Version of the stream's last event, 0 for a new one."""
        return self.stream_versions.get(stream, 0)

    def _apply_to_context(self, recorded: RecordedEvent) -> None:
        event = recorded.event
        uid = recorded.stream.removeprefix(context_stream(""))
        before = self.states.get(uid)
        if before is None and not isinstance(event, ContextCreated):
            raise CorruptLog(f"stream {recorded.stream!r} does not begin with the context's creation")
        assert isinstance(event, CONTEXT_EVENTS)
        after = evolve(before, event)
        self.states[uid] = after
        if before is None:
            self._uids.setdefault(after.key, {})[after.namespace] = uid
        self.index.apply(event, before, after)
        charged = sum(p.size_bytes for p in after.pins) - (
            sum(p.size_bytes for p in before.pins) if before else 0
        )
        if charged:
            self._pinned_bytes[after.key.tenant] = self.pinned_bytes(after.key.tenant) + charged
        if after.closed and not after.versions:
            self._finish(uid)
        else:
            self._finished.pop(uid, None)

    def _finish(self, uid: str) -> None:
        self._finished[uid] = None
        self._finished.move_to_end(uid)
        while len(self._finished) > NUM_CLOSED_KEPT:
            oldest, _ = self._finished.popitem(last=False)
            state = self.states.pop(oldest)
            self.stream_versions.pop(context_stream(oldest), None)
            known = self._uids.get(state.key, {})
            if known.get(state.namespace) == oldest:
                del known[state.namespace]
            if not known:
                self._uids.pop(state.key, None)
