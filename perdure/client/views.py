"""What a client shows of jobs, put together from the workflows' own answers."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime

from pydantic import BaseModel, ConfigDict

from workflows.messages import JobPhase, JobResult, JobStatus, LeaseView, NodePhase, NodeView, Progress, ProgressSource

FINAL_PHASES = frozenset({JobPhase.SUCCEEDED, JobPhase.FAILED, JobPhase.CANCELLED})


class View(BaseModel):
    """A value for people and scripts; `-o json` prints its fields."""

    model_config = ConfigDict(frozen=True, use_attribute_docstrings=True)


class Submission(View):
    """A job that was just started."""

    name: str
    namespace: str
    workflow_id: str
    run_id: str
    page: str = ""
    """In the Temporal UI; empty where its address is unknown."""
    warnings: tuple[str, ...] = ()
    """What the specification allows, and perhaps does not mean."""


class TaskFailure(View):
    """A workflow task that fails and is tried again; its workflow decides nothing meanwhile."""

    workflow_id: str
    """Of a job, or of one of its groups."""
    attempt: int
    cause: str = ""
    """The first line of the error; empty where no attempt was finished."""
    nondeterminism: bool = False
    """The worker's code does not do what the code did that began the run."""
    worker: str = ""
    """Which worker failed it first."""
    since: datetime


class JobSummary(View):
    """A job in a list, from Temporal's visibility: may be a moment old."""

    name: str
    namespace: str
    workflow_id: str
    run_id: str
    phase: JobPhase | None = None
    """None where the namespace has no search attributes and the job has not closed."""
    backend: str = ""
    owner: str = ""
    world_size: int | None = None
    restarts: int | None = None
    started_at: datetime
    finished_at: datetime | None = None
    task_failure: TaskFailure | None = None
    """Set where no worker can take the job's next decision."""


class JobSnapshot(View):
    """A job at one moment."""

    time: datetime
    status: JobStatus | None = None
    """None while the job has not answered yet; while it does not answer, its last answer."""
    nodes: tuple[NodeView, ...] = ()
    progress: Progress | None = None
    result: JobResult | None = None
    """Only in the last snapshot."""
    problem: str = ""
    """Why this is not fresh: what does not answer."""


@dataclass(frozen=True, kw_only=True)
class LeaseHeard:
    """What an agent said last through its lease."""

    rank: int
    incarnation: int
    view: LeaseView


def merge_nodes(
    job: Iterable[NodeView], groups: Iterable[NodeView], leases: Iterable[LeaseHeard]
) -> tuple[NodeView, ...]:
    """One view per node: the job knows its place in the world, its group the facts, its lease the latest progress."""
    by_group = {(view.rank, view.incarnation): view for view in groups}
    by_lease = {(lease.rank, lease.incarnation): lease.view for lease in leases}
    return tuple(
        _merged(view, by_group.get((view.rank, view.incarnation)), by_lease.get((view.rank, view.incarnation)))
        for view in job
    )


def _merged(job: NodeView, group: NodeView | None, lease: LeaseView | None) -> NodeView:
    fields: dict[str, object] = {}
    if group:
        fields = {
            "host": group.host or job.host,
            "address": group.address or job.address,
            "reason": job.reason or group.reason,
            "progress": group.progress,
            "metrics": group.metrics,
            "log_path": group.log_path,
        }
    if lease and job.phase not in (NodePhase.LOST, NodePhase.REMOVED):
        fields["log_end"] = lease.log_end
        if lease.progress:
            fields |= {"progress": lease.progress, "generation": lease.generation}
    return job.model_copy(update=fields)


def nodes_of_ranks(nodes: Iterable[NodeView], ranks: Iterable[int]) -> frozenset[int]:
    """The nodes that run these ranks of the current world; ranks that it does not have are left out."""
    members = sorted((node for node in nodes if node.group_rank is not None), key=lambda node: node.group_rank or 0)
    runs = [node.rank for node in members for _ in range(node.processes)]
    return frozenset(runs[rank] for rank in ranks if rank < len(runs))


def comparable(known: Sequence[Progress]) -> Sequence[Progress]:
    """The ones that count steps alike: those of scripts that report, where any does."""
    return [progress for progress in known if progress.source is ProgressSource.REPORTED] or known


def overall_progress(nodes: Sequence[NodeView], status: JobStatus | None) -> Progress | None:
    """How far the world is: as far as its slowest member; before anything steps, where the job last was."""
    members = sorted((node for node in nodes if node.group_rank is not None), key=lambda node: node.group_rank or 0)
    known = [node.progress for node in members if node.progress is not None]
    stepping = comparable(known)
    if not stepping:
        return status.progress if status else None
    slowest = min(stepping, key=lambda progress: progress.step)
    rates = [progress.steps_per_second for progress in stepping if progress.steps_per_second]
    losses = [progress.loss for progress in stepping if progress.loss is not None]
    totals = [progress.total_steps for progress in stepping if progress.total_steps]
    return slowest.model_copy(
        update={
            "steps_per_second": min(rates) if rates else None,
            "loss": losses[0] if losses else None,
            "total_steps": max(totals) if totals else None,
        }
    )


def all_warnings(nodes: Sequence[NodeView], status: JobStatus) -> tuple[str, ...]:
    """What the job itself warns of, and what only its nodes see."""
    apart = [str(node.rank) for node in nodes if node.group_rank is not None and node.progress and node.progress.apart]
    if not apart:
        return status.warnings
    warning = (
        f"ranks on node{'s' if len(apart) > 1 else ''} {', '.join(apart)} step without a process group: each trains by "
        "itself, over the same checkpoints. Unless that is meant, call torch.distributed.init_process_group() and wrap "
        "the model (DDP, FSDP)"
    )
    return (*status.warnings, warning)
