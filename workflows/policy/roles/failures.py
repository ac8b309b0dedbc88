"""How far a failure in one role reaches: to itself, to the roles that start again with it, or to the whole job."""

from __future__ import annotations

from datetime import datetime

from perdure.contract import JobPhase
from perdure.spec.job import JobSpec
from perdure.spec.role_relations import roles_restarted_with
from perdure.spec.roles import OnFailure
from perdure.workflows.policy.capacity import staffing
from perdure.workflows.policy.facts import user_requests
from perdure.workflows.policy.record import incidents
from perdure.workflows.policy.state.job import JobState, RoleInJob


def restart_others(state: JobState, job: JobSpec, now: datetime) -> JobState:
    """Interrupts the worlds of the roles that start again with one whose own world was interrupted."""
    for name, role in state.roles.items():
        interruption = role.interruption
        if interruption is None or interruption.begun_by or interruption.reached_others:
            continue
        others = roles_restarted_with(name, job.roles)
        if not others:
            continue
        state = state.with_role(role.replace(interruption=interruption.replace(reached_others=True)))
        for other in others:
            state = state.with_view(user_requests.follow_role(state.view(other), name, now))
    return state


def restart_others_with_new_world(before: JobState, state: JobState, job: JobSpec, now: datetime) -> JobState:
    """Interrupts the worlds of the roles that start again with one whose world has changed its size."""
    for name, role in state.roles.items():
        earlier = before.roles[name]
        formed = role.generation > earlier.generation
        if not formed or role.world is None or earlier.world is None or role.world.stage != earlier.world.stage:
            continue
        undisturbed = earlier.interruption is None and earlier.stepping
        known = () if undisturbed else roles_restarted_with(name, job.roles)
        for other in roles_restarted_with(name, job.roles, scaled=role.world.nodes != earlier.world.nodes):
            if other not in known:
                state = state.with_view(user_requests.follow_role(state.view(other), name, now))
    return state


def contain(state: RoleInJob, job: JobSpec, now: datetime) -> RoleInJob:
    """Decides on the end of the job that one role has brought about: the job continues without a role whose failures
    are ignored, and otherwise stops with the name of the role."""
    outcome = state.outcome
    if outcome is None or outcome.phase is not JobPhase.FAILED or len(job.roles) == 1:
        return state
    if job.roles[state.role].on_failure is not OnFailure.IGNORE:
        return state.replace(outcome=outcome.replace(reason=f"role {state.role}: {outcome.reason}"))
    state = incidents.give_up_role(state.replace(outcome=None, failed=outcome.reason, interruption=None), now)
    return staffing.dismiss_all(state, job, now, reason="the role has failed")
