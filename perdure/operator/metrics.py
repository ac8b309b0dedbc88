"""The operator's own Prometheus metrics, listed in docs/metrics.md."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Final

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    ProcessCollector,
    disable_created_metrics,
    generate_latest,
)
from prometheus_client.metrics_core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from perdure.operator.coverage import Coverage

DONE: Final = "done"
FAILED: Final = "failed"


class _Served(Collector):
    """The namespaces, read at each scrape."""

    def __init__(self, coverage: Coverage) -> None:
        self._coverage = coverage

    def collect(self) -> Iterator[Metric]:
        """Yields the metric, for Prometheus' client."""
        text = "Whether the objects of the namespace are served; * is all namespaces."
        family = GaugeMetricFamily("perdure_operator_namespace_served", text, labels=("job_namespace",))
        for namespace in self._coverage.namespaces:
            family.add_metric((namespace,), float(self._coverage.serves(namespace)))
        yield family


class OperatorMetrics:
    """The metrics of one operator."""

    def __init__(self, coverage: Coverage, objects: Callable[[], int]) -> None:
        """Creates the metrics.

        Args:
            coverage: The namespaces.
            objects: Returns the number of objects that are served.
        """
        disable_created_metrics()
        self._registry = CollectorRegistry()
        self._registry.register(_Served(coverage))
        self._reconciles = Counter(
            "perdure_operator_reconciles", "Reconciles of objects.", ("outcome",), registry=self._registry
        )
        for outcome in (DONE, FAILED):
            self._reconciles.labels(outcome)
        Gauge("perdure_operator_objects", "Objects served.", registry=self._registry).set_function(
            lambda: float(objects())
        )
        ProcessCollector(namespace="perdure_operator", registry=self._registry)

    def count_reconcile(self, *, failed: bool) -> None:
        """Counts a reconcile that has ended."""
        self._reconciles.labels(FAILED if failed else DONE).inc()

    async def text(self) -> bytes:
        """Returns all metrics in Prometheus' text format."""
        return generate_latest(self._registry)
