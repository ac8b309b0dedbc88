"""A job's page in the Temporal UI: the Markdown of the workflow's current details."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from datetime import datetime

from perdure.base.markdown import plain, table
from perdure.contract import IncidentView, JobPhase, NodeView, RoleStatus
from perdure.spec.job import JobSpec
from perdure.workflows.policy.record.projections import next_action, node_views, role_statuses
from perdure.workflows.policy.state.job import JobState, RoleInJob

_CLOSED = (JobPhase.SUCCEEDED, JobPhase.FAILED, JobPhase.CANCELLED)
MOST_SHOWN = 64
"""The most nodes of a role, or of a group."""


def details_of(state: JobState, job: JobSpec, phase: JobPhase, now: datetime) -> str:
    """What a job does, why, what it does next, and its nodes."""
    closed = phase if phase in _CLOSED else None
    leading = state.decisive if closed else state.leading
    reason = state.outcome.reason if state.outcome is not None else leading.reason
    lines = [f"**{phase}**: {plain(reason)}" if reason else f"**{phase}**", ""]
    roles = role_statuses(state, job, now, closed=closed)
    for role in roles:
        lines += [_role(role), *(f"  {line}" for line in _facts(state.view(role.name), job, closed=closed is not None))]
    if not roles:
        lines += _facts(leading, job, closed=closed is not None)
    for view in state.views:
        lines += ["", *_nodes(view, several=bool(roles))]
    return "\n".join(lines)


def _role(role: RoleStatus) -> str:
    return f"- **{role.name}** {role.phase}" + (f": {plain(role.reason)}" if role.reason else "")


def _facts(state: RoleInJob, job: JobSpec, *, closed: bool) -> Iterator[str]:
    if not closed:
        yield f"- **Next**: {plain(next_action(state, job))}"
    if state.last_incident is not None:
        yield f"- **Last incident**: {_incident(state.last_incident)}"
    yield f"- **World**: {_world(state)}"


def _incident(incident: IncidentView) -> str:
    again, how = incident.stepping_at or incident.running_at, "stepping" if incident.stepping_at else "running"
    if again is not None:
        took = f"{how} again after {(again - incident.started_at).total_seconds():.1f} s"
    else:
        took = "it has stopped the job" if incident.stopped else "not over"
    return f"#{incident.number} {plain(incident.title)} ({took})"


def _world(state: RoleInJob) -> str:
    desired = str(state.nodes_min) if state.nodes_min == state.nodes_max else f"{state.nodes_min} to {state.nodes_max}"
    world = state.world
    if world is None:
        return f"none; nodes desired: {desired}"
    return f"nodes {world.nodes}, ranks {world.processes}, generation {state.generation}; nodes desired: {desired}"


def _nodes(state: RoleInJob, *, several: bool) -> list[str]:
    if not state.nodes:
        return []
    head = f"Node of {state.role}" if several else "Node"
    return table_of_nodes(head, node_views(state, first=MOST_SHOWN), total=len(state.nodes))


def table_of_nodes(head: str, views: Sequence[NodeView], *, total: int) -> list[str]:
    """The lines of a table of nodes.

    Args:
        head: Of the column with their numbers.
        views: The nodes that are shown.
        total: The number of all nodes.
    """
    rows = [
        (
            f"{view.rank}.{view.incarnation}",
            view.phase if view.reachable else f"{view.phase}, unreachable",
            "" if view.group_rank is None else str(view.group_rank),
            plain(view.host),
            plain(view.reason, limit=160),
        )
        for view in views
    ]
    if total > len(views):
        rows.append(("…", f"{total - len(views)} more", "", "", ""))
    return table((head, "State", "Group rank", "Host", "Why"), rows)
