"""Tests of the agent's defaults that depend on the size of its job."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path

import pytest

from perdure.agent.config import AgentConfig
from perdure.agent.node import Node
from perdure.agent.outbox import Outbox
from perdure.agent.progress import ProgressReader
from perdure.agent.state import StateFile
from perdure.agent.telemetry import Telemetry
from perdure.contract import NodeCredentials


def config(run_dir: Path, nodes: str) -> AgentConfig:
    return AgentConfig(
        node=NodeCredentials(uid="0a1b2c3d", role="worker", rank=0, incarnation=1, token="t"),
        job_id="job/default/a",
        job_first_run_id="run",
        group_id="group",
        task_queue="queue",
        address="127.0.0.1",
        nodes=nodes,
        run_dir=run_dir,
    )


@pytest.mark.parametrize(("nodes", "seconds"), [("1", 10), ("2:8", 10), ("100", 50), ("128:1000", 64)])
def test_an_agent_of_a_large_job_speaks_as_rarely_before_its_first_lease_as_after_it(
    tmp_path: Path, nodes: str, seconds: int
) -> None:
    agent = config(tmp_path, nodes)
    assert agent.first_interval == timedelta(seconds=seconds)
    outbox = Outbox(tmp_path / "outbox.json", send=_nowhere, not_found=lambda: None)
    ranks = ProgressReader(tmp_path)
    node = Node(agent, StateFile(tmp_path), to_job=outbox, to_group=outbox, progress=lambda: None)
    assert Telemetry(node, ranks, to_group=outbox).interval == agent.first_interval


async def _nowhere(signal: str, message: object) -> None:
    raise ConnectionError
