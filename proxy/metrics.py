"""Prometheus metrics, on a registry of their own. No label takes a value that a client chooses.

Tenants are named by whoever gives out keys; all the same only so many get series of their own."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Protocol

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    ProcessCollector,
    generate_latest,
)
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from lifecycle.core.calls import BRANCH_LIMIT_REASON
from lifecycle.core.directives import Demote, Reclaim
from lifecycle.core.events import (
    BranchExpired,
    CallEnded,
    CallMapped,
    ChunksConfirmed,
    DeclarationMismatched,
    DirectiveSettled,
    OperationRejected,
    PinRefused,
    PinReleased,
    PinSet,
    PrefixDiverged,
    RecordedEvent,
)
from lifecycle.core.ids import KEY_BYTES, Namespace, context_stream
from lifecycle.core.pins import PIN_BUDGET_REASON, PIN_LIMIT_REASON
from lifecycle.log_keeper import LogKeeper
from lifecycle.tracker import Tracker
from proxy.limits import Limit
from proxy.request_metrics import RequestMetrics

_CONTROL_SECONDS = (0.001, 0.005, 0.025, 0.1, 0.5, 1, 5, 30)

_SECONDS = (0.0005, 0.001, 0.002, 0.003, 0.005, 0.01, 0.05, 0.1, 0.5, 1, 5, 30, 120)

MAX_TENANTS = 100
"""Tenants with series of their own, the first that were seen; the rest are summed up."""

OTHER_TENANTS = "(others)"


class Holds(Protocol):
    """Pins that the cache holds, as `HoldWatch` counts them."""

    @property
    def num_held(self) -> int: ...

    @property
    def num_leaked(self) -> int: ...

    @property
    def num_foreign(self) -> int: ...


class Metrics:
    """Counts what became true, and samples what is true when it is scraped."""

    def __init__(self, tracker: Tracker) -> None:
        self.registry = CollectorRegistry()
        ProcessCollector(registry=self.registry)
        self._tracker = tracker
        self.requests = RequestMetrics(self.registry)
        self.held_seconds = Histogram(
            "kvtether_held_seconds",
            "Time from a call's last request byte until its body left for the engine.",
            ["mode"],
            buckets=_SECONDS,
            registry=self.registry,
        )
        self.in_flight = Gauge("kvtether_calls_in_flight", "Calls under way.", registry=self.registry)
        self._calls = self._counter("calls", "Tracked calls by end.", ["end"])
        self._mapped = self._counter("mappings", "Tracked calls by mapping.", ["kind"])
        self._mismatches = self._counter("declaration_mismatches", "Lists without the declared length.")
        self._directives = self._counter("directives", "Directives by kind and outcome.", ["kind", "outcome"])
        self._chunks = self._counter("chunks_freed", "Chunks that a lookup no longer showed.", ["kind"])
        self._reclaimed = self._counter("reclaimed_bytes", "KV of those chunks, where its size is known.")
        self._chunk_bytes: Callable[[Namespace], int] = lambda namespace: 0
        self._control = Histogram(
            "kvtether_control_seconds",
            "Time that a request to the cache's coordinator or servers took.",
            ["operation"],
            buckets=_CONTROL_SECONDS,
            registry=self.registry,
        )
        self._control_failures = self._counter(
            "control_failures", "Requests to the cache that failed.", ["operation"]
        )
        self._confirmed = self._counter("chunks_confirmed", "Chunks that the cache showed.", ["stored"])
        self._pins = self._counter("pins", "Pins set and released.", ["what"])
        self.pin_repairs = self._counter("pin_repairs", "Pins that the cache held otherwise.", ["what"])
        self.regretted = self._counter(
            "regretted_tokens", "Tokens that were freed and needed again within ten minutes."
        )
        self._drift = self._counter("drift", "Chunks that somebody took away or brought back.", ["what"])
        self._diverged = self._counter(
            "prefix_divergences", "Prompts that left the one before.", ["kind", "how"]
        )
        self._lost = self._counter(
            "prefix_lost_tokens", "Tokens that this kept from being found.", ["kind", "how"]
        )
        self._normalised = self._counter(
            "normalised", "Places in requests that a normaliser changed.", ["kind"]
        )
        self.untracked = self._counter("untracked_calls", "Inference forwarded without being tracked.")
        self._limited = self._counter("limited", "Refusals by a tenant's limit.", ["tenant", "limit"])
        self._tenants: set[str] = set()
        self.registry.register(Sample(self._sample))
        tracker.own_listeners.append(self._heard)

    def drifted(self, what: str, chunks: int) -> None:
        """Chunks were found `gone`, or `returned` after they were freed."""
        self._drift.labels(what).inc(chunks)

    def normalised(self, kind: str, places: int) -> None:
        """A normaliser changed a request."""
        self._normalised.labels(kind).inc(places)

    def limited(self, tenant: str, limit: Limit) -> None:
        """A tenant wanted more than it may have."""
        self._limited.labels(self._label(tenant), limit).inc()

    def show_tenants(self, calls: Callable[[], Mapping[str, int]]) -> None:
        """Export what each tenant has of what is limited; `calls` are those under way."""

        def sample() -> Iterable[GaugeMetricFamily]:
            use = dict(self._tracker.contexts.use.all())
            shown = (
                ("calls_in_flight", "Calls under way.", calls()),
                ("contexts", "Open contexts.", {t: u.contexts for t, u in use.items()}),
                ("pins", "Pins held.", {t: u.pins for t, u in use.items()}),
                ("pinned_bytes", "Bytes that pins hold.", {t: u.pinned_bytes for t, u in use.items()}),
            )
            for name, text, numbers in shown:
                sums: dict[str, int] = {}
                for tenant, number in numbers.items():
                    label = self._label(tenant)
                    sums[label] = sums.get(label, 0) + number
                family = GaugeMetricFamily(f"kvtether_tenant_{name}", text, labels=["tenant"])
                for label, number in sums.items():
                    family.add_metric([label], number)
                yield family

        self.registry.register(Sample(sample))

    def _label(self, tenant: str) -> str:
        if tenant not in self._tenants and len(self._tenants) >= MAX_TENANTS:
            return OTHER_TENANTS
        self._tenants.add(tenant)
        return tenant

    def show_holds(self, holds: Holds) -> None:
        """Export how many pins the cache holds for us, and how many objects others pin beside us."""

        def sample() -> Iterable[GaugeMetricFamily]:
            yield _gauge("cache_holds", "Pins that the cache holds for us.", holds.num_held)
            yield _gauge("pins_leaked", "Of them those without a pin of a context.", holds.num_leaked)
            text = "Cache objects in our models that somebody else pins."
            yield _gauge("foreign_pins", text, holds.num_foreign)

        self.registry.register(Sample(sample))

    def show_mapping(self, waiting_chars: Callable[[], int]) -> None:
        """Export how much there is to map: beyond a bound calls are not mapped."""

        def sample() -> Iterable[GaugeMetricFamily]:
            text = "New text that is being mapped, or waits to be."
            yield _gauge("mapping_waiting_characters", text, waiting_chars())

        self.registry.register(Sample(sample))

    def controlled(self, operation: str, seconds: float, ok: bool) -> None:
        """The cache was asked or told something."""
        self._control.labels(operation).observe(seconds)
        if not ok:
            self._control_failures.labels(operation).inc()

    def weigh_chunks(self, chunk_bytes: Callable[[Namespace], int]) -> None:
        """From now on freed chunks are counted in bytes, too."""
        self._chunk_bytes = chunk_bytes

    def render(self) -> bytes:
        """The text exposition."""
        return generate_latest(self.registry)

    def show_log(self, keeper: LogKeeper) -> None:
        """Show what the log and its snapshots take."""

        def sample() -> Iterable[GaugeMetricFamily]:
            position = self._tracker.contexts.position
            yield _gauge("log_events", "Events that the log holds.", position + 1 - keeper.first_position)
            yield _gauge("log_first_position", "Position of its first event.", keeper.first_position)
            yield _gauge("snapshot_lag_events", "Events since the last snapshot.", position - keeper.position)
            yield _gauge("snapshot_bytes", "Bytes that the last snapshot wrote.", keeper.size_bytes)
            yield _gauge("snapshot_failures", "Snapshots and trims that failed.", keeper.num_failures)
            if keeper.taken_ns:
                age = (self._tracker.clock.now_ns() - keeper.taken_ns) / 1e9
                yield _gauge("snapshot_age_seconds", "Time since the last snapshot.", age)

        self.registry.register(Sample(sample))

    def _counter(self, name: str, text: str, labels: Sequence[str] = ()) -> Counter:
        return Counter(f"kvtether_{name}", text, labels, registry=self.registry)

    def _heard(self, batch: Sequence[RecordedEvent]) -> None:
        for recorded in batch:
            match recorded.event:
                case CallEnded(end=end):
                    self._calls.labels(end).inc()
                case CallMapped(kind=mapping):
                    self._mapped.labels(mapping).inc()
                case PrefixDiverged() as left:
                    how = "beside" if left.against else "declared" if left.declared else "undeclared"
                    self._diverged.labels(left.kind, how).inc()
                    self._lost.labels(left.kind, how).inc(max(left.lost_tokens, 0))
                case DeclarationMismatched():
                    self._mismatches.inc()
                case ChunksConfirmed(keys=keys, stored=stored):
                    self._confirmed.labels(str(stored).lower()).inc(len(keys) // KEY_BYTES)
                case OperationRejected() | PinRefused() | BranchExpired() as refusal:
                    self._heard_refusal(recorded.stream, refusal.reason)
                case PinSet():
                    self._pins.labels("set").inc()
                case PinReleased():
                    self._pins.labels("released").inc()
                case DirectiveSettled(directive_id=directive_id, result=result):
                    record = self._tracker.contexts.directives.get(directive_id)
                    kind = type(record.directive).__name__.lower() if record is not None else "unknown"
                    self._directives.labels(kind, result.outcome).inc()
                    if kind in (Reclaim.__name__.lower(), Demote.__name__.lower()):
                        self._chunks.labels(kind).inc(result.applied)
                        namespace = record.directive.namespace if record is not None else None
                        if namespace is not None and kind == Reclaim.__name__.lower():
                            self._reclaimed.inc(result.applied * self._chunk_bytes(namespace))
                case _:
                    pass

    def _heard_refusal(self, stream: str, reason: str) -> None:
        limit = next((limit for begin, limit in _REFUSALS if reason.startswith(begin)), None)
        state = self._tracker.contexts.states.get(stream.removeprefix(context_stream("")))
        if limit is not None and state is not None:
            self.limited(state.key.tenant, limit)

    def _sample(self) -> Iterable[GaugeMetricFamily]:
        contexts = self._tracker.contexts
        states = [s for s in contexts.states.values() if s.versions or s.open]
        unmapped = sum(bool(s.unmapped) for s in states)
        gapped = sum(bool(s.gap) for s in states)
        degraded = int(bool(self._tracker.degraded))
        yield _gauge("contexts", "Open contexts.", sum(s.open for s in states))
        yield _gauge("contexts_unmapped", "Contexts without proven tokens.", unmapped)
        yield _gauge("contexts_gapped", "Contexts with a tracking gap.", gapped)
        yield _gauge("pins_held", "Pins held.", sum(len(s.pins) for s in states))
        yield _gauge("log_position", "Position of the last event applied.", contexts.position)
        waiting, oldest_ns = self._tracker.num_waiting, self._tracker.oldest_waiting_ns
        lag = (self._tracker.clock.now_ns() - oldest_ns) / 1e9 if oldest_ns else 0.0
        yield _gauge("log_waiting", "Observations that wait for the log.", waiting)
        yield _gauge("log_lag_seconds", "How long the oldest of them has waited.", max(lag, 0.0))
        yield _gauge("log_degraded", "1 while observations wait for the log.", degraded)
        lost = "Models and tenants that only observe since too much was regretted."
        yield _gauge("harm_budget_exceeded", lost, len(contexts.demotions))
        chunks = [contexts.index.stats(n) for n in contexts.index.namespaces()]
        yield _gauge("chunks_live", "Chunks that a context refers to.", sum(c.live for c in chunks))
        yield _gauge("chunks_dead", "Chunks in the books that none refers to.", sum(c.dead for c in chunks))


_REFUSALS = (
    (PIN_BUDGET_REASON, Limit.BYTES),
    (PIN_LIMIT_REASON, Limit.PINS),
    (BRANCH_LIMIT_REASON, Limit.BRANCHES),
)


def _gauge(name: str, text: str, value: float) -> GaugeMetricFamily:
    return GaugeMetricFamily(f"kvtether_{name}", text, value=value)


class Sample(Collector):
    """Gauges that are read when they are scraped."""

    def __init__(self, sample: Callable[[], Iterable[GaugeMetricFamily]]) -> None:
        self._take = sample

    def collect(self) -> Iterable[GaugeMetricFamily]:
        """Read what is true now."""
        return self._take()
