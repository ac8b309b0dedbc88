"""Views of jobs for clients, assembled from the workflows' answers."""

from __future__ import annotations

from collections.abc import Container, Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from functools import reduce
from typing import ClassVar

from pydantic import BaseModel, ConfigDict, SecretStr

from perdure.base.notebook import Shown
from perdure.contract import (
    CheckpointView,
    JobPhase,
    JobResult,
    JobStatus,
    LeaseView,
    NodePhase,
    NodeView,
    Progress,
    ProgressSource,
)
from perdure.contract.courses import join_courses

_AT_REST = (JobPhase.STARTING, JobPhase.RENDEZVOUS, JobPhase.SUSPENDED)
_SHORTEST_IDLE = timedelta(seconds=5)
_IDLE_STEPS = 10
"""Usual steps that an idle time has at least: a step that takes a few times as long is slow."""

FINAL_PHASES = frozenset({JobPhase.SUCCEEDED, JobPhase.FAILED, JobPhase.CANCELLED})


class View(Shown, BaseModel):
    """A value for people and scripts; `-o json` prints its fields, and a notebook shows them."""

    model_config: ClassVar[ConfigDict] = ConfigDict(frozen=True, use_attribute_docstrings=True)


class Submission(View):
    """A job that was just started."""

    name: str
    namespace: str
    workflow_id: str
    run_id: str
    page: str = ""
    """The job's page in the Temporal UI; empty if its address is unknown."""
    warnings: tuple[str, ...] = ()
    """Settings of the specification that are valid and probably not intended."""


class IssuedTicket(View):
    """A ticket for joining a job through the gateway. Only its maker knows its secret."""

    id: str
    """Names the ticket in `revoke_ticket`."""
    secret: SecretStr
    nodes: int
    expires_at: datetime


class TaskFailure(View):
    """A workflow task that fails and is retried; its workflow decides nothing meanwhile."""

    workflow_id: str
    """The workflow of a job, or of one of its groups."""
    attempt: int
    cause: str = ""
    """The first line of the error; empty if no attempt has finished."""
    nondeterminism: bool = False
    """The worker's code does not make the commands that the run's history holds."""
    worker: str = ""
    """The worker on which the task failed first."""
    since: datetime


class FailingActivity(View):
    """An activity that fails and is tried again; its workflow waits for it."""

    workflow_id: str
    """The workflow of a job, of one of its groups or datasets, or of its store."""
    activity_type: str
    attempt: int
    """The next or the present attempt: all earlier ones have failed."""
    cause: str
    """The error of the last attempt."""
    since: datetime
    """When the activity was requested, or its present attempt began."""


class Pause(View):
    """A workflow or an activity that an operator has paused in Temporal."""

    workflow_id: str
    """The workflow of a job, of one of its groups or datasets, or of its store."""
    activity_id: str = ""
    """The activity of the workflow that is paused; empty: the whole workflow."""
    activity_type: str = ""
    by: str = ""
    """Who has paused it, as the server knows it."""
    reason: str = ""
    since: datetime | None = None


class JobSummary(View):
    """A job in a list, from Temporal's visibility: may be a moment old."""

    name: str
    namespace: str
    workflow_id: str
    run_id: str
    phase: JobPhase | None = None
    """None if the namespace has no search attributes and the job has not closed."""
    backend: str = ""
    owner: str = ""
    world_size: int | None = None
    restarts: int | None = None
    started_at: datetime
    finished_at: datetime | None = None
    task_failure: TaskFailure | None = None
    """Set if no worker can make the job's next decision."""
    pause: Pause | None = None
    """Set if an operator has paused the job's workflow in Temporal."""


class JobSnapshot(View):
    """A job at one moment."""

    time: datetime
    status: JobStatus | None = None
    """None while the job has not answered yet; while it does not answer, its last answer."""
    nodes: tuple[NodeView, ...] = ()
    progress: Progress | None = None
    result: JobResult | None = None
    """Set in the last snapshot only."""
    problem: str = ""
    """Why this snapshot is not fresh: the part that does not answer."""


@dataclass(frozen=True, kw_only=True)
class NodeLease:
    """An agent's latest report in its lease."""

    rank: int
    incarnation: int
    view: LeaseView | None = None
    """None before the first report."""
    pause: Pause | None = None
    """Set if an operator has paused the lease in Temporal."""


def merge_nodes(
    job: Iterable[NodeView], groups: Iterable[NodeView], leases: Iterable[NodeLease]
) -> tuple[NodeView, ...]:
    """Merges the views of each node: the job knows its place in the world, its group the facts, its lease the latest
    progress."""
    by_group = {(view.rank, view.incarnation): view for view in groups}
    by_lease = {(lease.rank, lease.incarnation): lease for lease in leases}
    return tuple(
        _merge(view, by_group.get((view.rank, view.incarnation)), by_lease.get((view.rank, view.incarnation)))
        for view in job
    )


def _merge(job: NodeView, group: NodeView | None, lease: NodeLease | None) -> NodeView:
    fields: dict[str, object] = {}
    if group:
        fields = {
            "host": group.host or job.host,
            "address": group.address or job.address,
            "reason": job.reason or group.reason,
            "log_path": group.log_path,
        }
    if lease and job.phase not in (NodePhase.LOST, NodePhase.REMOVED):
        if lease.view:
            view = lease.view
            fields |= {
                "log_end": view.log_end,
                "idle": view.idle,
                "usual_step": view.usual_step,
                "step_times": view.step_times,
                "unsplit_steps": view.unsplit_steps,
                "metrics": view.metrics,
                "peaks": view.peaks,
            }
            if lease.view.progress:
                fields |= {"progress": lease.view.progress, "generation": lease.view.generation}
        if lease.pause:
            # Nothing is known about the node until its agent holds the lease again.
            by = f" by {lease.pause.by}" if lease.pause.by else ""
            fields |= {"reachable": False, "reason": f"its lease is paused in Temporal{by}"}
    merged = job.model_copy(update=fields)
    if merged.progress is None or not (is_idle(merged) or begins(merged)):
        return merged
    # The mean of the last minute says nothing while no step is made.
    return merged.model_copy(update={"progress": merged.progress.model_copy(update={"steps_per_second": None})})


def nodes_of_ranks(nodes: Iterable[NodeView], ranks: Container[int]) -> frozenset[int]:
    """The nodes that run these ranks of the current world. Ranks that do not exist are left out, and not counted
    through: a range of them has any length."""
    members = sorted((node for node in nodes if node.group_rank is not None), key=lambda node: node.group_rank or 0)
    runs = [node.rank for node in members for _ in range(node.processes)]
    return frozenset(node for rank, node in enumerate(runs) if rank in ranks)


def comparable(known: Sequence[Progress]) -> Sequence[Progress]:
    """The reports that count steps in the same way: of the newest generation, and of scripts that report, if there are
    any. An agent holds the last report of the generation before until all of its ranks have made a step."""
    newest = max((progress.generation for progress in known), default=0)
    current = [progress for progress in known if progress.generation in (0, newest)]
    return [progress for progress in current if progress.source is ProgressSource.REPORTED] or current


def closed(status: JobStatus, summary: JobSummary) -> JobStatus:
    """The status of a job whose workflow may have been ended without the job: terminated, or by a time limit. It still
    answers as it was then, running."""
    if status.finished_at is not None or summary.finished_at is None:
        return status
    reason = "its workflow was ended in Temporal and not by the job: it was terminated, or a time limit of it is over"
    update = {"phase": summary.phase or status.phase, "reason": reason, "finished_at": summary.finished_at}
    return status.model_copy(update={**update, "next_action": ""})


def training_step(progress: Progress, checkpoint: CheckpointView) -> int:
    """The step of the training: as the script reports it, else the step that the checkpointer has restored and those
    that the ranks have counted since."""
    if progress.source is ProgressSource.REPORTED or checkpoint.restored_generation != progress.generation:
        return progress.step
    return (checkpoint.restored_step or 0) + progress.step


def is_idle(node: NodeView) -> bool:
    """Whether the node's ranks have not stepped for much longer than a step usually takes. That is not a stall yet: an
    evaluation or a checkpoint looks the same."""
    if node.idle is None or node.group_rank is None:
        return False
    return node.idle >= max(_SHORTEST_IDLE, _IDLE_STEPS * (node.usual_step or timedelta()))


def begins(node: NodeView) -> bool:
    """Whether the node has made no step of its generation yet: its progress is that of the generation before."""
    return node.progress is not None and 0 < node.progress.generation < node.generation


def longest_idle(nodes: Iterable[NodeView]) -> NodeView | None:
    """The node that has made no step for the longest time, if any is idle."""
    return max((node for node in nodes if is_idle(node)), key=lambda node: node.idle or timedelta(), default=None)


def overall_progress(nodes: Sequence[NodeView], status: JobStatus | None) -> Progress | None:
    """The progress of the world: that of its slowest member; before anything steps, the job's last known progress."""
    members = sorted((node for node in nodes if node.group_rank is not None), key=lambda node: node.group_rank or 0)
    known = [node.progress for node in members if node.progress is not None]
    stepping = comparable(known)
    if not stepping:
        last = status.progress if status else None
        return last.model_copy(update={"steps_per_second": None}) if status and last and _rests(status, last) else last
    slowest = min(stepping, key=lambda progress: progress.step)
    rates = [progress.steps_per_second for progress in stepping if progress.steps_per_second]
    courses = [progress.course for progress in (*known, status and status.progress) if progress]
    losses = [progress.loss for progress in stepping if progress.loss is not None]
    totals = [progress.total_steps for progress in stepping if progress.total_steps]
    steps = longest_idle(members) is None and not (status and _rests(status, slowest))
    return slowest.model_copy(
        update={
            "steps_per_second": min(rates) if rates and steps else None,
            "loss": losses[0] if losses else None,
            "total_steps": max(totals) if totals else None,
            "course": reduce(join_courses, courses, ()),
        }
    )


def _rests(status: JobStatus, progress: Progress) -> bool:
    """Whether no world makes steps now, so that the last speed says nothing about the time that is left."""
    if status.phase in _AT_REST or 0 < progress.generation < status.generation:
        return True
    incident = status.last_incident
    if incident is None or incident.observation is not None or incident.over_at is not None:
        return False
    # A world that a requested change ends may step until then.
    return progress.last_step_at is None or progress.last_step_at <= incident.started_at


def all_warnings(nodes: Sequence[NodeView], status: JobStatus) -> tuple[str, ...]:
    """Warnings of the job itself, and those that only its nodes' views show."""
    apart = [str(node.rank) for node in nodes if node.group_rank is not None and node.progress and node.progress.apart]
    if not apart:
        return status.warnings
    warning = (
        f"ranks on node{'s' if len(apart) > 1 else ''} {', '.join(apart)} step without a process group: each trains by "
        "itself, over the same checkpoints. Unless you intend that, call torch.distributed.init_process_group() and "
        "wrap the model (DDP, FSDP)"
    )
    return (*status.warnings, warning)
