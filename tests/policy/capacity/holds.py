"""Jobs whose ranks wait at a step for a planned change, and what they say."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

from perdure.contract import (
    CheckpointRef,
    HoldRequest,
    SnapshotUse,
    StoredCheckpoint,
)
from perdure.contract.transitions import NodeStepping, NodeStoredCheckpoint
from perdure.workflows.policy.world.group_desire import desires_of
from tests.policy.scenario import UID, Scenario

SPLIT = SnapshotUse(replicated=False, copies=1)


ALONE = SnapshotUse(replicated=False, copies=0)


STORAGE: dict[str, Any] = {"checkpoint": {"storage": "file:///ckpt"}}


PROBLEM = "expert differs between ranks, and a world of another size cannot split that"


def training(nodes: str = "3", use: SnapshotUse | None = SPLIT, **spec: Any) -> Scenario:
    """A job whose ranks keep their state in memory in this way."""
    job = Scenario(nodes, **spec).running()
    assert job.state.world is not None
    for rank in job.state.world.members:
        job.transition(rank, NodeStepping, generation=job.generation, snapshots=use)
    return job


def hold(job: Scenario) -> HoldRequest | None:
    return desires_of(job.state)[0].hold


def held(job: Scenario, *, step: int = 40, problem: str = "", number: int | None = None, **facts: Any) -> Scenario:
    """All ranks wait at a step, or say why it would be lost."""
    request = hold(job)
    number = number or (request.number if request is not None else 0)
    checkpoint = CheckpointRef(step=step, run=UID, generation=job.generation)
    stored = StoredCheckpoint(checkpoint=checkpoint, answers=number, in_memory=True)
    return job.transition(0, NodeStoredCheckpoint, generation=job.generation, stored=stored, problem=problem, **facts)


def size(job: Scenario) -> int:
    return job.state.world.nodes if job.state.world is not None else 0


WITHIN = timedelta(minutes=1)
"""`checkpoint.save_timeout`."""


def changes(job: Scenario) -> list[str]:
    """What the entries say was lost by changes."""
    return [one.text for entry in job.state.incidents for one in entry.evidence if "ranks waited at" in one.text]
