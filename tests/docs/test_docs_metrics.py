"""Tests that docs/metrics.md names the exported metrics of a worker that serves a job, and those in the messages."""

from __future__ import annotations

import asyncio
import json
import os
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from uuid import uuid4

import pytest
import temporalio.bridge.temporal_sdk_bridge as bridge
from pydantic import BaseModel
from temporalio.common import SearchAttributeKey

import perdure.workflows.search_attributes as attributes
from perdure.base.metrics.table import METRICS
from perdure.contract import Progress, ResourceUse
from perdure.contract.agents import AgentMessage, DeviceUsage
from tests.docs.pages import ROOT
from tests.support.exporting_worker import PERDURE, scrape, start_worker
from tests.support.temporal_server import DevServer

PAGE = (ROOT / "docs" / "metrics.md").read_text(encoding="utf-8")
NODES = PAGE.partition("## Node figures")[2].partition("## Job attributes")[0]
ATTRIBUTES = PAGE.partition("## Job attributes")[2]
ALWAYS = {"service_name", "namespace", "le"}
"""Labels that the page tells once for all, and the bounds of histograms."""


@dataclass(frozen=True)
class Row:
    """A metric, as the page or a scrape has it."""

    name: str
    kind: str
    labels: frozenset[str]


def rows(first: str, text: str = PAGE) -> Iterator[list[str]]:
    """The cells of rows whose first cell matches."""
    for line in text.splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if line.startswith("|") and re.fullmatch(first, cells[0].strip("`")):
            yield cells


def told() -> dict[str, Row]:
    found = (
        Row(cells[0].strip("`"), cells[1].partition(",")[0], frozenset(re.findall(r"`(\w+)`", cells[2])))
        for cells in rows(r"(temporal|perdure)_\w+")
    )
    own = {metric.name: frozenset(metric.all_labels) for metric in METRICS.values()}
    return {row.name: Row(row.name, row.kind, own.get(row.name, row.labels)) for row in found}


def scraped(text: str) -> dict[str, Row]:
    kinds = dict(re.findall(r"^# TYPE (\w+) (\w+)$", text, re.MULTILINE))
    labels: dict[str, set[str]] = {name: set() for name in kinds}
    for name, inner in re.findall(r"^(\w+)\{(.*)\} ", text, re.MULTILINE):
        of = name if name in kinds else re.sub(r"_(bucket|sum|count)$", "", name)
        labels[of] |= set(re.findall(r'(\w+)="', inner)) - ALWAYS
    return {name: Row(name, kind, frozenset(labels[name])) for name, kind in kinds.items()}


@pytest.mark.long("commands")
async def test_what_a_worker_exports_while_it_serves_a_job_is_told(temporal_server: DevServer, tmp_path: Path):
    environment = {
        **os.environ,
        **temporal_server.environment,
        "PERDURE_STATE": str(tmp_path / "state"),
        "PERDURE_TASK_QUEUE": f"metrics-{uuid4().hex[:8]}",
    }
    job = tmp_path / "job.json"
    command = [sys.executable, "-c", "pass"]
    role = {"nodes": 1, "nproc_per_node": 1, "command": command, "rendezvous": "env"}
    name = f"metrics-{uuid4().hex[:8]}"
    job.write_text(json.dumps({"name": name, "roles": {"worker": role}, "workdir": {"path": str(tmp_path)}}))
    worker, port = await start_worker(environment)
    try:
        async with asyncio.timeout(120):
            submit = await asyncio.create_subprocess_exec(PERDURE, "submit", "--wait", job, env=environment)
            assert await submit.wait() == 0
        exported = scraped(await asyncio.to_thread(scrape, port))
    finally:
        worker.terminate()
        await worker.wait()
    page = told()
    assert {"temporal_workflow_completed", "temporal_activity_task_received"} <= exported.keys()
    assert "perdure_job_generation" in exported
    assert sorted(exported.keys() - page.keys()) == []
    assert {name: row.kind for name, row in exported.items()} == {name: page[name].kind for name in exported}
    assert [row for name, row in exported.items() if not row.labels <= page[name].labels] == []


def test_all_that_is_told_is_in_the_sdk():
    """Tests that metrics that a short job does not produce, such as failures, occur in the SDK's native library."""
    library = Path(str(bridge.__file__)).read_bytes()
    of_sdk = [row for row in told().values() if row.name.startswith("temporal_")]
    names = {row.name.removeprefix("temporal_") for row in of_sdk} | {label for row in of_sdk for label in row.labels}
    # The compiler keeps this short name among its instructions. A worker exports it once a call has failed.
    names.discard("status_code")
    assert [name for name in names if name.encode() not in library] == []


def fields(model: type[BaseModel], prefix: str = "") -> set[str]:
    return {prefix + name for name in model.model_fields}


def test_the_figures_of_nodes_are_told():
    page = {cells[0].strip("`") for cells in rows(r"[a-z_]+(\[\]\.[a-z_]+)?", NODES)}
    sent = fields(ResourceUse) | fields(DeviceUsage, "devices[].") | fields(Progress)
    assert page - {"field"} == sent - fields(AgentMessage)


def test_search_attributes_are_told():
    told_of = {cells[0].strip("`"): cells[1] for cells in rows(r"[A-Z]\w+", ATTRIBUTES)}
    keys = [key for key in vars(attributes).values() if isinstance(key, SearchAttributeKey)]
    assert told_of == {key.name: "keyword" if key.value_type is str else "number" for key in keys}
