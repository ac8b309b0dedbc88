"""Generates the tables of Perdure's own metrics and alerts in `docs/metrics.md`; the rest of the page is written by
hand."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from perdure.base.metrics.table import AGENT_METRICS, BOTH, LABELS, METRICS, WORKER_METRICS, Metric

_PAGE = Path(__file__).resolve().parents[2] / "docs" / "metrics.md"
_RULES = Path(__file__).resolve().parents[2] / "deploy" / "prometheus" / "rules.yaml"
_TABLE = re.compile(r"(<!-- generated: (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)


def reference() -> str:
    """Returns the page's content, with its tables as they should be."""
    page = _PAGE.read_text(encoding="utf-8")
    return _TABLE.sub(lambda found: f"{found[1]}{_TABLES[found[2]]()}{found[3]}", page)


def _metrics(metrics: Sequence[Metric]) -> str:
    rows = (
        f"| `{one.name}` | {one.kind}, {one.unit} | {_names(one.labels)} | {one.meaning} | {one.alert} |"
        for one in metrics
    )
    return _table("metric | type | labels | meaning | alert on", rows)


def _labels() -> str:
    used = {label for metric in METRICS.values() for label in metric.all_labels}
    return _table("label | meaning", (f"| `{name}` | {text} |" for name, text in LABELS.items() if name in used))


def _alerts() -> str:
    groups: list[dict[str, Any]] = yaml.safe_load(_RULES.read_text(encoding="utf-8"))["groups"]
    rows = (
        f"| `{rule['alert']}` | {rule['labels']['severity']} | {_condition(rule['expr'])} | {rule.get('for', '')} |"
        for group in groups
        for rule in group["rules"]
        if "alert" in rule
    )
    return _table("alert | severity | condition | for", rows)


def _condition(expression: str) -> str:
    # A bar would end the cell.
    return f"`{expression}`".replace("|", "\\|")


def _names(labels: Sequence[str]) -> str:
    return ", ".join(f"`{label}`" for label in labels)


def _table(columns: str, rows: Iterable[str]) -> str:
    ruler = "-|" * (columns.count("|") + 1)
    return "\n".join([f"| {columns} |", f"|{ruler}", *rows, ""])


_TABLES: Mapping[str, Callable[[], str]] = {
    "worker": lambda: _metrics(WORKER_METRICS),
    "both": lambda: _metrics(BOTH),
    "agent": lambda: _metrics(AGENT_METRICS),
    "alerts": _alerts,
    "labels": _labels,
}
