"""Tests of TrainingJob objects whose user changes his mind while the job still does what he said before."""

from __future__ import annotations

from pathlib import Path

import pytest
from temporalio.client import Client as TemporalClient

from perdure.client.client import Client
from tests.kubernetes.pods import TestCluster
from tests.kubernetes.test_operator import Operator, Resources, address_of, local_nodes, resources
from tests.support.allocation import REPOSITORY
from tests.support.waiting import eventually

__all__ = ["local_nodes", "resources"]

EXAMPLE = REPOSITORY / "examples" / "04-checkpoints" / "plain.py"


@pytest.mark.long("cluster-faults")
async def test_a_job_that_is_resumed_while_it_saves_for_its_suspension_goes_on(
    cluster: TestCluster, resources: Resources, temporal_client: TemporalClient, local_nodes: None, tmp_path: Path
) -> None:
    client = Client(temporal=temporal_client, namespace=resources.namespace)
    # It saves between two steps, and each takes seconds.
    command = ["torchrun", str(EXAMPLE), "--steps", "1000", "--pause", "6", "--out", str(tmp_path / "out")]
    spec = {
        "backend": "local",
        "checkpoint": {"storage": f"file://{tmp_path / 'storage'}", "every": 1000},
        "limits": {"termination_grace_period": "1s"},
        "roles": {"worker": {"nodes": 1, "command": command}},
    }
    log = tmp_path / "out" / "steps-0"
    async with Operator(cluster.kubeconfig, resources.namespace, address_of(temporal_client), tmp_path / "log"):
        await resources.apply("job", spec)
        running = await resources.until("job", lambda known: known.status.phase == "RUNNING")
        await eventually(lambda: log.exists() and log.read_text(), within=120)
        await resources.patch("job", {"suspend": True})

        async def is_suspending() -> bool:
            return (await client.status("job")).suspending

        await eventually(is_suspending)
        generation = await resources.patch("job", {"suspend": False})
        await resources.until("job", lambda known: known.status.accepts(generation))

        async def goes_on() -> bool:
            return not await is_suspending()

        await eventually(goes_on)
        made = len(log.read_text().splitlines())
        phases: set[str] = set()

        async def has_made_more_steps() -> bool:
            phases.add((await resources.until("job", lambda _: True)).status.phase)
            return len(log.read_text().splitlines()) > made + 1

        await eventually(has_made_more_steps, within=60)
        assert phases == {"RUNNING"}
        known = await resources.until("job", lambda _: True)
        assert known.status.generation == running.status.generation
        await resources.delete("job")
        await resources.until_gone("job")
