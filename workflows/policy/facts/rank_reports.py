"""Accepts what an agent reports of one of its ranks in the current world."""

from __future__ import annotations

from datetime import datetime

from perdure.contract import BadNumber, Corruption
from perdure.workflows.policy.diagnosis import claims
from perdure.workflows.policy.facts.agent_messages import accept_message, take_progress
from perdure.workflows.policy.state.job import RoleInJob
from perdure.workflows.policy.state.node import NodeState


def accept_rank_report(
    state: RoleInJob, report: BadNumber | Corruption, now: datetime, *, rank: int, step: int, about: str
) -> tuple[RoleInJob, NodeState | None]:
    """Returns the node that reports about its rank; None where the report changes nothing: that of an older world, or
    of a rank that the node does not have.

    Args:
        state: The job.
        report: The report.
        now: The time.
        rank: The global rank that it is about.
        step: The step that it is about.
        about: What it reports, for people.
    """
    known = accept_message(state, report, now)
    if known is None:
        return state, None
    state, node = known
    world = state.world
    if world is None or report.generation != world.generation or not state.is_member(node) or state.between_stages:
        return state, None
    member = world.members[node.rank]
    if not member.base_rank <= rank < member.base_rank + member.processes or step < 0:
        return claims.count(state, f"node {node.rank} has reported {about} of rank {rank}"), None
    return take_progress(state, report.progress), node
