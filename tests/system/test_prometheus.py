"""Tests that a real Prometheus, scraping a real job, has data for every rule and every panel of the dashboards."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import subprocess
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from uuid import uuid4

import psutil
import pytest
import yaml

from perdure.agent.torch_events import KINDS
from scripts.dashboards import DASHBOARDS
from tests.support.allocation import REPOSITORY
from tests.support.command_line import end_nodes
from tests.support.exporting_worker import PERDURE, start_worker
from tests.support.nvml import compiled_driver
from tests.support.prometheus import Prometheus, prometheus
from tests.support.promql import selectors
from tests.support.temporal_server import DevServer
from tests.support.waiting import eventually

RULES = REPOSITORY / "deploy" / "prometheus" / "rules.yaml"
SCRIPT = Path(__file__).with_name("observed.py")
PATIENCE = 180.0
TORCH_EVENTS = "perdure_node_torch_events_total"
VARIABLES = (
    ("perdure_job_phase", "job_namespace"),
    ('perdure_job_phase{job_namespace="default"}', "job_name"),
    ("perdure_node_info", "node"),
)
"""What variables of dashboards can be chosen from: the series and their label."""
QUIET = {
    "perdure_listing_failures_total",
    "perdure_metrics_overflow_total",
    "perdure_node_memory_limit_bytes",
    "temporal_workflow_task_execution_failed",
}
"""Metrics that only a defect makes, or that not every machine has; no query of a dashboard depends on them alone."""


def rules(kind: str) -> Iterator[dict[str, Any]]:
    for group in yaml.safe_load(RULES.read_text())["groups"]:
        yield from (rule for rule in group["rules"] if kind in rule)


@pytest.mark.long("metrics")
def test_the_rules_hold_what_promtool_expects(prometheus_programs: dict[str, Path]) -> None:
    for command in (("check", "rules", "rules.yaml"), ("test", "rules", "rules.test.yaml")):
        done = subprocess.run(
            [prometheus_programs["promtool"], *command], cwd=RULES.parent, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.long("metrics")
@pytest.mark.timeout(1200)
async def test_every_rule_and_every_panel_has_data_of_a_real_job(
    prometheus_programs: dict[str, Path], temporal_server: DevServer, tmp_path: Path
) -> None:
    environment = {
        **os.environ,
        **temporal_server.environment,
        "PERDURE_STATE": str(tmp_path / "state"),
        "PERDURE_TASK_QUEUE": f"metrics-{uuid4().hex[:8]}",
        "LD_LIBRARY_PATH": str(compiled_driver(tmp_path).parent),
    }
    name = f"observed-{uuid4().hex[:8]}"
    script = 'set -e; torchrun "$0" "$1"; while [ ! -e "$1/seen" ]; do sleep 0.2; done'
    command = ["bash", "-c", script, str(SCRIPT), str(tmp_path)]
    role = {"nodes": 2, "nproc_per_node": 1, "command": command}
    storage = {"storage": f"file://{tmp_path / 'storage'}", "every": 20}
    job = {"name": name, "labels": {"team": "vision"}, "roles": {"worker": role}, "checkpoint": storage}
    (tmp_path / "job.json").write_text(json.dumps({**job, "workdir": {"path": str(tmp_path)}}))
    worker, port = await start_worker(environment)
    began = time.time()
    try:
        async with prometheus(prometheus_programs["prometheus"], tmp_path, target=port, rules=RULES) as server:
            submit = await asyncio.create_subprocess_exec(PERDURE, "submit", tmp_path / "job.json", env=environment)
            assert await submit.wait() == 0
            await _has_series(server, f'perdure:job_phase{{phase="RUNNING", job_name="{name}"}}')
            ended = "perdure_jobs_ended_total"
            # Operators serve their own metrics; tests/operator compares them with the page.
            expressions = {one for one in _all_expressions(name) if ended not in one and "perdure_operator_" not in one}
            assert await _without_data(server, expressions) == []
            assert all(server.label_values(*variable) for variable in VARIABLES)
            [info] = server.query(f'perdure_node_info{{job_name="{name}", node="0"}}')
            assert info["metric"]["label_team"] == "vision"
            await _has_series(server, f'perdure_job_restarts_total{{job_name="{name}", cause="KILLED"}} == 1')

            (tmp_path / "end").touch()
            await _has_series(server, f'{TORCH_EVENTS}{{job_name="{name}", event="SUCCEEDED"}} == 1', number=4)
            _torch_recorded_what_prometheus_has(server, name, tmp_path / "state", between=(began, time.time()))

            (tmp_path / "seen").touch()
            await _has_series(server, f'{ended}{{phase="SUCCEEDED"}} > 0')
            assert await _without_data(server, {one for one in _all_expressions(name) if ended in one}) == []
    finally:
        worker.terminate()
        await worker.wait()
        end_nodes(tmp_path / "state")
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                if str(tmp_path) in process.cmdline():
                    process.kill()


def _torch_recorded_what_prometheus_has(
    server: Prometheus, name: str, state: Path, *, between: tuple[float, float]
) -> None:
    """torch's own events, of the torchruns on both nodes: ranks were started twice, and ended well once."""
    newest: dict[tuple[str, str, str], float] = {}
    counts = Counter[tuple[str, str, str]]()
    for path in state.rglob("torchrun.jsonl"):
        for event in map(json.loads, path.read_text().splitlines()):
            state_name = event["name"].removeprefix("torchelastic.worker.status.")
            kind = (str(path), state_name, str(event["attributes"].get("source")))
            if kind[1:] in KINDS:
                counts[kind] += 1
                newest[kind] = event["time"]
    started = [count for (_, event, _), count in counts.items() if event == "START"]
    assert started == [2, 2]
    times = server.query(f'perdure_node_torch_event_time_seconds{{job_name="{name}"}}')
    assert sorted(float(one["value"][1]) for one in times) == sorted(newest.values())
    assert all(between[0] <= time <= between[1] for time in newest.values())
    numbers = server.query(f'{TORCH_EVENTS}{{job_name="{name}"}} > 0')
    assert sorted((one["metric"]["event"], one["metric"]["source"], int(one["value"][1])) for one in numbers) == sorted(
        (*kind[1:], count) for kind, count in counts.items()
    )


def _all_expressions(name: str) -> set[str]:
    """All queries of the dashboards, what rules record, and the metrics that alerts are about."""
    queries = [query for dashboard in DASHBOARDS for panel in dashboard.panels for query in panel.queries.values()]
    found = {_filled(query, name) for query in queries} | {rule["expr"] for rule in rules("record")}
    for rule in rules("alert"):
        found |= {selector.name for selector in selectors(rule["expr"])}
    return {one for one in found if {selector.name for selector in selectors(one)} - QUIET}


async def _has_series(server: Prometheus, expression: str, *, number: int = 1) -> None:
    async def found() -> bool:
        return len(await asyncio.to_thread(server.query, expression)) >= number

    await eventually(found, within=PATIENCE, what=expression)


async def _without_data(server: Prometheus, expressions: set[str]) -> list[str]:
    """Returns the queries that have no data in the end; rates and new counters take a while."""
    missing = set(expressions)

    async def complete() -> bool:
        for expression in list(missing):
            result = await asyncio.to_thread(server.query, expression)
            # A quantile of no observations is no number.
            if any(series["value"][1] != "NaN" for series in result):
                missing.discard(expression)
        return not missing

    with contextlib.suppress(AssertionError):
        await eventually(complete, within=PATIENCE)
    return sorted(missing)


def _filled(query: str, name: str) -> str:
    # A query that has a number in any case would show nothing.
    query = query.removesuffix(" or vector(0)")
    for variable, value in {"$namespace": "default", "$name": name, "$node": ".*"}.items():
        query = query.replace(variable, value)
    return query
