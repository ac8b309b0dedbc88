"""The status of a `TrainingJob` object: pure functions from known facts to the next status."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum
from typing import Any

from pydantic import AliasGenerator, BaseModel, ConfigDict
from pydantic.alias_generators import to_camel

from perdure.base.errors import ExitCode
from perdure.client.views import FINAL_PHASES
from perdure.contract import IncidentView, JobPhase, JobResult, JobStatus

REFUSED = "REFUSED"
"""The phase of an object that never became a job."""
PENDING = "PENDING"
"""The phase of an object whose job could not be started yet: the condition Accepted has the reason."""
ADOPTED = "Adopted"
"""The reason of `Accepted` for an object that has adopted a running job."""


class Part(BaseModel):
    """A part of an object, with Kubernetes' field names; fields of other writers are ignored."""

    model_config = ConfigDict(
        frozen=True,
        extra="ignore",
        alias_generator=AliasGenerator(alias=to_camel),
        populate_by_name=True,
        use_attribute_docstrings=True,
    )


class Truth(StrEnum):
    """The value of a condition."""

    TRUE = "True"
    FALSE = "False"
    UNKNOWN = "Unknown"


class Condition(Part):
    """One aspect of the job."""

    type: str
    """Accepted, Running, NodesRefused, StepsStalled, Kept, Succeeded or Failed."""
    status: Truth
    """Whether the condition holds."""
    reason: str
    """The reason, in one word."""
    message: str = ""
    """The reason, for people."""
    observed_generation: int = 0
    """The generation of the object that this condition is about."""
    last_transition_time: datetime
    """When `status` changed last."""


@dataclass(frozen=True)
class KnownStep:
    """A step of the training, and the world that made it."""

    step: int
    generation: int
    """0 where it is not known."""


@dataclass(frozen=True)
class Observed:
    """What a status is about: an object as it is now."""

    generation: int
    """The object's generation."""
    time: datetime


class RolePart(Part):
    """How far one of several roles is."""

    name: str
    """The role."""
    phase: str
    """Its phase, as the job's."""
    nodes: str
    """Nodes in its current world, and the most that it may have."""
    generation: int
    """The generation of its world."""
    restarts: int
    """Restarts that count against its `retry.max_restarts`."""
    reason: str = ""
    """Why it is in this phase."""


class ResourceStatus(Part):
    """The job's state as far as the operator knows; `perdure status` and `perdure explain` show more."""

    observed_generation: int = 0
    """The newest generation of the object that the operator has reconciled."""
    phase: str = ""
    """STARTING, WAITING, RENDEZVOUS, RUNNING, RECOVERING, SUSPENDED, HELD, STOPPING, SUCCEEDED, FAILED or CANCELLED;
    REFUSED if no job was started, PENDING if none could be started yet."""
    roles: tuple[RolePart, ...] = ()
    """Each role of a job that has several; what follows is about the first one that ends the job."""
    nodes: str = ""
    """Nodes in the current world, and the most that it may have, such as 14/16."""
    replicas: int | None = None
    """Nodes in the current world, as `kubectl scale` and autoscalers read them."""
    selector: str = ""
    """The selector of the pods of the job's nodes."""
    world_size: int | None = None
    """Ranks in the current world."""
    step: int | None = None
    """The job's progress: the step of its slowest rank, as the script reports it; else the steps that its processes
    have counted, from the step on that a checkpointer has restored. A newer world may begin with a lower one."""
    step_generation: int | None = None
    """The generation of the world that made this step."""
    generation: int | None = None
    """The generation of the world, which counts how often it was formed."""
    restarts: int | None = None
    """Restarts that count against `retry.max_restarts`; all of them, once the job has ended."""
    last_incident: str = ""
    """The latest interruption; `perdure explain` describes it."""
    started_at: datetime | None = None
    """When the job started."""
    finished_at: datetime | None = None
    """When the job ended."""
    workflow_id: str = ""
    """The workflow ID of the job in Temporal."""
    run_id: str = ""
    """The workflow's first run, which distinguishes this job from others of its name."""
    uid: str = ""
    """The value of the label `perdure.dev/uid` of the job's pods."""
    page: str = ""
    """The job's page in the Temporal UI, if its address is known."""
    conditions: tuple[Condition, ...] = ()
    """Accepted, Running, NodesRefused once nodes could not be created, StepsStalled once ranks made no step, and in the
    end Succeeded or Failed; Kept while the definition of the resource is being removed."""

    @property
    def finished(self) -> bool:
        """Whether the status is final: it has the end of the job, and the condition that tells it."""
        return self.phase in FINAL_PHASES and self.finished_at is not None

    def condition(self, kind: str) -> Condition | None:
        return next((one for one in self.conditions if one.type == kind), None)

    def accepts(self, generation: int) -> bool:
        """Whether the object was accepted in this generation."""
        accepted = self.condition("Accepted")
        return self.observed_generation == generation and accepted is not None and accepted.status is Truth.TRUE


def update_status(status: ResourceStatus, **fields: Any) -> ResourceStatus:
    """Returns the status with other values."""
    return status.model_copy(update=fields)


def with_condition(
    status: ResourceStatus, kind: str, truth: Truth, reason: str, message: str, at: Observed
) -> ResourceStatus:
    """Returns the status with one condition set; the condition keeps its time unless its value changes."""
    before = status.condition(kind)
    since = before.last_transition_time if before and before.status is truth else at.time.replace(microsecond=0)
    condition = Condition(
        type=kind,
        status=truth,
        reason=reason,
        message=message,
        observed_generation=at.generation,
        last_transition_time=since,
    )
    others = {one.type: one for one in status.conditions}
    return update_status(status, conditions=tuple((others | {kind: condition}).values()))


def accepted_status(status: ResourceStatus, message: str, at: Observed) -> ResourceStatus:
    """The status of an object that is valid."""
    status = update_status(status, observed_generation=at.generation)
    return with_condition(status, "Accepted", Truth.TRUE, "Valid", message, at)


def adopted_status(status: ResourceStatus, workflow_id: str, run_id: str, at: Observed) -> ResourceStatus:
    """The status of an object that becomes that of a running job, which an earlier object of its name started."""
    status = update_status(status, workflow_id=workflow_id, run_id=run_id)
    accepted = status.condition("Accepted")
    message = accepted.message if accepted else ""
    return with_condition(status, "Accepted", Truth.TRUE, ADOPTED, message, at)


def kept_status(status: ResourceStatus, at: Observed) -> ResourceStatus:
    """The status of an object that the removal of the definition deletes, while its job runs."""
    return with_condition(status, "Kept", Truth.TRUE, "DefinitionRemoved", _DEFINITION_REMOVED, at)


_DEFINITION_REMOVED = (
    "the definition of TrainingJobs is being removed, which deletes all objects; the job continues, and the object "
    "is kept until it has ended. See docs/kubernetes-resource.md"
)


def refused_status(status: ResourceStatus, reason: str, message: str, at: Observed) -> ResourceStatus:
    """The status of an object that is not valid; a running job continues unchanged."""
    status = update_status(status, observed_generation=at.generation, phase=status.phase if status.run_id else REFUSED)
    return with_condition(status, "Accepted", Truth.FALSE, reason, message, at)


def held_status(status: ResourceStatus, at: Observed) -> ResourceStatus:
    """The status of an object that was suspended before its job was started."""
    status = update_status(status, phase=JobPhase.SUSPENDED.value)
    message = "it has not been started; set spec.suspend to false"
    return with_condition(status, "Running", Truth.FALSE, "Suspended", message, at)


def unknown_status(status: ResourceStatus, reason: str, message: str, at: Observed) -> ResourceStatus:
    """The status while nothing is known about the job, such as while no worker answers: it probably continues, and
    other fields keep their last values. The reason names what a job that has not been started waits for."""
    if not status.run_id:
        status = update_status(status, phase=PENDING)
        return with_condition(status, "Accepted", Truth.UNKNOWN, reason, message, at)
    return with_condition(status, "Running", Truth.UNKNOWN, reason, message, at)


def running_status(
    status: ResourceStatus, job: JobStatus, step: KnownStep | None, at: Observed, *, leading: JobStatus | None = None
) -> ResourceStatus:
    """The status of a running job, from its workflow's answer.

    Args:
        status: The status before.
        job: The status of its workflow.
        step: Its step, if it is known.
        at: What the status is about.
        leading: The same of the object's leading role, where the job has several.
    """
    status = update_status(
        _with_step(_with_counts(status, leading or job), step),
        phase=job.phase.value,
        started_at=job.started_at.replace(microsecond=0),
    )
    status = _with_stall(_with_refusals(status, job, at), leading or job, at)
    if job.phase is JobPhase.RUNNING:
        return with_condition(status, "Running", Truth.TRUE, job.phase.capitalize(), job.reason, at)
    # What the cluster says of a pod that does not start, as `perdure status` shows it.
    message = "; ".join(words for words in (job.reason, job.next_action) if words)
    return with_condition(status, "Running", Truth.FALSE, job.phase.capitalize(), message, at)


_TROUBLES = {"NodesRefused": ("CannotCreate", "Created"), "StepsStalled": ("NoSteps", "Steps")}
"""Conditions that a job has once it was in trouble, with their reasons while it is and afterwards. None is called
`Stalled`: by kstatus that is an object which cannot get on without a person."""


def _with_refusals(status: ResourceStatus, job: JobStatus, at: Observed) -> ResourceStatus:
    """Sets the condition that says whether nodes cannot be created."""
    message = f"node {_first(job.uncreated)} cannot be created: {job.refusal}" if job.uncreated else ""
    return _with_trouble(status, "NodesRefused", message, at)


def _with_stall(status: ResourceStatus, job: JobStatus, at: Observed) -> ResourceStatus:
    """Sets the condition that says whether ranks make no step."""
    where = "see perdure explain and perdure stacks"
    message = f"the ranks of node {_first(job.stalled)} make no step: {where}" if job.stalled else ""
    return _with_trouble(status, "StepsStalled", message, at)


def _with_trouble(status: ResourceStatus, kind: str, message: str, at: Observed) -> ResourceStatus:
    """Sets a condition that is true while there is a message, and is absent until it has been true once."""
    trouble, over = _TROUBLES[kind]
    if message:
        return with_condition(status, kind, Truth.TRUE, trouble, message, at)
    return status if status.condition(kind) is None else with_condition(status, kind, Truth.FALSE, over, "", at)


def _first(nodes: tuple[int, ...]) -> str:
    first, *others = nodes
    return f"{first} and {len(others)} more" if others else f"{first}"


_REASONS: dict[int, str] = {
    ExitCode.OK: "Succeeded",
    ExitCode.USER_CODE: "UserCode",
    ExitCode.USAGE: "InvalidSpec",
    ExitCode.INFRASTRUCTURE: "Infrastructure",
    ExitCode.CANCELLED: "Cancelled",
    ExitCode.DEADLINE: "Deadline",
}


def ended_status(status: ResourceStatus, result: JobResult, job: JobStatus | None, at: Observed) -> ResourceStatus:
    """The status of a job that has ended.

    Args:
        status: The status before.
        result: The job's result.
        job: The last status of its workflow, for the object's leading role, if a worker answers for it.
        at: What the status is about.
    """
    status = _with_counts(status, job) if job else status
    step_generation = job.progress.generation if job and job.progress else 0
    status = update_status(
        _with_step(status, None if result.step is None else KnownStep(result.step, generation=step_generation)),
        phase=result.phase.value,
        restarts=result.restarts,
        started_at=result.started_at.replace(microsecond=0),
        finished_at=result.finished_at.replace(microsecond=0),
    )
    reason = _REASONS.get(result.exit_code, "Other")
    kind = "Succeeded" if result.phase is JobPhase.SUCCEEDED else "Failed"
    left = "; ".join(job.left) if job else ""
    status = with_condition(status, "Running", Truth.FALSE, result.phase.capitalize(), left, at)
    for trouble in _TROUBLES:
        status = _with_trouble(status, trouble, "", at)
    return with_condition(status, kind, Truth.TRUE, reason, result.reason, at)


def _with_counts(status: ResourceStatus, job: JobStatus) -> ResourceStatus:
    return update_status(
        status,
        roles=tuple(
            RolePart(
                nodes=f"{one.nodes}/{one.nodes_max}", **one.model_dump(include=set(RolePart.model_fields) - {"nodes"})
            )
            for one in job.by_role
        ),
        nodes=f"{job.nodes}/{job.nodes_max}",
        replicas=job.nodes,
        selector=f"perdure.dev/uid={job.uid}" + (f",perdure.dev/role={job.role}" if job.by_role else ""),
        world_size=job.world_size,
        generation=job.generation,
        restarts=job.restarts,
        last_incident=_incident(job.last_incident) if job.last_incident else "",
        uid=job.uid,
    )


def _incident(incident: IncidentView) -> str:
    again = incident.stepping_at or incident.running_at
    if again is None:
        return f"#{incident.number} {incident.title}"
    took = (again - incident.started_at).total_seconds()
    how = "stepping" if incident.stepping_at else "running"
    return f"#{incident.number} {incident.title}; {how} again after {took:.1f} s"


def _with_step(status: ResourceStatus, step: KnownStep | None) -> ResourceStatus:
    """Takes in a step of the newest world; of one world the furthest, as answers may be late."""
    known = status.step_generation or 0
    if step is None or (status.step is not None and step.generation < known):
        return status
    if status.step is not None and step.generation == known:
        return update_status(status, step=max(status.step, step.step))
    return update_status(status, step=step.step, step_generation=step.generation)
