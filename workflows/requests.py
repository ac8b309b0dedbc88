"""Reads users' requests to a job, and refuses those that its state does not allow.

Each `check_*` raises the `ApplicationError` that refuses an update: the server records no refused update.
"""

from __future__ import annotations

from temporalio import workflow
from temporalio.exceptions import ApplicationError

with workflow.unsafe.imports_passed_through():
    from perdure.spec.job import JobSpec
    from perdure.spec.roles import NodeCount
    from workflows.messages import NodeCredentials, NodeRequest, RelaunchRequest, ScaleRequest
    from workflows.names import node_name, node_task_queue
    from workflows.policy.state import JobState, NodeState


def node_count(text: str, unit: int) -> NodeCount:
    """Reads `4` or `2:8`.

    Raises:
        ApplicationError: if it is neither, or does not fit the job's unit.
    """
    try:
        count = NodeCount.model_validate(text)
        return NodeCount(min=count.min, max=count.max, unit=unit)
    except ValueError as error:
        problem = str(error).splitlines()[-2 if "\n" in str(error) else 0].strip()
        raise ApplicationError(f'nodes: got "{text}"; {problem}; write 4, or 2:8 for min and max') from None


def check_scale(state: JobState, request: ScaleRequest) -> None:
    node_count(request.nodes, state.unit)
    if request.role is not None and request.role != state.role:
        raise ApplicationError(f'role: got "{request.role}"; this job has the role "{state.role}"')


def check_suspend(state: JobState) -> None:
    if state.suspended:
        raise ApplicationError("the job is already suspended; resume it to continue")


def check_resume(state: JobState) -> None:
    if not state.suspended:
        raise ApplicationError("the job is not suspended, so there is nothing to resume")


def check_restart(state: JobState) -> None:
    if state.world is None:
        raise ApplicationError(f"there is nothing to restart: the job is {state.phase}")


def check_relaunch(state: JobState, request: RelaunchRequest) -> None:
    node = state.nodes.get(request.rank)
    if node is None or not node.alive:
        known = ", ".join(str(rank) for rank, node in sorted(state.nodes.items()) if node.alive)
        raise ApplicationError(f"rank: got {request.rank}; this job has the nodes {known or 'none'}")


def node_request(state: JobState, node: NodeState, job: JobSpec, info: workflow.Info, *, group_id: str) -> NodeRequest:
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
