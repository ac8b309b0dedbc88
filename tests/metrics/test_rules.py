"""Tests that rules and dashboards name metrics, labels, values and commands that exist; promtool tests what they do."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from typing import Any

import pytest
import yaml
from typer.core import TyperGroup
from typer.main import get_command

from perdure.base.metrics.table import LABELS
from perdure.cli.main import app
from perdure.contract import JobPhase
from scripts.dashboards import DASHBOARDS, files
from tests.support.allocation import REPOSITORY
from tests.support.promql import exported_series, groupings, result_labels, selectors

RULES = REPOSITORY / "deploy" / "prometheus" / "rules.yaml"
DECLARED: list[dict[str, Any]] = [
    rule for group in yaml.safe_load(RULES.read_text(encoding="utf-8"))["groups"] for rule in group["rules"]
]
ALERTS = [rule for rule in DECLARED if "alert" in rule]
RECORDED = [rule for rule in DECLARED if "record" in rule]
FREE = {"job_namespace", "job_name", "node", "role", "dataset"}
"""Labels whose values users choose."""


def known_series() -> dict[str, frozenset[str]]:
    series = exported_series()
    return {**series, **{rule["record"]: result_labels(rule["expr"], series) for rule in RECORDED}}


def expressions() -> Iterator[Any]:
    for rule in DECLARED:
        yield pytest.param(rule["expr"], id=rule.get("alert") or rule["record"])
    for dashboard in DASHBOARDS:
        for panel in dashboard.panels:
            for legend, query in panel.queries.items():
                yield pytest.param(query, id=f"{dashboard.uid}: {panel.title}{legend and ', '}{legend}")
        for name, query in dashboard.variables.items():
            yield pytest.param(query, id=f"{dashboard.uid}: {name}")


@pytest.mark.parametrize("expression", list(expressions()))
def test_an_expression_names_metrics_labels_and_values_that_exist(expression: str) -> None:
    series = known_series()
    found = list(selectors(expression))
    assert found
    of_all: set[str] = set()
    for selector in found:
        assert selector.name in series, f"no such metric: {selector.name}"
        labels = series[selector.name]
        of_all |= labels
        for label, value in selector.matchers:
            assert label in labels, f"{selector.name} has no label {label}"
            assert _can_be(label, value), f"{selector.name}: {label} is never {value}"
    assert set(groupings(expression)) - of_all == set()


def _can_be(label: str, value: str) -> bool:
    if label == "phase":
        return value in JobPhase.__members__
    return label in FREE or f"`{value}`" in LABELS[label]


@pytest.mark.parametrize("dashboard", DASHBOARDS, ids=lambda dashboard: dashboard.uid)
def test_a_legend_has_only_labels_of_its_query(dashboard: Any) -> None:
    series = known_series()
    for panel in dashboard.panels:
        for legend, query in panel.queries.items():
            assert set(re.findall(r"\{\{(\w+)\}\}", legend)) - result_labels(query, series) == set(), panel.title


def test_the_dashboards_are_current() -> None:
    for path, content in files().items():
        assert path.read_text(encoding="utf-8") == content, "run: make docs"
    assert {path.name for path in (REPOSITORY / "deploy" / "grafana").iterdir()} == {path.name for path in files()}


@pytest.mark.parametrize("rule", ALERTS, ids=lambda rule: rule["alert"])
def test_an_alert_tells_what_happened_and_what_to_do(rule: dict[str, Any]) -> None:
    assert rule["labels"]["severity"] in ("critical", "warning", "info")
    assert rule["annotations"].keys() == {"summary", "action"}
    labels = result_labels(rule["expr"], known_series())
    for text in rule["annotations"].values():
        assert set(re.findall(r"\$labels\.(\w+)", text)) - labels == set()
    command = re.match(r"perdure \w+( \{\{ \$labels\.\w+ \}\}| -{1,2}\w+)*", rule["annotations"]["action"])
    if command:
        _, name, *arguments = shlex.split(re.sub(r"\{\{ .*? \}\}", "0", command[0]))
        root = get_command(app)
        assert isinstance(root, TyperGroup)
        root.commands[name].make_context(name, arguments)


def test_each_rule_has_one_name_and_each_alert_a_test_for_promtool() -> None:
    names = [rule.get("alert") or rule["record"] for rule in DECLARED]
    assert len(set(names)) == len(names)
    tests = (RULES.parent / "rules.test.yaml").read_text(encoding="utf-8")
    assert [rule["alert"] for rule in ALERTS if rule["alert"] not in tests] == []


def test_what_no_one_can_name_is_refused() -> None:
    known = {"perdure_jobs": frozenset({"phase", "backend"})}
    [selector] = selectors('sum by (phase) (perdure_jobs{phase=~"RUNNING|WAITING", backend!="local"})')
    assert selector.matchers == (("phase", "RUNNING"), ("phase", "WAITING"), ("backend", "local"))
    assert list(groupings("max by (phase, le) (perdure_jobs) and on (backend) perdure_jobs")) == [
        "phase",
        "le",
        "backend",
    ]
    assert result_labels("sum by (phase) (perdure_jobs) > 1", known) == {"phase"}
    assert result_labels("perdure_jobs == 1 and sum by (phase) (perdure_jobs)", known) == {"phase", "backend"}
