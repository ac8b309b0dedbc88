"""Reads the names and labels in expressions of PromQL; `promtool` checks their syntax."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from perdure.base.metrics.table import METRICS, Kind
from tests.docs.pages import ROOT

_SELECTOR = re.compile(r"\b((?:perdure|temporal)[_:][\w:]+)(?:\{([^}]*)\})?")
_MATCHER = re.compile(r'(\w+) *(=~|!~|!=|=) *"([^"]*)"')
_GROUPING = re.compile(r"\b(by|on|without|ignoring|group_left|group_right) *\(([^)]*)\)")
_STRING = re.compile(r'"[^"]*"')
_OF_PAGE = re.compile(
    r"^\| `((?:temporal|perdure_(?:operator|gateway))_\w+)` \| (\w+)[^|]*\| ([^|]*)\|", flags=re.MULTILINE
)


@dataclass(frozen=True)
class Selector:
    """The name of a metric, and the values that its labels must match."""

    name: str
    matchers: tuple[tuple[str, str], ...]
    """Labels and values; a regular expression's alternatives are values each."""


def selectors(expression: str) -> Iterator[Selector]:
    """Yields all selectors of an expression that name a metric."""
    without_groups = _GROUPING.sub("", expression)
    for name, inner in _SELECTOR.findall(without_groups):
        matchers = (
            (label, alternative)
            for label, operator, value in _MATCHER.findall(inner)
            for alternative in (value.split("|") if "~" in operator else [value])
        )
        yield Selector(name, tuple(matchers))


def groupings(expression: str) -> Iterator[str]:
    """Yields all labels by which an expression groups or joins."""
    for _, labels in _GROUPING.findall(_STRING.sub('""', expression)):
        yield from (label.strip() for label in labels.split(",") if label.strip())


def result_labels(expression: str, known: Mapping[str, frozenset[str]]) -> frozenset[str]:
    """Returns the labels of an expression's result: those of its first aggregation, or of its first metric."""
    first_metric = next(selectors(expression), None)
    assert first_metric is not None, expression
    aggregation = re.search(r"\bby *\(([^)]*)\)", expression)
    if aggregation and aggregation.start() < expression.index(first_metric.name):
        labels = frozenset(label.strip() for label in aggregation[1].split(","))
        return labels - {"le"} if "histogram_quantile" in expression else labels
    return known.get(first_metric.name, frozenset())


def exported_series() -> dict[str, frozenset[str]]:
    """Returns the labels of all series by their names; those of Temporal's SDK, the operator and the gateway are as the
    page has them."""
    found: dict[str, frozenset[str]] = {}
    for metric in METRICS.values():
        found.update(_series(metric.name, metric.kind, metric.all_labels))
    page = (ROOT / "docs" / "metrics.md").read_text(encoding="utf-8")
    for name, kind, cell in _OF_PAGE.findall(page):
        found.update(_series(name, kind, [*re.findall(r"`(\w+)`", cell), "namespace"]))
    return found


def _series(name: str, kind: str, labels: Sequence[str]) -> dict[str, frozenset[str]]:
    if kind != Kind.HISTOGRAM:
        return {name: frozenset(labels)}
    return {
        f"{name}_bucket": frozenset((*labels, "le")),
        f"{name}_sum": frozenset(labels),
        f"{name}_count": frozenset(labels),
    }
