"""Answers of jobs' workflows, as the operator gets them."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

from perdure.contract import JobPhase, JobResult, JobStatus, RoleStatus

NOW = datetime(2026, 1, 1, tzinfo=UTC)


def running_job(**fields: Any) -> JobStatus:
    known = JobStatus(
        name="a",
        namespace="nlp",
        uid="0a1b2c3d",
        phase=JobPhase.RUNNING,
        role="worker",
        backend="kubernetes",
        generation=2,
        nodes=2,
        nodes_min=2,
        nodes_max=2,
        world_size=2,
        restarts=1,
        max_restarts=10,
        restart_window=timedelta(hours=1),
        started_at=NOW,
    )
    return known.model_copy(update=fields)


def running_role(name: str, nodes: int, *, allowed: int = 0) -> RoleStatus:
    return RoleStatus(
        name=name,
        phase=JobPhase.RUNNING,
        generation=1,
        nodes=nodes,
        nodes_min=nodes,
        nodes_max=nodes,
        nodes_allowed=allowed or nodes,
        restarts=0,
    )


CANCELLED = JobResult(
    phase=JobPhase.CANCELLED,
    exit_code=4,
    reason="",
    generations=2,
    restarts=1,
    step=41,
    started_at=NOW,
    finished_at=NOW,
)
