"""Metrics of each engine. The label takes the names of the configuration and no others."""

from collections.abc import Callable, Iterable, Mapping

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from proxy.backends import Backends


class BackendMetrics(Collector):
    """Samples the engines when it is scraped. `contexts` are open, by the engine that served them last."""

    def __init__(
        self, registry: CollectorRegistry, backends: Backends, contexts: Callable[[], Mapping[str, int]]
    ) -> None:
        self._backends = backends
        self._contexts = contexts
        registry.register(self)

    def collect(self) -> Iterable[Metric]:
        """Read what is true now."""
        contexts = self._contexts()
        up = GaugeMetricFamily("kvtether_backend_up", "1 while the engine takes calls.", labels=["backend"])
        drains = GaugeMetricFamily(
            "kvtether_backend_draining", "1 while it is taken out of service.", labels=["backend"]
        )
        load = GaugeMetricFamily("kvtether_backend_calls_in_flight", "Calls under way.", labels=["backend"])
        held = GaugeMetricFamily(
            "kvtether_backend_contexts", "Open contexts that it served last.", labels=["backend"]
        )
        taken = CounterMetricFamily("kvtether_backend_calls", "Requests that it took.", labels=["backend"])
        missed = CounterMetricFamily(
            "kvtether_backend_unreached", "Requests that found no connection to it.", labels=["backend"]
        )
        lost = CounterMetricFamily("kvtether_backend_losses", "Times that it was gone.", labels=["backend"])
        for backend in self._backends.all:
            label = [backend.name]
            up.add_metric(label, int(not backend.down))
            drains.add_metric(label, int(backend.draining))
            load.add_metric(label, backend.load)
            held.add_metric(label, contexts.get(backend.name, 0))
            taken.add_metric(label, backend.num_taken)
            missed.add_metric(label, backend.num_unreached)
            lost.add_metric(label, backend.num_lost)
        return (up, drains, load, held, taken, missed, lost)
