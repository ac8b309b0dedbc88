"""Tests of the Events about TrainingJobs, as kubectl shows them from a real API server."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from temporalio.client import Client as TemporalClient

from perdure.operator.events import COMBINED, MOST_TEXTS, Events
from perdure.operator.status import ResourceStatus
from tests.kubernetes.pods import TestCluster
from tests.kubernetes.test_deploy import kubectl_says
from tests.kubernetes.test_operator import Operator, Resources, address_of, local_nodes, resources, sleeping

__all__ = ["local_nodes", "resources"]

STALLING = """
import pathlib, sys, time
from perdure_training import report
for step in range(1, 40):
    report(step=step)
    time.sleep(0.05)
while not pathlib.Path(sys.argv[1]).exists():
    time.sleep(0.1)
sys.exit(7)
"""


@pytest.mark.long("cluster-faults")
async def test_kubectl_tells_a_jobs_life_with_its_stall_and_that_it_is_held(
    cluster: TestCluster,
    kubectl: Path,
    resources: Resources,
    temporal_client: TemporalClient,
    local_nodes: None,
    tmp_path: Path,
) -> None:
    spec = sleeping(
        timing={"stall": {"after": "4s", "first_look": "2s", "steps": 5}},
        recovery={"on_hang": "report"},
        retry={"max_restarts": 0},
        hold_on_failure="15s",
    )
    spec["roles"]["worker"]["command"] = [sys.executable, "-c", STALLING, str(tmp_path / "go")]
    address, log = address_of(temporal_client), tmp_path / "operator.log"
    async with Operator(cluster.kubeconfig, resources.namespace, address, log):
        await resources.apply("job", spec)
        await resources.until("job", lambda known: known.status.condition("StepsStalled") is not None, within=240)
        (tmp_path / "go").touch()
        await resources.until("job", lambda known: known.status.finished, within=240)
        told = await kubectl_says(
            kubectl, "-n", resources.namespace, "describe", "tj/job", kubeconfig=cluster.kubeconfig
        )
    rows = [line.split(maxsplit=4) for line in told.partition("Events:")[2].splitlines()]
    told_of = {row[1]: (row[0], row[4]) for row in rows if row and row[0] in ("Normal", "Warning")}
    assert {"Submitted", "StepsStalled", "Incident", "Held", "Failed"} <= told_of.keys(), told
    kind, text = told_of["StepsStalled"]
    assert kind == "Warning"
    assert "the ranks of node 0 make no step" in text
    assert "7" in told_of["Held"][1]


async def test_a_flood_of_differing_texts_becomes_one_event_with_the_latest_and_their_count(
    cluster: TestCluster, kubectl: Path, resources: Resources
) -> None:
    job, events = await resources.apply("job", sleeping()), Events(resources.api)
    before = ResourceStatus()
    for number in range(MOST_TEXTS + 5):
        after = ResourceStatus(last_incident=f"#{number} rank 0 failed")
        await events.record(job, before, after)
        before = after
    words = ("get", "events", "--field-selector", "involvedObject.name=job", "-o", "json")
    told = await kubectl_says(kubectl, "-n", resources.namespace, *words, kubeconfig=cluster.kubeconfig)
    counts = {one["message"]: one["count"] for one in json.loads(told)["items"]}
    own = {f"#{number} rank 0 failed": 1 for number in range(MOST_TEXTS)}
    assert counts == own | {f"{COMBINED}#{MOST_TEXTS + 4} rank 0 failed": 5}
