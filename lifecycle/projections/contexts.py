"""Every context's state and the chunk index above them: what is true, read from the log and nothing else."""

from collections import OrderedDict
from collections.abc import AsyncIterable, Iterable, Iterator, Mapping
from itertools import takewhile
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
from lifecycle.projections.index_facts import dead_owners
from lifecycle.projections.tenant_use import TenantUse

CONTEXT_EVENTS = get_args(ContextEvent)

NUM_CLOSED_KEPT = 10_000
"""Closed contexts without pins and calls that stay readable, newest first."""

NUM_DIRECTIVES_KEPT = 10_000
"""Directives that stay readable, newest first."""

RETENTION_SECONDS = 24 * 3600.0
"""How long a closed context and a settled directive stay readable, in event time."""

FORGET_EVERY_NS = 60 * 10**9
"""Event time between two looks at what may be forgotten."""


class DirectiveRecord(msgspec.Struct, frozen=True):
    """A directive and what became of it; `result` None while it is under way."""

    directive: Directive
    as_of: int
    proposed_ns: int
    result: DirectiveResult | None = None
    settled_ns: int = 0


class Held(msgspec.Struct, frozen=True):
    """What `Contexts` holds beside its public parts.

    Contexts that are over, in the order they closed; contexts whose name another one took; event time; models
    and tenants that lost control.
    """

    finished: list[str]
    nameless: list[str]
    now_ns: int
    demotions: list[HarmBudgetExceeded] = []


class Contexts:
    """Read model over the whole log. `apply` must see every event once, in the order of positions.

    Closed contexts and settled directives are forgotten `retention_seconds` after their last event, a context
    not while a plan may ask for chunks that it let go last.
    """

    def __init__(
        self, retention_seconds: float = RETENTION_SECONDS, keep_recurring_seconds: float = 0.0
    ) -> None:
        self.states: dict[str, ContextState] = {}
        self.index = ChunkIndex(int(keep_recurring_seconds * 1e9))
        self.directives: OrderedDict[str, DirectiveRecord] = OrderedDict()
        self.stream_versions: dict[str, int] = {}
        self.position = 0
        self.demotions: dict[tuple[str, str], HarmBudgetExceeded] = {}
        """By model and tenant: whose harm budget was exceeded, and who was not rearmed since."""
        self.use = TenantUse()
        self._uids: dict[ContextKey, dict[Namespace, str]] = {}
        self._finished: OrderedDict[str, None] = OrderedDict()
        self._retention_ns = int(retention_seconds * 1e9)
        self._now_ns = 0

    def apply(self, recorded: RecordedEvent) -> None:
        """Take one event in. Raises `CorruptLog` if it cannot follow what came before.

        A context may be forgotten while something is appended to it: then that changes nothing.
        """
        event = recorded.event
        known = True
        if isinstance(event, CONTEXT_EVENTS):
            known = self._apply_to_context(recorded)
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
        if known:
            self.stream_versions[recorded.stream] = recorded.version
        self.position = recorded.position
        last_look = self._now_ns // FORGET_EVERY_NS
        self._now_ns = max(self._now_ns, event.at_ns)
        if self._now_ns // FORGET_EVERY_NS != last_look:
            self._forget_old()

    async def rebuild(self, events: AsyncIterable[RecordedEvent]) -> None:
        """Take in what follows, oldest first. Raises `CorruptLog`, also where an event is missing."""
        async for recorded in events:
            if recorded.position != self.position + 1:
                missing = f"position {self.position + 1} of the log is missing; {recorded.position} is there"
                raise CorruptLog(missing)
            self.apply(recorded)

    def held(self) -> Held:
        """What a snapshot needs beside the public parts."""
        nameless = [u for u, s in self.states.items() if self._uids.get(s.key, {}).get(s.namespace) != u]
        return Held(list(self._finished), nameless, self._now_ns, list(self.demotions.values()))

    def hold(
        self,
        position: int,
        states: Mapping[str, ContextState],
        directives: Iterable[DirectiveRecord],
        stream_versions: Mapping[str, int],
        held: Held,
        index: ChunkIndex,
    ) -> None:
        """Take over what another one held at `position`; only before the first event."""
        self.states = dict(states)
        self.index = index
        self.directives = OrderedDict((record.directive.directive_id, record) for record in directives)
        self.stream_versions = dict(stream_versions)
        self.position = position
        self._now_ns = held.now_ns
        self.demotions = {(e.namespace.model, e.tenant): e for e in held.demotions}
        self._finished = OrderedDict.fromkeys(held.finished)
        nameless = set(held.nameless)
        for uid, state in states.items():
            if uid not in nameless:
                self._uids.setdefault(state.key, {})[state.namespace] = uid
            self.use.change(None, state)

    def find(self, key: ContextKey, namespace: Namespace) -> ContextState | None:
        """The context of that name whose tokens live in `namespace`."""
        uid = self._uids.get(key, {}).get(namespace)
        return self.states.get(uid) if uid else None

    def fingerprint_of(self, model: str) -> str:
        """How the model's tokens were mapped last, empty if they never were: what a start goes on with until
        the engine was asked."""
        used = [s for s in self.states.values() if s.namespace.model == model]
        return max(used, key=lambda s: (s.active_ns, s.uid)).namespace.fingerprint if used else ""

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

    def version_of(self, stream: str) -> int:
        """Version of the stream's last event, 0 for a new one."""
        return self.stream_versions.get(stream, 0)

    def _apply_to_context(self, recorded: RecordedEvent) -> bool:
        """False if the context was forgotten: no position is missing, so its beginning was seen."""
        event = recorded.event
        uid = recorded.stream.removeprefix(context_stream(""))
        before = self.states.get(uid)
        if before is None and not isinstance(event, ContextCreated):
            if recorded.version > 1:
                return False
            raise CorruptLog(f"stream {recorded.stream!r} does not begin with the context's creation")
        assert isinstance(event, CONTEXT_EVENTS)
        after = evolve(before, event)
        self.states[uid] = after
        if before is None:
            # Two processes may give a name away at once: it belongs to who was first.
            self._uids.setdefault(after.key, {}).setdefault(after.namespace, uid)
        self.index.apply(event, before, after)
        self.use.change(before, after)
        if after.closed and not after.versions:
            self._finish(uid)
        else:
            self._finished.pop(uid, None)
        return True

    def _finish(self, uid: str) -> None:
        self._finished[uid] = None
        self._finished.move_to_end(uid)
        while len(self._finished) > NUM_CLOSED_KEPT:
            self._forget(next(iter(self._finished)))

    def _forget_old(self) -> None:
        """Forget what closed or was settled so long ago that nobody will ask."""
        until_ns = self._now_ns - self._retention_ns
        over = list(takewhile(lambda uid: self.states[uid].last_ns <= until_ns, self._finished))
        if over:
            owners = dead_owners(self.index)
            for uid in over:
                if uid not in owners:
                    self._forget(uid)
        records = takewhile(lambda record: record.proposed_ns <= until_ns, self.directives.values())
        for record in [r for r in records if r.result is not None and r.settled_ns <= until_ns]:
            del self.directives[record.directive.directive_id]

    def _forget(self, uid: str) -> None:
        del self._finished[uid]
        state = self.states.pop(uid)
        self.use.change(state, None)
        self.stream_versions.pop(context_stream(uid), None)
        known = self._uids.get(state.key, {})
        if known.get(state.namespace) == uid:
            del known[state.namespace]
        if not known:
            self._uids.pop(state.key, None)
