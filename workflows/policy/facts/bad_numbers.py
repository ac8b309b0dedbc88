"""An agent has reported a number of a rank that is not finite."""

from __future__ import annotations

from datetime import datetime

from perdure.contract import BadNumber
from perdure.workflows.policy.diagnosis import claims
from perdure.workflows.policy.facts.agent_messages import accept_message, newest_progress
from perdure.workflows.policy.state.job import RoleInJob
from perdure.workflows.policy.state.role import SeenNumber


def on_bad_number(state: RoleInJob, bad: BadNumber, now: datetime) -> RoleInJob:
    """Takes in a number of a rank of the current world; that of an older one changes nothing any more."""
    known = accept_message(state, bad, now)
    if known is None:
        return state
    state, node = known
    world, number = state.world, bad.number
    if world is None or bad.generation != world.generation or not state.is_member(node) or state.between_stages:
        return state
    member = world.members[node.rank]
    if not member.base_rank <= number.rank < member.base_rank + member.processes or number.step < 0:
        return claims.count(state, f"node {node.rank} has reported a number of rank {number.rank}")
    seen = SeenNumber(node=node.rank, generation=bad.generation, number=number, time=bad.time, arrived_at=now)
    of_this_world = [one for one in state.bad_numbers if one.generation == bad.generation]
    if any(one.is_about(seen) for one in of_this_world):
        return state
    return state.replace(bad_numbers=(*of_this_world, seen), progress=newest_progress(state, bad.progress))
