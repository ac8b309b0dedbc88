"""Tests of Temporal's own command line on a job: an update by it is a user's request like any other."""

from __future__ import annotations

import asyncio
import json
import subprocess
from typing import Any

from tests.support.temporal_server import temporal_binary
from tests.workflows.fleet import Fleet, job_spec, submit
from tests.workflows.jobs import running


def _update(fleet: Fleet, workflow_id: str, name: str, argument: dict[str, Any]) -> subprocess.CompletedProcess[str]:
    config = fleet.client.service_client.config
    return subprocess.run(
        [
            *(str(temporal_binary()), "workflow", "update", "execute"),
            *("--address", config.target_host, "--namespace", fleet.client.namespace),
            *("--workflow-id", workflow_id, "--name", name, "--input", json.dumps(argument), "-o", "json"),
        ],
        capture_output=True,
        text=True,
        timeout=60,
    )


async def test_a_job_is_scaled_by_temporals_command_line(fleet: Fleet):
    handle = await submit(fleet, job_spec("1:2"))
    await running(handle, nodes=2)
    done = await asyncio.to_thread(_update, fleet, handle.id, "scale", {"nodes": "1", "reason": "by hand"})
    assert done.returncode == 0, done.stderr
    assert "changes to 1 node" in done.stdout
    await running(handle, nodes=1)
    done = await asyncio.to_thread(_update, fleet, handle.id, "scale", {"nodes": "auto"})
    assert "changes to 1:2 nodes" in done.stdout, done
    await running(handle, nodes=2)
    refused = await asyncio.to_thread(_update, fleet, handle.id, "scale", {"nodes": "many"})
    assert refused.returncode != 0
    assert "write 4, 2:8 for min and max, or auto for what the job states" in refused.stderr + refused.stdout
