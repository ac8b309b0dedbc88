"""An agent has reported a number of a rank that is not finite."""

from __future__ import annotations

from datetime import datetime

from perdure.contract import BadNumber
from perdure.workflows.policy.facts.rank_reports import accept_rank_report
from perdure.workflows.policy.state.job import RoleInJob
from perdure.workflows.policy.state.role import SeenNumber


def on_bad_number(state: RoleInJob, bad: BadNumber, now: datetime) -> RoleInJob:
    """Takes in a number of a rank of the current world; that of an older one changes nothing any more."""
    number = bad.number
    state, node = accept_rank_report(state, bad, now, rank=number.rank, step=number.step, about="a number")
    if node is None:
        return state
    seen = SeenNumber(node=node.rank, generation=bad.generation, number=number, time=bad.time, arrived_at=now)
    of_this_world = [one for one in state.bad_numbers if one.generation == bad.generation]
    if any(one.is_about(seen) for one in of_this_world):
        return state
    return state.replace(bad_numbers=(*of_this_world, seen))
