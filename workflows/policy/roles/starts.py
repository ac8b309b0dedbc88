"""When a role starts: once the roles that it depends on are ready or have completed.

The order holds again whenever a role begins without nodes, as after a suspension. A role that has nodes keeps them
whatever happens to the roles that it depends on, and is repaired beside them.

A job that was reset to an earlier point adopts the nodes of its roles, and forgets what has completed since, except
where nodes prove it: those of a role that has waited for another one to complete.
"""

from __future__ import annotations

from collections.abc import Mapping

from perdure.spec.job import JobSpec
from perdure.spec.role_relations import order_of
from perdure.spec.roles import Condition
from perdure.workflows.policy.state.job import JobState
from perdure.workflows.policy.state.role import RoleState

_ANNOUNCED = {Condition.READY: "to be ready", Condition.COMPLETED: "to complete"}


def why_waiting(role: RoleState, roles: Mapping[str, RoleState], job: JobSpec) -> str:
    """Describes the roles that this one waits for before it starts; empty where it starts or has started."""
    if not role.is_idle or role.interruption is not None or role.role not in job.roles:
        return ""
    missing = [
        f"{other} {_ANNOUNCED[condition]}"
        for other, condition in job.roles[role.role].depends_on.items()
        if not _holds(condition, roles[other])
    ]
    return f"waits for {' and '.join(missing)}" if missing else ""


def complete_proven(state: JobState, job: JobSpec) -> JobState:
    """Completes the roles for whose completion another one has waited that has started."""
    for name in reversed(order_of(job.roles)):
        role = state.roles[name]
        if role.is_idle and not role.completed:
            continue
        for other, condition in job.roles[name].depends_on.items():
            earlier = state.roles[other]
            if condition is Condition.COMPLETED and not earlier.completed:
                completed = f"it had completed before role {name} started"
                state = state.with_role(earlier.replace(completed=completed, interruption=None))
    return state


def _holds(condition: Condition, role: RoleState) -> bool:
    return bool(role.completed) or (condition is Condition.READY and role.stepping)
