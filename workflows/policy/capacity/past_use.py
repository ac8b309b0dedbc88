"""What jobs of the past say about a job that leaves its resources to them: `resources: auto`.

Those count that ran the same command in the same image, in the job's own namespace; where some of them have its
labels, too, only those. Of what their nodes used, the most counts that one of them did, since a job with less would
fail, but no more than `_OUTLIER` times what is usual: more was another kind of work, or a wrong figure. Without such a
job a default holds, which is meant to be enough to find out.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from statistics import median, median_low
from typing import Any, Final, TypeVar

from perdure.contract import AutoResources, JobPhase, JobShape, PastJob, Peaks, RoleShape, RoleUse
from perdure.spec.job import JobSpec
from perdure.spec.quantities import bytes_of, quantity_of_bytes
from perdure.spec.roles import MAX_NODES, Role
from perdure.workflows.policy.capacity.resource_use import cores_for, memory_for
from perdure.workflows.policy.state.job import JobState

_OUTLIER: Final = 4.0
_ENOUGH: Final = 3600.0
"""Seconds after which the peaks of a job count that has not succeeded."""
_NAMED: Final = 5
_CORES: Final = 4
_MEMORY: Final = 16 * 2**30
"""What each rank requests by default: as much as the smallest machines have that clouds sell with one GPU for training,
such as AWS's g5.xlarge."""
_MOST_CORES: Final = 512
_MOST_MEMORY: Final = 4 * 2**40
"""No request is larger, whatever jobs of the past have reported."""

_NumberT = TypeVar("_NumberT", int, float)


def speaks(job: PastJob, peaks: Peaks) -> bool:
    """Whether a job was seen for long enough to say what such jobs need."""
    return job.phase is JobPhase.SUCCEEDED or peaks.watched >= _ENOUGH


def most(peaks: Sequence[Peaks], figure: Callable[[Peaks], _NumberT | None]) -> _NumberT | None:
    """Returns the most that one of them used, without those that used much more than is usual."""
    known = [number for one in peaks if (number := figure(one))]
    if not known:
        return None
    usual = _OUTLIER * median_low(known)
    return max(number for number in known if number <= usual)


def is_auto(job: JobSpec) -> bool:
    """Whether a role leaves its resources to jobs of the past."""
    return any(role.resources.auto for role in job.roles.values())


def choose_all(
    job: JobSpec, shape: JobShape, past: Sequence[PastJob], *, problem: str = ""
) -> tuple[AutoResources, ...]:
    """Chooses for each role that leaves its resources to them; the arguments are those of `choose`."""
    roles = job.roles.items()
    return tuple(choose(name, role, shape, past, problem=problem) for name, role in roles if role.resources.auto)


def choose(name: str, role: Role, shape: JobShape, past: Sequence[PastJob], *, problem: str = "") -> AutoResources:
    """Chooses what the nodes of a role request, and how many there are where the specification does not say.

    Args:
        name: The role's name.
        role: The role, whose own figures stay as they are.
        shape: What the job has in common with others.
        past: Jobs of its namespace, the newest first.
        problem: Why there are none; empty where the history has answered.
    """
    own = next((one for one in shape.roles if one.role == name), RoleShape(role=name))
    alike = [(job, use) for job in past if (use := _use(job, own)) is not None]
    labelled = [(job, use) for job, use in alike if shape.labels and job.shape.labels == shape.labels]
    alike = labelled or alike
    measured = [(job, use.peaks) for job, use in alike if use.peaks is not None and speaks(job, use.peaks)]
    peaks = [found for _, found in measured]
    memory, cpu = most(peaks, lambda one: one.memory), most(peaks, lambda one: one.cpu)
    shm = most(peaks, lambda one: one.shm)
    nodes = [use.nodes for job, use in alike if use.nodes and job.phase is JobPhase.SUCCEEDED]
    ranks = role.resources.gpu or (role.nproc_per_node if isinstance(role.nproc_per_node, int) else 1)
    enough = memory_for(memory) if memory else _MEMORY * ranks
    allowed = bytes_of(role.scaling.memory_max) if role.scaling.memory_max else _MOST_MEMORY
    cores = cores_for(cpu) if cpu else _CORES * ranks
    resources = role.resources
    return AutoResources(
        role=name,
        cpu=resources.cpu or str(min(cores, _MOST_CORES)),
        memory=resources.memory or quantity_of_bytes(min(enough, allowed, _MOST_MEMORY)),
        shm=resources.shm or (quantity_of_bytes(min(memory_for(shm), _MOST_MEMORY)) if shm else None),
        nodes=_in_units(median(nodes), role.nodes.unit) if nodes and role.nodes.auto else None,
        jobs=tuple(dict.fromkeys(job.name for job, _ in measured or alike))[:_NAMED],
        measured=len(measured),
        problem=problem,
    )


def _in_units(nodes: float, unit: int) -> int:
    return unit * min(max(round(nodes / unit), 1), MAX_NODES // unit)


def _use(job: PastJob, own: RoleShape) -> RoleUse | None:
    """What the role used that has the same image and command, if the job has one."""
    same = {one.role for one in job.shape.roles if own.command and (one.image, one.command) == (own.image, own.command)}
    return next((use for use in job.use if use.role in same), None)


def fill(job: JobSpec, chosen: Sequence[AutoResources]) -> JobSpec:
    """Returns a specification with what was chosen for its roles."""
    roles = dict(job.roles)
    for one in chosen:
        role = roles[one.role]
        found = {"cpu": one.cpu, "memory": one.memory, "shm": one.shm, "auto": False}
        changes: dict[str, Any] = {"resources": role.resources.model_copy(update=found)}
        if role.nodes.auto:
            number = one.nodes or role.nodes.min
            changes["nodes"] = role.nodes.model_copy(update={"min": number, "max": number, "auto": False})
        roles[one.role] = role.model_copy(update=changes)
    return job.model_copy(update={"roles": roles})


def begin(state: JobState, job: JobSpec, chosen: Sequence[AutoResources]) -> JobState:
    """Returns the state of a job whose specification is complete; before, it had the fewest nodes."""
    for one in chosen:
        role, nodes = state.roles[one.role].replace(auto=one), job.roles[one.role].nodes
        if one.nodes is not None:
            role = role.replace(nodes_min=nodes.min, nodes_max=nodes.max)
        state = state.with_role(role)
    return state


def words(one: AutoResources) -> str:
    """`4 nodes with 9 processors and 25Gi of memory each, from 3 jobs like it: llama-7, llama-6, llama-5`."""
    nodes = f"{one.nodes} node{'s' if one.nodes > 1 else ''} with " if one.nodes else ""
    shm = f" and {one.shm} of /dev/shm" if one.shm else ""
    if one.measured:
        jobs = f"{one.measured} jobs like it" if one.measured > 1 else "a job like it"
        origin = f"from {jobs}: {', '.join(one.jobs)}"
    elif one.problem:
        origin = f"by default: {one.problem}"
    else:
        origin = "by default: no job with its image and command was measured"
    return f"{nodes}{one.cpu} processors and {one.memory} of memory{shm} for each node, {origin}"
