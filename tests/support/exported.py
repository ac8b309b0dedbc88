"""Reads Prometheus' text format."""

from __future__ import annotations

from collections.abc import Mapping

from prometheus_client.parser import text_string_to_metric_families

from perdure.base.metrics.table import METRICS


def values(text: bytes | str, *, without: tuple[str, ...] = ()) -> dict[tuple[str, ...], float]:
    """Returns the values by the metric's name and the values of its labels, in the order of the table.

    Args:
        text: The text.
        without: Labels that are left out.
    """
    text = text.decode() if isinstance(text, bytes) else text
    return {
        (one.name, *_in_order(family.name, one.name, one.labels, without)): one.value
        for family in text_string_to_metric_families(text)
        for one in family.samples
    }


def _in_order(family: str, name: str, labels: Mapping[str, str], without: tuple[str, ...]) -> list[str]:
    metric = METRICS.get(name) or METRICS[family]
    names = [*metric.all_labels, *(label for label in labels if label not in metric.all_labels)]
    return [labels[label] for label in names if label in labels and label not in without]
