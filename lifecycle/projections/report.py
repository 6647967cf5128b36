"""What the lifecycle was worth and what it cost: counted from the log, and from nothing else.

A projection of its own, so that it can begin anywhere in a log: contexts that began earlier are made known by
`know`. Equal events give equal figures, whenever they are read. Memory is bounded everywhere.
"""

from collections import Counter, OrderedDict

import msgspec
from msgspec.structs import replace

from lifecycle.core.digest import digest_all
from lifecycle.core.directives import Demote, Reclaim
from lifecycle.core.events import (
    BackendLost,
    CallArrived,
    CallEnded,
    CallMapped,
    CallVerified,
    ChunksGone,
    ContextCreated,
    DirectiveProposed,
    DirectiveSettled,
    EnforcementRearmed,
    PrefixDiverged,
    RecordedEvent,
    UntrackedForwarded,
)
from lifecycle.core.ids import Namespace, context_stream
from lifecycle.core.state import ContextState
from lifecycle.projections.report_comparison import Comparison, ComparisonBook
from lifecycle.projections.report_counts import UNKNOWN, Cell, CountBook, Counts, Dimension, grouped
from lifecycle.projections.report_harm import Harm, HarmBook, HarmBudget
from lifecycle.projections.report_watch import RemovalWatch, Tally, covering
from lifecycle.vocabulary import Arm, MappingKind

UNTRACKED = "untracked"

MAX_CONTEXTS = 50_000
"""Contexts whose names are remembered, those heard of last."""

MAX_CALLS = 10_000
"""Calls under way that are remembered."""


class ReportSpan(msgspec.Struct, frozen=True, kw_only=True):
    """Figures of a span of time that begins at `from_ns`."""

    from_ns: int
    cells: dict[Cell, Counts]
    comparison: Comparison
    harm: list[Harm]

    def total(self) -> Counts:
        """Everybody's."""
        total = Counts()
        for counts in self.cells.values():
            total.add(counts)
        return total

    def by(self, dimension: Dimension) -> dict[str, Counts]:
        """Sums by one dimension, in order of names."""
        return grouped(self.cells, dimension)


class _Call(msgspec.Struct):
    """A call under way: how much of its prompt its context had computed before, how much was dead then.

    `moved` says that another engine computed it, or that the engine has lost it since.
    """

    cell: Cell
    mapped: bool = False
    num_tokens: int = 0
    known_tokens: int = 0
    dead_tokens: int = 0
    chunk_size: int = 0
    moved: bool = False


class _Served(msgspec.Struct):
    """Which engine served a context last, empty where there is but one, and how long its prompt was."""

    backend: str = ""
    num_tokens: int = 0


class _Sizes(msgspec.Struct):
    """What a cache's chunks weigh, as its last mapped call told."""

    chunk_tokens: int = 0
    token_bytes: int = 0


class Report:
    """Feed it events in log order; each once. `position` is that of the last one."""

    def __init__(self, budget: HarmBudget) -> None:
        self.position = 0
        self.counts = CountBook()
        self.watch = RemovalWatch()
        self.harm = HarmBook(budget)
        self._comparison = ComparisonBook()
        self._contexts: OrderedDict[str, Cell] = OrderedDict()
        self._calls: OrderedDict[tuple[str, str, int], _Call] = OrderedDict()
        self._sizes: dict[Namespace, _Sizes] = {}
        self._namespaces: dict[str, Namespace] = {}
        self._served: dict[str, _Served] = {}

    def know(self, state: ContextState) -> None:
        """A context that began before the events that will be told."""
        self._remember(
            state.uid, Cell(state.namespace.model, state.key.tenant, state.agent or UNKNOWN), state.namespace
        )
        if state.backend:
            branch = state.current_branch()
            self._served[state.uid] = _Served(state.backend, state.versions[branch.tip].end if branch else 0)
        if state.chunk_size:
            self._size(state.namespace).chunk_tokens = state.chunk_size

    def apply(self, recorded: RecordedEvent) -> None:
        """Take one event in."""
        event = recorded.event
        uid = recorded.stream.removeprefix(context_stream(""))
        self.counts.note(event.at_ns)
        match event:
            case ContextCreated():
                cell = Cell(event.namespace.model, event.tenant, event.agent or UNKNOWN)
                self._remember(uid, cell, event.namespace)
                parent = self._served.get(event.parent_uid)
                if event.forked and parent is not None:
                    self._served[uid] = _Served(parent.backend)
            case CallArrived():
                self._arrived(uid, event)
            case CallMapped():
                self._mapped(uid, event)
            case CallEnded():
                self._ended(uid, event)
            case PrefixDiverged():
                self._left(uid, event)
            case CallVerified():
                self.counts.add(
                    event.at_ns,
                    self._cell(uid),
                    chunks_checked=event.num_chunks,
                    chunks_shown=event.num_shown,
                )
            case ChunksGone():
                lost = self.watch.gone(event.namespace, event.keys)
                self._tally(event.at_ns, event.namespace, lost, "evicted_dead_tokens")
            case BackendLost():
                self._lost(event)
            case UntrackedForwarded():
                cell = Cell(event.namespace.model, arm=UNTRACKED)
                self.counts.add(event.at_ns, cell, untracked_minutes=1)
            case DirectiveProposed(directive=(Reclaim() | Demote()) as directive):
                owners = [(self._cell(owner), n) for owner, n in directive.owners]
                owners = covering(owners, directive.keys, Cell(directive.namespace.model))
                seen = self.watch.proposed(directive, owners, event.at_ns)
                self._tally(event.at_ns, directive.namespace, seen, "dead_seen_tokens", "dead_seen_bytes")
            case DirectiveSettled():
                self._settled(event)
            case EnforcementRearmed():
                self.harm.rearmed(event.namespace.model, event.tenant)
            case _:
                pass
        self.position = recorded.position

    def since(self, start_ns: int, now_ns: int) -> ReportSpan:
        """Figures from about `start_ns` on; `from_ns` says from when exactly."""
        from_ns, cells = self.counts.since(start_ns)
        return ReportSpan(
            from_ns=from_ns,
            cells=cells,
            comparison=self._comparison.since(max(start_ns, self.counts.began_ns)),
            harm=self.harm.all(now_ns),
        )

    def chunk_tokens(self, namespace: Namespace) -> int:
        """Tokens of one chunk of this cache, 0 before its first mapped call."""
        return self._sizes.get(namespace.cache, _Sizes()).chunk_tokens

    def token_bytes(self, namespace: Namespace) -> int:
        """Bytes of one token's KV in this cache, 0 if unknown."""
        return self._sizes.get(namespace.cache, _Sizes()).token_bytes

    def size(self) -> dict[str, int]:
        """Entries in memory, by kind."""
        return {
            "cells": self.counts.num_cells(),
            "chunks": self.watch.num_chunks(),
            "contexts": len(self._contexts),
            "calls": len(self._calls),
            "sampled_contexts": self._comparison.num_contexts(),
        }

    def digest(self, now_ns: int) -> bytes:
        """Digest of every figure and of what may still become one."""
        span = self.since(0, now_ns)
        return digest_all(
            (
                self.position,
                [(cell, msgspec.to_builtins(counts)) for cell, counts in sorted(span.cells.items())],
                span.comparison,
                span.harm,
                tuple(self.watch.state()),
                tuple(sorted(self._calls)),
            )
        )

    # -- events -------------------------------------------------------------------------------------------

    def _arrived(self, uid: str, event: CallArrived) -> None:
        cell = self._cell(uid)
        cell = replace(cell, arm=event.arm or cell.arm, harness=event.harness or cell.harness)
        self._name(uid, cell)
        served = self._served.get(uid, _Served())
        moved = event.backend != served.backend
        if event.backend:
            self._served[uid] = _Served(event.backend, served.num_tokens)
        self._calls[uid, event.call_id, event.attempt] = _Call(cell, moved=moved)
        while len(self._calls) > MAX_CALLS:
            self._calls.popitem(last=False)

    def _mapped(self, uid: str, event: CallMapped) -> None:
        namespace = self._namespaces.get(uid)
        if event.kind is MappingKind.NONE or namespace is None:
            return
        sizes = self._size(namespace)
        sizes.chunk_tokens = event.chunk_size
        sizes.token_bytes = event.bytes_per_token or sizes.token_bytes
        call = self._calls.get((uid, event.call_id, event.attempt))
        if call is not None:
            call.mapped = True
            call.num_tokens = event.num_tokens
            call.chunk_size = event.chunk_size
            call.known_tokens = event.first_chunk * event.chunk_size
            call.dead_tokens = self.watch.num_dead(namespace) * event.chunk_size
        if uid in self._served:
            self._served[uid].num_tokens = event.num_tokens
        need = self.watch.needed(namespace, event.keys, event.at_ns)
        self._tally(event.at_ns, namespace, need.revived, "revived_tokens")
        self._tally(event.at_ns, namespace, need.would_regret, "would_regret_tokens")
        self._regret(event.at_ns, namespace, need.regretted)

    def _ended(self, uid: str, event: CallEnded) -> None:
        call = self._calls.pop((uid, event.call_id, event.attempt), None)
        if call is None:
            return
        prompt_tokens = event.prompt_tokens if event.prompt_tokens >= 0 else call.num_tokens
        amounts = {"calls": 1, "calls_mapped": int(call.mapped), "prompt_tokens": prompt_tokens}
        if event.prompt_tokens > 0 and event.cached_tokens >= 0:
            amounts["calls_counted"] = 1
            amounts["counted_prompt_tokens"] = event.prompt_tokens
            amounts["cached_tokens"] = event.cached_tokens
            if call.mapped:
                recomputed = _recomputed_tokens(call, event)
                amounts["recomputed_tokens"] = recomputed
                if call.moved or event.backend:
                    amounts["moved_tokens"] = recomputed
                else:
                    amounts["avoidable_tokens"] = min(recomputed, call.dead_tokens)
            if call.cell.arm in (Arm.ENFORCE, Arm.HOLDOUT):
                self._comparison.add(
                    event.at_ns, Arm(call.cell.arm), uid, event.prompt_tokens, event.cached_tokens
                )
        if event.backend and uid in self._served:
            self._served[uid].backend = event.backend
        self.counts.add(event.at_ns, call.cell, **amounts)
        if call.cell.arm == Arm.ENFORCE:
            self.harm.prompted(event.at_ns, call.cell.model, call.cell.tenant, prompt_tokens)

    def _left(self, uid: str, event: PrefixDiverged) -> None:
        call = self._calls.get((uid, event.call_id, event.attempt))
        cell = replace(call.cell if call is not None else self._cell(uid), left=event.kind.value)
        name = "head" if event.against else "declared" if event.declared else "prefix"
        amounts = {
            f"{name}_edits" if event.declared else f"{name}_breaks": 1,
            f"{name}_lost_tokens": max(event.lost_tokens, 0),
        }
        self.counts.add(event.at_ns, cell, **amounts)

    def _lost(self, event: BackendLost) -> None:
        """What the engine's own memory held is computed again, wherever its contexts go on."""
        for uid, served in self._served.items():
            if served.backend == event.backend and self._namespaces[uid].cache == event.namespace.cache:
                served.backend = ""
                self.counts.add(event.at_ns, self._cell(uid), lost_tokens=served.num_tokens)

    def _settled(self, event: DirectiveSettled) -> None:
        done = self.watch.settled(event.namespace, event.directive_id, event.result, event.at_ns)
        self._tally(event.at_ns, event.namespace, done.freed, "freed_tokens", "freed_bytes")
        self._tally(event.at_ns, event.namespace, done.would_free, "would_free_tokens", "would_free_bytes")
        self._regret(event.at_ns, event.namespace, done.regretted)

    def _regret(self, at_ns: int, namespace: Namespace, chunks: Tally) -> None:
        """Charged to whom the chunks were removed for: it is their mode that must change."""
        self._tally(at_ns, namespace, chunks, "regretted_tokens")
        size = self.chunk_tokens(namespace)
        charged: Counter[str] = Counter()
        for cell, num_chunks in chunks.items():
            if cell.tenant != UNKNOWN:
                charged[cell.tenant] += num_chunks * size
        for tenant, num_tokens in charged.items():
            if num_tokens:
                self.harm.regretted(at_ns, namespace.model, tenant, num_tokens)

    def _tally(self, at_ns: int, namespace: Namespace, chunks: Tally, tokens: str, octets: str = "") -> None:
        size, token_bytes = self.chunk_tokens(namespace), self.token_bytes(namespace)
        for cell, num_chunks in chunks.items():
            if num_chunks:
                amounts = {tokens: num_chunks * size}
                if octets:
                    amounts[octets] = num_chunks * size * token_bytes
                self.counts.add(at_ns, cell, **amounts)

    # -- names --------------------------------------------------------------------------------------------

    def _cell(self, uid: str) -> Cell:
        return self._contexts.get(uid) or Cell(UNKNOWN)

    def _remember(self, uid: str, cell: Cell, namespace: Namespace) -> None:
        self._namespaces[uid] = namespace
        self._name(uid, cell)

    def _name(self, uid: str, cell: Cell) -> None:
        self._contexts[uid] = cell
        self._contexts.move_to_end(uid)
        while len(self._contexts) > MAX_CONTEXTS:
            oldest, _ = self._contexts.popitem(last=False)
            self._namespaces.pop(oldest, None)
            self._served.pop(oldest, None)

    def _size(self, namespace: Namespace) -> _Sizes:
        return self._sizes.setdefault(namespace.cache, _Sizes())


def _recomputed_tokens(call: _Call, event: CallEnded) -> int:
    """Whole chunks that the context had computed before and the engine computed again.

    An engine computes the last token of every prompt, so a chunk that ends there is never found whole.
    """
    size = call.chunk_size
    expected = min(call.known_tokens, (event.prompt_tokens - 1) // size * size)
    return max(expected - event.cached_tokens, 0) // size * size
