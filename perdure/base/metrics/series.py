"""Makes Prometheus' series of samples, within bounds: no label value, wherever it comes from, can make them endless."""

from __future__ import annotations

import builtins
import re
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from datetime import timedelta
from typing import Final

from prometheus_client import CollectorRegistry, disable_created_metrics, generate_latest
from prometheus_client.metrics_core import Metric as Family
from prometheus_client.registry import Collector

from perdure.base.metrics.samples import Sample
from perdure.base.metrics.table import METRICS, Kind, Metric

MOST_SERIES: Final = 5_000
"""Label sets of one metric, at most. A worker has one for each job that it has seen of late, and its phase; more than a
Prometheus server handles well from one target come from invented names."""
LONGEST_VALUE: Final = 128
"""Characters of a label value, at most; names of Kubernetes' objects have 63."""
ZERO_FOR: Final = timedelta(seconds=35)
"""Time for which a new counter is exported as 0: Prometheus counts what grows between two scrapes, and would not count
the first failure of a kind. It is longer than usual intervals between scrapes."""
OTHER: Final = "other"
"""The value of all labels of a counter that would have made one series too many."""
OVERFLOW: Final = "perdure_metrics_overflow_total"
_FREE: Final = frozenset({"job_namespace", "job_name", "role", "node", "dataset", "gpu", "product", "host", "uid"})
"""Labels whose values Perdure does not choose."""

LabelSet = tuple[str, ...]


def clean(value: str) -> str:
    """Returns a label value of bounded length, without control characters and lone surrogates."""
    text = value[: LONGEST_VALUE + 1].encode("utf-8", "replace").decode("utf-8")
    text = "".join(letter if letter.isprintable() else "?" for letter in text)
    return text if len(text) <= LONGEST_VALUE else f"{text[: LONGEST_VALUE - 1]}…"


class Series(Collector):
    """Series that are counted and set over time. May be used by any thread.

    Invariant: whatever labels are given, no metric has more than `most` label sets, and those of `other`, whose
    remaining labels have values that Perdure chooses.
    """

    def __init__(
        self,
        metrics: Iterable[Metric],
        *,
        most: int = MOST_SERIES,
        zero_for: timedelta = ZERO_FOR,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Creates the object without any series.

        Args:
            metrics: The metrics that it may have.
            most: The number of label sets of one metric.
            zero_for: Time for which a new counter or histogram is exported as 0.
            clock: A monotonic clock.
        """
        self._zero_for = zero_for.total_seconds()
        self._clock = clock
        self._first_export: dict[str, dict[LabelSet, float]] = {}
        self._metrics = {metric.name: metric for metric in metrics}
        self._most = most
        self._lock = threading.Lock()
        self._values: dict[str, dict[LabelSet, float]] = {name: {} for name in self._metrics}
        self._buckets: dict[str, dict[LabelSet, list[int]]] = {
            name: {} for name, metric in self._metrics.items() if metric.kind is Kind.HISTOGRAM
        }

    def count(self, name: str, by: float = 1, /, **labels: str) -> None:
        """Adds to a counter."""
        with self._lock:
            found = self._label_set(self._metrics[name], labels)
            if found is not None:
                self._values[name][found] = self._values[name].get(found, 0.0) + max(by, 0.0)

    def set(self, name: str, value: float, /, **labels: str) -> None:
        """Sets a gauge, or a counter that something else counts."""
        with self._lock:
            found = self._label_set(self._metrics[name], labels)
            if found is not None:
                self._values[name][found] = value

    def observe(self, name: str, value: float, /, **labels: str) -> None:
        """Adds an observation to a histogram. A negative duration, as of a clock that was set back, counts as 0."""
        value = max(value, 0.0)
        with self._lock:
            metric = self._metrics[name]
            found = self._label_set(metric, labels)
            if found is None:
                return
            self._values[name][found] = self._values[name].get(found, 0.0) + value
            buckets = self._buckets[name].setdefault(found, [0] * (len(metric.buckets) + 1))
            buckets[sum(value > bound for bound in metric.buckets)] += 1

    def remove(self, **labels: str) -> None:
        """Removes all series that have these labels."""
        with self._lock:
            for name, metric in self._metrics.items():
                names = metric.all_labels
                if not labels.keys() <= set(names):
                    continue
                wanted = {names.index(label): clean(value) for label, value in labels.items()}
                for found in [one for one in self._values[name] if all(one[at] == text for at, text in wanted.items())]:
                    del self._values[name][found]
                    self._first_export.get(name, {}).pop(found, None)
                    self._buckets.get(name, {}).pop(found, None)

    def collect(self) -> Iterator[Family]:
        """Yields all metrics that have series, for Prometheus' client."""
        with self._lock:
            values = {name: dict(series) for name, series in self._values.items() if series}
            new = {name: self._new(name) for name in values if self._metrics[name].kind is not Kind.GAUGE}
            buckets = {name: {key: list(of) for key, of in series.items()} for name, series in self._buckets.items()}
        for name, series in values.items():
            metric = self._metrics[name]
            family = _family(metric)
            for label_set, value in series.items():
                labels = dict(zip(metric.all_labels, label_set, strict=True))
                begins = label_set in new.get(name, ())
                if metric.kind is not Kind.HISTOGRAM:
                    family.add_sample(name, labels, 0 if begins else value)
                    continue
                total = 0
                for bound, count in zip((*metric.buckets, float("inf")), buckets[name][label_set], strict=True):
                    total += 0 if begins else count
                    text = "+Inf" if bound == float("inf") else f"{bound:g}"
                    family.add_sample(f"{name}_bucket", {**labels, "le": text}, total)
                family.add_sample(f"{name}_count", labels, total)
                family.add_sample(f"{name}_sum", labels, 0 if begins else value)
            yield family

    def _new(self, name: str) -> builtins.set[LabelSet]:
        """Returns the label sets that have not been exported for long enough."""
        first, now = self._first_export.setdefault(name, {}), self._clock()
        return {key for key in self._values[name] if now - first.setdefault(key, now) < self._zero_for}

    def _label_set(self, metric: Metric, labels: Mapping[str, str]) -> LabelSet | None:
        """Returns the values of the labels; None for a gauge that would be one too many."""
        found = tuple(clean(labels.get(label, "")) for label in metric.all_labels)
        series = self._values[metric.name]
        if found in series or len(series) < self._most:
            return found
        if OVERFLOW in self._values:
            overflow = self._values[OVERFLOW]
            overflow[(metric.name,)] = overflow.get((metric.name,), 0.0) + 1
        if metric.kind is Kind.GAUGE:
            return None
        return tuple(OTHER if label in _FREE else value for label, value in zip(metric.all_labels, found, strict=True))


class CurrentSamples(Collector):
    """Series of samples that are read at each scrape, with the labels of one node or none."""

    def __init__(
        self,
        read: Callable[[], Iterable[Sample]],
        *,
        labels: Mapping[str, str] | None = None,
        information: Mapping[str, str] | None = None,
        most: int = MOST_SERIES,
    ) -> None:
        """Creates the object.

        Args:
            read: Reads the samples; those whose metric is unknown are left out.
            labels: Labels of all of them.
            information: More labels of metrics whose name ends with `_info`.
            most: The number of label sets of one metric.
        """
        self._read = read
        self._labels = {name: clean(value) for name, value in (labels or {}).items()}
        self._information = {name: clean(value) for name, value in (information or {}).items()}
        self._most = most
        self._left_out: dict[str, int] = {}

    def collect(self) -> Iterator[Family]:
        """Yields the metrics, for Prometheus' client."""
        families: dict[str, Family] = {}
        seen: dict[str, set[LabelSet]] = {}
        for sample in self._read():
            metric = METRICS.get(sample.name)
            if metric is None:
                continue
            own = {name: clean(sample.labels[name]) for name in metric.labels if name in sample.labels}
            key, known = tuple(own.values()), seen.setdefault(sample.name, set())
            if key in known:
                continue
            if len(known) >= self._most:
                self._left_out[sample.name] = self._left_out.get(sample.name, 0) + 1
                continue
            known.add(key)
            more = self._information if sample.name == "perdure_node_info" else {}
            family = families.setdefault(sample.name, _family(metric))
            family.add_sample(sample.name, {**self._labels, **own, **more}, sample.value)
        if self._left_out:
            metric = METRICS[OVERFLOW]
            family = families.setdefault(OVERFLOW, _family(metric))
            for name, number in self._left_out.items():
                family.add_sample(OVERFLOW, {**self._labels, "metric": name}, number)
        yield from families.values()


def _family(metric: Metric) -> Family:
    name = metric.name.removesuffix("_total") if metric.kind is Kind.COUNTER else metric.name
    return Family(name, f"{metric.meaning} [{metric.unit}]", metric.kind.value)


def text_of(*collectors: Collector) -> bytes:
    """Returns the series of all collectors in Prometheus' text format."""
    disable_created_metrics()
    texts: list[bytes] = []
    for collector in collectors:
        registry = CollectorRegistry()
        registry.register(collector)
        texts.append(generate_latest(registry))
    return merge(texts)


MOST_JOB_LABELS: Final = 20
"""Labels of a job that are exported; more would make each series of the join longer than what it says."""


def job_labels(labels: Mapping[str, str]) -> dict[str, str]:
    """Returns a job's labels as Prometheus' labels: `label_` and the name, with `_` for what names cannot have.

    Of labels that get the same name in this way, the first one in alphabetical order counts.
    """
    found: dict[str, str] = {}
    for name in sorted(labels)[:MOST_JOB_LABELS]:
        found.setdefault("label_" + re.sub(r"[^a-zA-Z0-9_]", "_", name[:LONGEST_VALUE]), clean(labels[name]))
    return found


def merge(texts: Iterable[bytes]) -> bytes:
    """Returns one text with the series of all texts: in it, each metric is described once, before its series.

    Of two samples of the same series the first one counts.
    """
    headers: dict[str, dict[str, str]] = {}
    series: dict[str, dict[str, str]] = {}
    for text in texts:
        current = ""
        for line in text.decode("utf-8", "replace").split("\n"):
            if line.startswith(("# HELP ", "# TYPE ")):
                _, keyword, current, *_ = line.split(" ", 3)
                headers.setdefault(current, {}).setdefault(keyword, line)
            elif line and not line.startswith("#"):
                identity, _, _ = line.rpartition(" ")
                series.setdefault(current, {}).setdefault(identity, line)
    names = {**headers, **series}
    lines = [line for name in names for of in (headers, series) for line in of.get(name, {}).values()]
    return "".join(f"{line}\n" for line in lines).encode()
