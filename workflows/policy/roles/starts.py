"""When a role starts: once the roles that it depends on are ready or have completed.

The order holds again whenever a role begins without nodes, as after a suspension. A role that has nodes keeps them
whatever happens to the roles that it depends on, and is repaired beside them.
"""

from __future__ import annotations

from collections.abc import Mapping

from perdure.spec.job import JobSpec
from perdure.spec.roles import Condition
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


def _holds(condition: Condition, role: RoleState) -> bool:
    return bool(role.completed) or (condition is Condition.READY and role.stepping)
