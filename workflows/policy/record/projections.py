"""Views of a job's state: its status, its nodes and its result."""

from __future__ import annotations

from datetime import datetime

from perdure.contract import (
    FailureClass,
    JobPhase,
    JobResult,
    JobStatus,
    NodeFacts,
    NodePhase,
    NodeView,
    ProgressSource,
    RoleStatus,
)
from perdure.contract.archive import job_archive, logs_place
from perdure.contract.identity import identity_of
from perdure.contract.names import group_index
from perdure.spec.job import JobSpec
from perdure.spec.running import scaling_mapping
from perdure.workflows.policy.capacity import memory_in_place, planned_changes, resource_use, scaling, smaller_requests
from perdure.workflows.policy.checkpoints import commits, state_loss
from perdure.workflows.policy.diagnosis import first_steps, shortages
from perdure.workflows.policy.record import observations
from perdure.workflows.policy.state.budget import within_window
from perdure.workflows.policy.state.job import JobState, RoleInJob
from perdure.workflows.policy.state.node import NodeState
from perdure.workflows.policy.state.role import RoleState
from perdure.workflows.policy.world import stages, succession

_WARNED_OF = 8
"""The most nodes for which the same warning is given."""


def status_of(state: RoleInJob, job: JobSpec, *, groups: tuple[str, ...], phase: JobPhase, now: datetime) -> JobStatus:
    """The answer to the query `status`."""
    world = state.world
    archive = job.workdir.archive if job.workdir else None
    speed = scaling.view(state, job, now)
    uncreated = observations.uncreated_nodes(state)
    requests, raised = resource_use.requests_of(state, job), state.host_memory.requested is not None
    return JobStatus(
        name=state.name,
        namespace=state.namespace,
        uid=state.uid,
        phase=phase,
        reason=state.outcome.reason if state.outcome is not None else state.reason,
        role=state.role,
        roles=tuple(job.roles),
        backend=job.backend,
        notifies=tuple(job.notifications),
        workdir_digest=archive.digest if archive else "",
        generation=state.generation,
        nodes=world.nodes if world else 0,
        nodes_min=state.nodes_min,
        nodes_max=state.nodes_max,
        world_size=world.processes if world else 0,
        restarts=len(within_window(state.restarts, now=now, window=job.retry.window)),
        restarts_total=state.restart_count,
        max_restarts=job.retry.max_restarts,
        restart_window=job.retry.window,
        started_at=state.started_at,
        finished_at=now if phase in (JobPhase.SUCCEEDED, JobPhase.FAILED, JobPhase.CANCELLED) else None,
        logs_url=logs_place(job, state.uid) or "",
        archive=job_archive(job, state.uid) or "",
        groups=groups,
        unreachable=tuple(node.rank for node in state.nodes.values() if node.alive and not node.reachable),
        stalled=tuple(node.rank for node in state.stalled),
        uncreated=tuple(node.rank for node in uncreated),
        refusal=uncreated[0].reason if uncreated else "",
        lost=tuple(node.rank for node in state.nodes.values() if node.phase is NodePhase.LOST),
        repairs_paused_until=state.repairs_paused_until,
        protected=state.last_incident is None or state.last_incident.failure is not FailureClass.UNPROTECTED,
        warnings=(*warnings_of(state, job), *([speed.problem] if speed is not None and speed.problem else [])),
        unprocessed=tuple(state.unprocessed.values()),
        left=_left(state),
        last_incident=state.last_incident,
        next_action=next_action(state, job),
        checkpoint=commits.view(state, job),
        progress=state.progress,
        scaling=speed,
        goal=scaling_mapping(job.roles[state.role].scaling),
        auto=state.auto,
        peaks=state.peaks,
        requests=requests,
        memory_raised=raised,
        unused=resource_use.unused(
            requests,
            state.peaks,
            nodes=state.nodes_max,
            complete=phase is JobPhase.SUCCEEDED,
            raised=raised,
        ),
        smaller=smaller_requests.find(state, job),
    )


def role_statuses(
    state: JobState, job: JobSpec, now: datetime, *, closed: JobPhase | None = None
) -> tuple[RoleStatus, ...]:
    """Returns how far each role is, of a job that has several; `closed` is the phase in which the job has ended."""
    roles = state.roles.values() if len(state.roles) > 1 else ()
    return tuple(_role_status(role, job, now, closed) for role in roles)


def _role_status(role: RoleState, job: JobSpec, now: datetime, closed: JobPhase | None) -> RoleStatus:
    phase, reason = role.phase, role.reason
    if role.completed:
        phase, reason = JobPhase.SUCCEEDED, role.completed
    elif role.failed:
        phase, reason = JobPhase.FAILED, role.failed
    elif closed is not None:
        phase, reason = closed, "it ended with the job"
    awaited = role.postponed.suspend if role.postponed else None
    return RoleStatus(
        name=role.role,
        phase=phase,
        reason=reason,
        generation=role.generation,
        nodes=role.world.nodes if role.world else 0,
        nodes_min=role.nodes_min,
        nodes_max=role.nodes_max,
        nodes_allowed=scaling.largest_of(role),
        restarts=len(within_window(role.restarts, now=now, window=job.retry.window)),
        suspended_alone=role.suspended_alone or bool(awaited and awaited.role),
        peaks=role.peaks,
        goal=scaling_mapping(job.roles[role.role].scaling),
    )


def warnings_of(state: RoleInJob, job: JobSpec) -> tuple[str, ...]:
    """Warnings about settings of the job that are probably not intended, and about what is lost."""
    desired = (str(state.nodes_min), str(scaling.largest_of(state)))
    requested = {
        node.command_nodes.partition(":")[::2] for node in state.nodes.values() if node.alive and node.command_nodes
    }
    left_out = [node for node in state.nodes.values() if node.alive and node.cut_off]
    cut_off = [f"node {node.rank} is left out of the world: {node.reason}" for node in left_out[:_WARNED_OF]]
    if len(left_out) > _WARNED_OF:
        cut_off.append(f"{len(left_out) - _WARNED_OF} more nodes are left out of the world: `perdure nodes` names them")
    waiting = [f"node {node.rank}: {node.waits}" for node in state.nodes.values() if node.alive and node.waits]
    if len(waiting) > _WARNED_OF:
        waiting[_WARNED_OF - 1 :] = [f"{len(waiting) - _WARNED_OF + 1} more nodes wait: `perdure nodes` names them"]
    uncreated = [
        f"node {node.rank} cannot be created since {node.uncreated_since:%Y-%m-%d %H:%M:%S} UTC, and is requested "
        f"again: {node.reason}"
        for node in observations.uncreated_nodes(state)
    ]
    if len(uncreated) > _WARNED_OF:
        uncreated[_WARNED_OF - 1 :] = [
            f"{len(uncreated) - _WARNED_OF + 1} more nodes cannot be created: `perdure nodes` names them"
        ]
    suspected = [
        f"the machine of node {node.rank}, {node.host}, failed a check after a failure that may be its own: "
        f"{node.failed_check}"
        for node in state.nodes.values()
        if node.alive and node.failed_check
    ]
    dropped = (
        f"{state.dropped_events} messages could not be processed and were left out, the last one {state.last_dropped}: "
        "please report this as a defect"
    )
    wrong = (
        f"{state.wrong_claims} claims of nodes about ranks or worlds that are not theirs were left out or are shown as "
        f"unknown, the last one: {state.last_wrong_claim}. Something other than Perdure's launcher writes to these "
        "nodes' agents"
    )
    known = state.checkpoints
    failing = (
        f"no checkpoint could be stored since {known.problem_since:%Y-%m-%d %H:%M:%S} UTC, training continues: "
        f"{known.problem}"
        if known.problem and known.problem_since
        else ""
    )
    unused = (
        "the job has a storage for checkpoints, and the script saves none there: use a Checkpointer "
        "(docs/checkpoints.md), name the folder that it saves to in `checkpoint.watch`, or leave out `checkpoint`"
    )
    because = f" ({state.repairs_paused_because})" if state.repairs_paused_because else ""
    paused = (
        "hangs, slow ranks, bad numbers and wrong results are shown and not repaired until "
        f"{state.repairs_paused_until:%Y-%m-%d %H:%M:%S} UTC, as a user has requested{because}: "
        "`perdure resume-repairs` ends that"
        if state.repairs_paused_until is not None
        else ""
    )
    shortage = shortages.describe(state)
    refused = planned_changes.refusal(state)
    return (
        *((refused,) if refused else ()),
        *((shortage,) if shortage else ()),
        *((paused,) if paused else ()),
        *((dropped,) if state.dropped_events else ()),
        *((wrong,) if state.wrong_claims else ()),
        *((failing,) if failing else ()),
        *((awaited,) if (awaited := state_loss.describe(state, job)) else ()),
        *((unused,) if commits.saves_nothing(state) and not (job.checkpoint and job.checkpoint.watch) else ()),
        *(one.summary for one in state.unprocessed.values()),
        *(one.summary for one in state.unreadable.values() if not state.rests),
        *cut_off,
        *waiting[:_WARNED_OF],
        *suspected[:_WARNED_OF],
        *_left(state),
        *uncreated,
        *(
            f"the command asks for {_node_count(*counts)} (--nnodes, or --num_machines of accelerate) and the job for "
            f"{_node_count(*desired)}: the job decides. Leave the option out of the command"
            + (f", or scale the job to {counts[0]}" if counts[0] == counts[1] else "")
            for counts in sorted(requested)
            if counts != desired
        ),
    )


def _left(state: RoleInJob) -> tuple[str, ...]:
    left = [f"node {node.rank}: {node.left}" for node in state.nodes.values() if node.left]
    more = [f"{len(left) - _WARNED_OF} more nodes are left in part"] if len(left) > _WARNED_OF else []
    return (*left[:_WARNED_OF], *more)


def _node_count(minimum: str, maximum: str) -> str:
    if minimum == maximum:
        return f"{minimum} node" + ("" if minimum == "1" else "s")
    return f"{minimum} to {maximum} nodes"


def next_action(state: RoleInJob, job: JobSpec) -> str:
    """The next thing that happens if no one requests anything."""
    coming = [
        node
        for node in state.nodes.values()
        if node.alive and _phase(state, node) is not NodePhase.READY and not node.ended
    ]
    delayed = [node for node in state.nodes.values() if node.phase is NodePhase.LOST and node.not_before is not None]
    if state.outcome is not None and state.outcome.held_until is not None:
        until = f"{state.outcome.held_until:%Y-%m-%d %H:%M:%S} UTC"
        return f"the nodes are kept until {until} (hold_on_failure); `perdure cancel` releases them earlier"
    if state.outcome is not None:
        return "the nodes are wound down"
    if state.rests:
        return "nothing, until a user resumes it"
    if short := shortages.next_action(state):
        return short
    if postponed := planned_changes.describe(state):
        return postponed
    if state.interruption is None and (awaited := state_loss.describe(state, job)):
        return awaited
    if state.interruption is not None and state.interruption.waits and not state.interruption.decided:
        return state.interruption.waits
    if held := succession.why_held(state) or memory_in_place.why_held(state):
        return f"the next world {held}"
    if held_back := succession.waiting_nodes(state):
        return f"node {held_back[0].rank} {succession.why_waiting(held_back[0])}"
    if state.between_stages and (waits := stages.next_action(state)):
        return waits
    if coming:
        node = coming[0]
        return f"waits for node {node.rank} ({node.phase.lower()}{f': {node.reason}' if node.reason else ''})"
    if delayed:
        return f"requests node {delayed[0].rank} again, which was lost before it was ready: {delayed[0].reason}"
    if stalled := state.stalled:
        nodes = f"node{'s' if len(stalled) > 1 else ''} {', '.join(str(node.rank) for node in stalled)}"
        return f"waits for {nodes} to step again; nothing is restarted, because a long evaluation looks the same"
    serves = job.roles[state.role].ready is not None
    return ("" if serves else first_steps.awaited(state)) or "nothing to do"


def _phase(state: RoleInJob, node: NodeState) -> NodePhase:
    """The node's phase for users: a command that a world has taken in before it requested one is no less ready."""
    entered = state.is_member(node) and not state.is_late(node)
    return NodePhase.READY if node.phase is NodePhase.JOINED and entered else node.phase


def node_views(state: RoleInJob, *, first: int | None = None, group: int | None = None) -> tuple[NodeView, ...]:
    """The answer to the query `nodes`: the job's own view, without telemetry.

    Args:
        state: The job.
        first: Limits the number of nodes.
        group: Selects the nodes of this group: those of all groups may be too many for one answer.
    """
    nodes = [node for node in state.nodes.values() if group is None or group_index(node.rank) == group]
    members = state.world.members if state.world else {}
    stalled = {node.rank for node in state.stalled}
    return tuple(
        NodeView(
            **identity_of(node),
            **node.replace(
                phase=_phase(state, node),
                reason=node.reason or stages.describe_command(state, node),
                store_ports=(),
            ).part(NodeFacts),
            reachable=node.reachable,
            generation=node.commanded,
            group_rank=members[node.rank].group_rank if state.is_member(node) and node.alive else None,
            stalled_since=node.stalled_since if node.rank in stalled else None,
            avoids=node.avoids,
        )
        for node in map(succession.describe, sorted(nodes, key=lambda node: node.rank)[:first])
    )


def result_of(state: RoleInJob, now: datetime) -> JobResult:
    """The workflow's result, once `is_over`."""
    outcome = state.outcome
    assert outcome is not None, "only a job with an outcome has a result"
    progress, incident = state.progress, state.last_incident
    return JobResult(
        phase=outcome.phase,
        exit_code=outcome.exit_code,
        reason=outcome.reason,
        generations=state.generation,
        restarts=state.restart_count,
        step=progress.step if progress is not None and progress.source is ProgressSource.REPORTED else None,
        log_tail=incident.log_tail if incident is not None and incident.stopped else "",
        unprocessed=tuple(state.unprocessed.values()),
        started_at=state.started_at,
        finished_at=now,
    )
