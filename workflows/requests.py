"""Reads users' requests to a job, and refuses those that its state does not allow.

Each `check_*` raises the `ApplicationError` that refuses an update: the server records no refused update.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import timedelta
from typing import Any

from temporalio import workflow
from temporalio.exceptions import ApplicationError

with workflow.unsafe.imports_passed_through():
    from perdure.contract import (
        JoinRefusal,
        JoinRequest,
        NodeCredentials,
        NodeRequest,
        PauseRequest,
        RelaunchRequest,
        RestartRequest,
        RoleRequest,
        ScaleRequest,
        TicketRef,
        TicketRequest,
    )
    from perdure.contract.addresses import service_address
    from perdure.contract.names import node_name, node_task_queue
    from perdure.contract.users import AS_SPECIFIED
    from perdure.spec.accepted import read_accepted
    from perdure.spec.capabilities import CAPABILITIES
    from perdure.spec.durations import format_duration
    from perdure.spec.errors import SpecError
    from perdure.spec.job import JobSpec
    from perdure.spec.quantities import amount, is_quantity
    from perdure.spec.roles import NodeCount
    from perdure.spec.running import with_scaling
    from perdure.spec.validate import validate_spec
    from perdure.workflows.policy.capacity import planned_changes
    from perdure.workflows.policy.capacity.joining import MOST_TICKETS, Refusal, choose_role
    from perdure.workflows.policy.capacity.scaling import largest_of
    from perdure.workflows.policy.capacity.smaller_requests import RESOURCES
    from perdure.workflows.policy.checkpoints import state_loss
    from perdure.workflows.policy.roles import suspension
    from perdure.workflows.policy.state.job import JobState, RoleInJob, UnknownRole
    from perdure.workflows.policy.state.node import NodeState


_LONGEST_LIFETIME = timedelta(days=365)
"""The longest lifetime of a ticket: after a longer time, no one remembers it."""
_LONGEST_PAUSE = timedelta(days=7)
"""The longest time for which repairs are paused: a job that hangs meanwhile waits."""


def node_count(state: JobState, job: JobSpec, request: ScaleRequest) -> NodeCount:
    """Reads `4`, `2:8`, or `auto` for what the specification says.

    Raises:
        ApplicationError: if it is none of them, or does not fit the job's unit.
    """
    role = role_of(state, request.role)
    if not request.nodes and request.scaling is not None:
        return NodeCount(min=role.nodes_min, max=largest_of(role), unit=role.unit)
    if request.nodes == AS_SPECIFIED:
        return job.roles[role.role].nodes
    try:
        count = NodeCount.model_validate(request.nodes)
        return NodeCount(min=count.min, max=count.max, unit=role.unit)
    except ValueError as error:
        problem = str(error).splitlines()[-2 if "\n" in str(error) else 0].strip()
        text = f'nodes: got "{request.nodes}"; {problem}; write 4, 2:8 for min and max, or auto for what the job states'
        raise ApplicationError(text) from None


def role_of(state: JobState, name: str | None) -> RoleInJob:
    """Returns the role that a request names, or the job's only one.

    Raises:
        ApplicationError: if there is no such role.
    """
    try:
        return state.view(name)
    except UnknownRole as error:
        raise ApplicationError(str(error), type=JoinRefusal.UNKNOWN_ROLE) from None


def refusal_to_join(state: JobState, request: JoinRequest, job: JobSpec) -> Refusal | None:
    """Why a machine gets no place; None where it gets one.

    Raises:
        ApplicationError: if there is no such role.
    """
    try:
        return choose_role(state, request, job, workflow.now()).refusal
    except UnknownRole as error:
        raise ApplicationError(str(error), type=JoinRefusal.UNKNOWN_ROLE) from None


def check_scale(state: JobState, job: JobSpec, request: ScaleRequest) -> None:
    role = role_of(state, request.role)
    count = node_count(state, job, request)
    check_resources(job, request.resources)
    if request.resources and not request.nodes:
        raise ApplicationError("resources: given without nodes; give both, such as auto for the specification's")
    if request.scaling is not None:
        _check_scaling(job, role.role, request.scaling, count)
    lost = planned_changes.why_refused(role, job, largest=count.max) if request.nodes and not request.older else ""
    if lost:
        raise ApplicationError(
            f'nodes: got "{request.nodes}"; the state would be lost: {lost}. With --older it is done nevertheless, and '
            "the ranks continue with an older state, or begin anew"
        )
    if request.older and not request.nodes:
        raise ApplicationError("older: given without nodes; it is about a world of another size")
    others = (other for other in state.views if other.role != role.role)
    taken = {
        service_address(job, state.uid, other.role, rank): other.role
        for other in others
        for rank in range(other.nodes_max)
    }
    for rank in range(count.max):
        address = service_address(job, state.uid, role.role, rank)
        if address is not None and address in taken:
            raise ApplicationError(
                f'nodes: got "{request.nodes}"; node {rank} would serve at {address}, as a node of {taken[address]} '
                f"does; ask for at most {rank}, or submit the job with ports that are farther apart"
            )


def check_resources(job: JobSpec, resources: Mapping[str, str]) -> None:
    for name, text in resources.items():
        if name not in RESOURCES:
            raise ApplicationError(f'resources: got "{name}"; of a job that runs, only cpu and memory can change')
        if not is_quantity(text) or amount(text) <= 0:
            raise ApplicationError(f'resources.{name}: got "{text}"; expected an amount such as 4, 500m or 64Gi')
    if resources and not CAPABILITIES[job.backend].chooses_machines:
        raise ApplicationError(f"resources: nodes of the backend {job.backend} request none of their machine")


def _check_scaling(job: JobSpec, role: str, scaling: Mapping[str, Any], nodes: NodeCount) -> None:
    try:
        validate_spec(with_scaling(job, role, scaling, nodes=nodes))
    except SpecError as error:
        # The rest of the specification was checked when the job was submitted, perhaps by another release.
        problems = [one for one in error.problems if one.location[:2] == ("roles", role)]
        if problems:
            raise ApplicationError("; ".join(map(str, problems)), type="InvalidSpec") from None


def rescaled(job: JobSpec, state: JobState, request: ScaleRequest) -> JobSpec:
    """Returns the specification with the `scaling` of an accepted request."""
    if request.scaling is None:
        return job
    return read_accepted(with_scaling(job, state.role_named(request.role), request.scaling))


def single_role(state: JobState, request: RoleRequest) -> str:
    """Returns the role that a request is for, of a job with several; empty where it is for the whole job.

    Raises:
        ApplicationError: if there is no such role.
    """
    role = role_of(state, request.role).role if request.role else ""
    return role if len(state.roles) > 1 else ""


def check_suspend(state: JobState, request: RoleRequest) -> None:
    name = single_role(state, request)
    role = state.roles.get(name)
    if role is not None and role.is_over:
        raise ApplicationError(f"role {name} is {role.phase}, so there is nothing to suspend")
    awaited = next((one for view in state.views if (one := suspension.awaited(view)) is not None), None)
    if awaited is not None and awaited.role not in ("", name):
        raise ApplicationError(f"role {awaited.role} is being suspended; try again when that is done")
    if role is not None and (role.suspended_alone or (awaited is not None and awaited.role == name)):
        raise ApplicationError(f"role {name} is already suspended; resume it to continue")
    if awaited is not None or (role is None and state.suspended):
        raise ApplicationError("the job is already suspended; resume it to continue")


def check_resume(state: JobState, request: RoleRequest) -> None:
    name = single_role(state, request)
    roles = [state.roles[name]] if name else list(state.roles.values())
    if any(role.suspended_alone or suspension.awaited(role) is not None for role in roles):
        return
    if name and state.suspended:
        raise ApplicationError(f"role {name} is suspended with the whole job; resume it without naming a role")
    if not state.suspended:
        what = f"role {name}" if name else "the job"
        raise ApplicationError(f"{what} is not suspended, so there is nothing to resume")


def check_pause(request: PauseRequest) -> None:
    if not timedelta(0) < request.duration <= _LONGEST_PAUSE:
        raise ApplicationError(
            f"duration: got {format_duration(request.duration)}; the longest is {_LONGEST_PAUSE.days} days"
        )


def check_resume_repairs(state: JobState) -> None:
    if state.repairs_paused_until is None:
        raise ApplicationError("repairs are not paused, so there is nothing to resume")


def check_restart(state: JobState, request: RestartRequest) -> None:
    role = role_of(state, request.role) if request.role else None
    if role is not None and role.world is None:
        raise ApplicationError(f"there is nothing to restart: role {role.role} is {role.phase}")
    if not _has_world(state):
        raise ApplicationError(f"there is nothing to restart: the job is {state.phase}")
    views = state.views if role is None else (role,)
    if request.older and not any(map(state_loss.awaits, views)):
        raise ApplicationError(
            "older: no ranks wait for a state, so there is none to give up; restart without it, and they continue with "
            "the newest one"
        )


def check_ticket(state: JobState, job: JobSpec, request: TicketRequest) -> None:
    if CAPABILITIES[job.backend].creates_nodes:
        raise ApplicationError(f"backend: it is {job.backend}; tickets are for jobs with backend: joined")
    if len(state.tickets) >= MOST_TICKETS and request.id not in {one.id for one in state.tickets}:
        raise ApplicationError(f"the job has {MOST_TICKETS} tickets; revoke one that is not needed any more")
    if request.lifetime > _LONGEST_LIFETIME:
        raise ApplicationError(f"lifetime: got {request.lifetime}; the longest is {_LONGEST_LIFETIME.days} days")


def check_revocation(state: JobState, request: TicketRef) -> None:
    if request.id not in {one.id for one in state.tickets}:
        known = ", ".join(one.id for one in state.tickets)
        raise ApplicationError(f'id: got "{request.id}"; this job has the tickets {known or "none"}')


def check_checkpoint(state: JobState, job: JobSpec) -> None:
    if job.stored is None:
        raise ApplicationError("the job has no storage for checkpoints; submit it with checkpoint.storage")
    if not _has_world(state) or state.suspended:
        raise ApplicationError(f"there is nothing to save: the job is {state.phase}")


def check_relaunch(state: JobState, job: JobSpec, request: RelaunchRequest) -> None:
    check_resources(job, request.resources)
    nodes = role_of(state, request.role).nodes
    node = nodes.get(request.rank)
    if node is None or not node.alive:
        known = ", ".join(str(rank) for rank, node in sorted(nodes.items()) if node.alive)
        raise ApplicationError(f"rank: got {request.rank}; this job has the nodes {known or 'none'}")


def node_request(state: RoleInJob, node: NodeState, job: JobSpec, info: workflow.Info, *, group_id: str) -> NodeRequest:
    """The answer to a machine that takes this node's place: the request that a backend would get to create the node."""
    place = NodeCredentials(
        uid=state.uid, role=state.role, rank=node.rank, incarnation=node.incarnation, token=node.token
    )
    return NodeRequest(
        node=place,
        name=node_name(state.name, place),
        spec=job,
        job_id=info.workflow_id,
        job_first_run_id=info.first_execution_run_id,
        group_id=group_id,
        task_queue=node_task_queue(place),
    )


def _has_world(state: JobState) -> bool:
    return any(role.world is not None for role in state.roles.values())
