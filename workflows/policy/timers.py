"""Deadlines at which a job must decide although no event arrived: the one timer that a TrainingJob needs.

A job at rest has none, so it adds nothing to its history.
"""

from __future__ import annotations

from datetime import datetime

from perdure.contract import NodePhase
from perdure.spec.job import JobSpec
from perdure.workflows.policy.capacity import admission, memory_in_place, scaling, smaller_requests
from perdure.workflows.policy.capacity.waiting import limit_of
from perdure.workflows.policy.checkpoints import state_loss
from perdure.workflows.policy.decide import end_of_limits
from perdure.workflows.policy.diagnosis import bad_numbers, unreachable
from perdure.workflows.policy.repair import ladder, slow_ranks
from perdure.workflows.policy.state.job import JobState, RoleInJob
from perdure.workflows.policy.world import forming, succession
from perdure.workflows.policy.world.entering import entry_deadline


def next_deadline(state: JobState, job: JobSpec, now: datetime) -> datetime | None:
    """The earliest time after `now` at which the passing of time alone may change a decision."""
    if state.outcome is not None:
        return state.outcome.held_until
    times = [end_of_limits(state, job), state.repairs_paused_until, state.shortage.until if state.shortage else None]
    for view in state.views:
        times += _deadlines_of_role(view, job, now)
    return min((time for time in times if time is not None and time > now), default=None)


def _deadlines_of_role(state: RoleInJob, job: JobSpec, now: datetime) -> list[datetime | None]:
    times = [state.postponed.until] if state.postponed is not None else []
    if state.rests or state.is_over:
        return [*times]
    return [
        *times,
        *_deadlines_of_the_world(state, job, now),
        *(node.until for node in state.leaving),
        *admission.next_looks(state),
        *memory_in_place.next_looks(state),
        *smaller_requests.next_looks(state, job),
        *(node.predecessor_until for node in succession.waiting_nodes(state)),
        *(node.not_before for node in state.nodes.values() if node.phase is NodePhase.LOST),
    ]


def _deadlines_of_the_world(state: RoleInJob, job: JobSpec, now: datetime) -> list[datetime | None]:
    times = [entry_deadline(state, job), ladder.next_look(state, job, now), *unreachable.next_looks(state, job)]
    times += [forming.next_look(state, job), bad_numbers.next_look(state, job), slow_ranks.next_look(state, job)]
    times += [*scaling.next_looks(state, job), state_loss.next_look(state, job)]
    if limit := limit_of(state, job):
        times.append(limit.at)
    return times
