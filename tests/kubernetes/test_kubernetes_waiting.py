"""A job that no machine can take waits with the scheduler's words, and for as long as it is told to."""

from __future__ import annotations

import re
from pathlib import Path

from tests.kubernetes.pods import PodJob, TestCluster, role
from tests.kubernetes.site import perdure, start
from workflows.messages import JobPhase


async def test_a_job_waits_for_machines_until_its_queue_timeout(
    cluster: TestCluster, job: PodJob, tmp_path: Path
) -> None:
    async with perdure(cluster, job.namespace) as (_, client):
        waiting = await start(
            client,
            role(nodes=2, resources={"cpu": 1000}),
            tmp_path,
            # Shorter than the wait for a node that has a machine, which is not what is waited for here.
            limits={"queue_timeout": "5s"},
            timing={"rendezvous": {"join_timeout": "5m"}},
        )
        status = await waiting.until(lambda known: known.phase is JobPhase.WAITING)
        # Whichever of the two nodes the scheduler has spoken of first.
        assert re.match(
            r"0 of at least 2 nodes are ready; node [01]: no machine can take it \(Unschedulable: ", status.reason
        )
        assert "Insufficient cpu" in status.reason
        assert status.reason.endswith("(limits.queue_timeout)")
        result = await client.wait(waiting.name)
        assert (result.phase, result.exit_code) == (JobPhase.FAILED, 3)
        assert re.search(
            r"0 nodes were ready after 5s \(limits.queue_timeout\), and nodes.min is 2; node [01]: no", result.reason
        )
