"""Tests that docs/metrics.md names what the operator exports."""

from __future__ import annotations

import re

from perdure.operator.coverage import EVERYWHERE, Coverage
from perdure.operator.metrics import OperatorMetrics
from tests.docs.pages import ROOT


async def test_the_page_names_the_metrics_that_the_operator_exports() -> None:
    metrics = OperatorMetrics(Coverage([EVERYWHERE]), lambda: 0)
    exported = dict(re.findall(r"^# TYPE (\w+) (\w+)$", (await metrics.text()).decode(), re.MULTILINE))
    page = (ROOT / "docs" / "metrics.md").read_text(encoding="utf-8")
    assert dict(re.findall(r"^\| `(perdure_operator_\w+)` \| (\w+) \|", page, re.MULTILINE)) == exported
