"""The phase of a job and its reason in words, as `perdure status` shows them."""

from __future__ import annotations

from perdure.base.words import count, counted
from perdure.contract import JobPhase, NodePhase
from perdure.spec.job import JobSpec
from perdure.workflows.policy.capacity import memory_in_place, waiting
from perdure.workflows.policy.diagnosis import first_steps, hangs
from perdure.workflows.policy.roles import starts
from perdure.workflows.policy.state.job import JobState, RoleInJob
from perdure.workflows.policy.world import stages, succession
from perdure.workflows.policy.world.forming import candidates


def with_phases(state: JobState, job: JobSpec) -> JobState:
    """Returns the state with the phase of each role."""
    for view in state.views:
        waits = starts.why_waiting(state.roles[view.role], state.roles, job)
        phase, reason = _phase(view, job, waits)
        state = state.with_role(state.roles[view.role].replace(phase=phase, reason=reason))
    return state


def _phase(state: RoleInJob, job: JobSpec, waits: str) -> tuple[JobPhase, str]:
    world = state.world
    if state.outcome is not None:
        return JobPhase.HELD if state.held else JobPhase.STOPPING, state.outcome.reason
    if state.completed:
        return JobPhase.SUCCEEDED, state.completed
    if state.failed:
        return JobPhase.FAILED, state.failed
    if state.rests:
        return JobPhase.SUSPENDED, state.reason
    if waits:
        return JobPhase.STARTING, waits
    incident = state.open_incident
    queued = state.queued_since is not None and waiting.in_queue(state)
    if queued or (state.waiting_since is not None and (world is not None or state.generation > 0)):
        return JobPhase.WAITING, waiting.describe(state, job, available=len(candidates(state)))
    if state.interruption is not None or (incident is not None and world is not None):
        texts = (incident.title if incident else "", succession.why_held(state) or memory_in_place.why_held(state))
        return JobPhase.RECOVERING, "; ".join(text for text in texts if text)
    if world is None:
        ready = sum(node.phase is NodePhase.READY for node in state.nodes.values())
        blocked = waiting.blocking_node(state)
        why = f"; node {blocked.rank}: {blocked.reason}" if blocked else ""
        return JobPhase.STARTING, f"{ready:,} of {counted(state.nodes_max, 'node', 'are')} ready{why}"
    if state.between_stages:
        return JobPhase.RUNNING, stages.describe(state)
    if not state.stepping:
        late = "".join(f"; node {node.rank}: {node.reason}" for node in state.members if node.preparing)
        return JobPhase.RENDEZVOUS, f"generation {world.generation} with {count(world.nodes, 'node')} is starting{late}"
    if state.role in job.roles and job.roles[state.role].ready is not None:
        return JobPhase.RUNNING, f"{world.nodes:,} of {counted(state.nodes_max, 'node', 'serve')}"
    found = hangs.of(state) if state.stalled else None
    parts = (
        f"{world.nodes:,} of {count(state.nodes_max, 'node')}, {count(world.processes, 'rank')}",
        first_steps.describe(state),
        hangs.describe(found) if found is not None else "",
    )
    return JobPhase.RUNNING, "; ".join(part for part in parts if part)
