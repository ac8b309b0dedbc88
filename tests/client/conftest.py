"""Fixtures of a worker in the test's own process, with the session's server: real workflows, agents and processes."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from temporalio.client import Client as TemporalClient

from perdure.activities.nodes.local.backend import LocalBackend
from perdure.client.client import Client
from perdure.worker import running_worker
from tests.support.command_line import end_nodes
from tests.support.warm_agents import warm_agents


@pytest.fixture
async def client(
    temporal_client: TemporalClient, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[Client]:
    """A client of a control plane that works."""
    monkeypatch.setenv("PERDURE_STATE", str(tmp_path))
    connection = {
        "TEMPORAL_ADDRESS": temporal_client.service_client.config.target_host,
        "TEMPORAL_NAMESPACE": temporal_client.namespace,
    }
    backend = LocalBackend(tmp_path, connection=connection)
    with warm_agents():
        async with running_worker(temporal_client, backends=[backend]):
            yield Client(temporal=temporal_client)
        end_nodes(tmp_path)
