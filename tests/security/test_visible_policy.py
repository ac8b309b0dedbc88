"""Tests that users who reach Temporal only are shown the site policy in force."""

from __future__ import annotations

import asyncio
import json
import secrets
from pathlib import Path

from temporalio.client import Client as TemporalClient

from perdure.activities.nodes.kubernetes import KubernetesBackend, KubernetesSettings
from perdure.activities.nodes.kubernetes.site_policy import SitePolicy
from perdure.activities.nodes.local.backend import LocalBackend
from perdure.worker import running_worker
from tests.support.command_line import CommandLine

POLICY = SitePolicy(capabilities=("IPC_LOCK",), max_gpus=64)


async def doctor(client: TemporalClient, queue: str, folder: Path, *options: str) -> str:
    environment = {
        "TEMPORAL_ADDRESS": client.service_client.config.target_host,
        "TEMPORAL_NAMESPACE": client.namespace,
        "PERDURE_TASK_QUEUE": queue,
        "COLUMNS": "200",
    }
    done = await asyncio.to_thread(CommandLine(folder, environment).run, "doctor", *options)
    return done.out


async def test_the_policy_in_force_is_shown(temporal_client: TemporalClient, tmp_path: Path) -> None:
    secret = secrets.token_hex(8)
    settings = KubernetesSettings(
        agent_image="x", policy=POLICY, connection_secret="temporal", connection={"TEMPORAL_ADDRESS": secret}
    )
    queue = f"queue-{secret}"
    async with running_worker(temporal_client, backends=[KubernetesBackend(settings)], task_queue=queue):
        as_json, as_text = await asyncio.gather(
            doctor(temporal_client, queue, tmp_path, "-o", "json"), doctor(temporal_client, queue, tmp_path)
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


async def test_a_site_without_pods_has_no_policy(temporal_client: TemporalClient, tmp_path: Path) -> None:
    queue = f"queue-{secrets.token_hex(8)}"
    async with running_worker(temporal_client, backends=[LocalBackend(connection={})], task_queue=queue):
        checks = json.loads(await doctor(temporal_client, queue, tmp_path, "-o", "json"))
    assert "site policy" not in {one["name"] for one in checks}
