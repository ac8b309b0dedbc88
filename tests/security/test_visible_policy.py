"""Tests that users who reach Temporal only are shown the site policy in force."""

from __future__ import annotations

import asyncio
import json
import os
import secrets
import sys

from temporalio.client import Client as TemporalClient

from perdure.activities.nodes.kubernetes import KubernetesBackend, KubernetesSettings
from perdure.activities.nodes.kubernetes.site_policy import SitePolicy
from perdure.activities.nodes.local.backend import LocalBackend
from perdure.worker import running_worker

POLICY = SitePolicy(capabilities=("IPC_LOCK",), max_gpus=64)


async def doctor(client: TemporalClient, queue: str, *options: str) -> str:
    environment = {
        **os.environ,
        "TEMPORAL_ADDRESS": client.service_client.config.target_host,
        "TEMPORAL_NAMESPACE": client.namespace,
        "PERDURE_TASK_QUEUE": queue,
        "COLUMNS": "200",
    }
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "perdure.cli.main", "doctor", *options), env=environment, stdout=asyncio.subprocess.PIPE
    )
    said, _ = await process.communicate()
    return said.decode()


async def test_the_policy_in_force_is_shown(temporal_client: TemporalClient) -> None:
    secret = secrets.token_hex(8)
    settings = KubernetesSettings(
        agent_image="x", policy=POLICY, connection_secret="temporal", connection={"TEMPORAL_ADDRESS": secret}
    )
    queue = f"queue-{secret}"
    async with running_worker(temporal_client, backends=[KubernetesBackend(settings)], task_queue=queue):
        as_json, as_text = await asyncio.gather(
            doctor(temporal_client, queue, "-o", "json"), doctor(temporal_client, queue)
        )
    [check] = [one for one in json.loads(as_json) if one["name"] == "site policy"]
    assert check["verdict"] == "ok"
    assert SitePolicy.model_validate(check["facts"]) == POLICY
    assert secret not in check["detail"] + json.dumps(check["facts"])
    lines = [line.strip() for line in as_text.splitlines()]
    assert "capabilities: IPC_LOCK" in lines
    assert "host_paths: none" in lines
    assert "max_gpus: 64" in lines
    assert "max_nodes: unset" in lines


async def test_a_site_without_pods_has_no_policy(temporal_client: TemporalClient) -> None:
    queue = f"queue-{secrets.token_hex(8)}"
    async with running_worker(temporal_client, backends=[LocalBackend(connection={})], task_queue=queue):
        checks = json.loads(await doctor(temporal_client, queue, "-o", "json"))
    assert "site policy" not in {one["name"] for one in checks}
