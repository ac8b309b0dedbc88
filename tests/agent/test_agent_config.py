"""Tests of the agent's defaults that depend on the size of its job."""

from __future__ import annotations

from pathlib import Path

from perdure.agent.config import AgentConfig
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
