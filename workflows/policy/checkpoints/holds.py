"""Has the ranks of a world save one step and wait at it, before a change that is planned ends them.

What is saved is copied to other nodes behind the training, so the newest steps have no copies yet, and ranks are ended
in the middle of a step. A change that is planned can wait until a step is whole: all ranks save it, wait there, and are
ended once its copies are on the nodes that stay. Then no step is lost. While the ranks wait they also find out whether
a world of another size could load that step; if not, they train on, and such a change is not made.
"""

from __future__ import annotations

from datetime import datetime, timedelta
from typing import Any

from perdure.contract import HoldRequest, SnapshotUse, StoredCheckpoint
from perdure.spec.job import JobSpec
from perdure.workflows.policy.behavior import Behavior
from perdure.workflows.policy.checkpoints import state_loss
from perdure.workflows.policy.state.checkpoint import CheckpointState, HeldStep
from perdure.workflows.policy.state.job import RoleInJob
from perdure_training.node_api.hold_times import ENDED_WITHIN

WITHIN = timedelta(minutes=2)
"""The longest time from the request until the ranks wait at a step: two steps, and its copies, for which they wait a
minute at most."""


def use_of(state: RoleInJob) -> SnapshotUse | None:
    """How the ranks keep their state in memory; None where none has said it. What those of a node said in an earlier
    world counts until they say it in the current one: its first steps are made before that is known."""
    known = [node.snapshots for node in state.members if node.snapshots_in > 0]
    uses = [one for one in known if one is not None]
    if not uses:
        return None
    parts = [one for one in uses if not one.replicated]
    return SnapshotUse(replicated=not parts, copies=min((one.copies for one in parts), default=0))


def is_worthwhile(state: RoleInJob) -> bool:
    """Whether the ranks are to wait: their state is split, so that each of them has a part that no other one has."""
    return _is_split(state, use_of(state))


def _is_split(state: RoleInJob, use: SnapshotUse | None) -> bool:
    return state.behavior >= Behavior.RELEASE_0_4 and use is not None and not use.replicated


def obstacle(state: RoleInJob, job: JobSpec, *, leaves: bool) -> str:
    """Why a change is known to lose the state, without asking the ranks; empty where it is not.

    Args:
        state: The role.
        job: The job's specification.
        leaves: A node of the current world leaves, and what it has in memory with it.
    """
    use = use_of(state)
    if (
        not leaves
        or job.stored is not None
        or state_loss.accepts_older(state, job)
        or not _is_split(state, use)
        or (use is not None and use.copies)
    ):
        return ""
    return (
        "each rank has a part of the state in the memory of its own node only (`copies=0`), and the job has no "
        "checkpoint.storage"
    )


def lost_with_nodes(state: RoleInJob, job: JobSpec) -> str:
    """What is lost when all nodes end, as with a suspension; empty where nothing is known to be."""
    if job.stored is not None or use_of(state) is None:
        return ""
    step = f"the state of step {state.progress.step:,}" if state.progress is not None else "the state"
    return (
        f"{step} is in the memory of the nodes only, and lost with them, as the job has no checkpoint.storage: the "
        "script begins with what it has saved itself"
    )


def request(state: RoleInJob, *, resizes: bool, leaves: bool) -> RoleInJob:
    """Requests that the ranks wait at a step; `checkpoints.hold` is the request from now on."""
    use = use_of(state)
    return _request(state, resizes=resizes, copies=leaves and use is not None and use.copies > 0)


def request_stored(state: RoleInJob, *, within: timedelta) -> RoleInJob:
    """Requests that the step at which the ranks wait is the one that answers the newest request for a checkpoint: all
    nodes end then. Ranks that keep no state in memory do not wait."""
    if state.behavior < Behavior.RELEASE_0_4 or use_of(state) is None:
        return state
    return _request(state, stores=state.checkpoints.requests, within=within)


def follow_world(state: RoleInJob, *, checkpoint_request: int, within: timedelta) -> RoleInJob:
    """Has the ranks of a newer world wait at the step that is stored, where those before them were to: a failure has
    ended these. Where they could not wait, nothing is requested."""
    hold = open_request(state)
    if hold is None or hold.generation == state.generation or hold.stores != checkpoint_request:
        return state
    return _request(state, stores=checkpoint_request, within=within)


def _request(state: RoleInJob, **how: Any) -> RoleInJob:
    known = state.checkpoints
    hold = HoldRequest(number=_next_number(known), generation=state.generation, **how)
    return state.replace(checkpoints=known.replace(hold=hold))


def _next_number(known: CheckpointState) -> int:
    return max(known.hold.number if known.hold is not None else 0, known.given) + 1


def open_request(state: RoleInJob) -> HoldRequest | None:
    """The request that the nodes receive, until it is withdrawn. A later world changes nothing: ranks that learn of the
    end of their request before they are ended would make a step that is lost, and those of other worlds have no part
    in it."""
    hold = state.checkpoints.hold
    return hold if hold is not None and hold.number > state.checkpoints.hold_over else None


def withdraw(state: RoleInJob) -> RoleInJob:
    """The change is not made: the ranks train on."""
    hold = open_request(state)
    return state if hold is None else state.replace(checkpoints=state.checkpoints.replace(hold_over=hold.number))


def renumber(state: RoleInJob) -> RoleInJob:
    """Makes a request again under a new number, as the job was reset and may have forgotten the answer: ranks follow
    each number once. One that was answered stays, unless the step that it stores may have been forgotten."""
    waits, known, postponed = open_request(state), state.checkpoints, state.postponed
    if waits is None or waits.generation != state.generation:
        return state
    if answer(state, waits.number) is not None and waits.stores <= known.answered:
        return state
    again = waits.replace(number=_next_number(known))
    if postponed is not None and postponed.hold == waits.number:
        state = state.replace(postponed=postponed.replace(hold=again.number))
    return state.replace(checkpoints=known.replace(hold=again))


def take(
    state: RoleInJob, stored: StoredCheckpoint, problem: str, *, reported_at: datetime, now: datetime
) -> RoleInJob:
    """Takes in that all ranks wait at a step, or why it would be lost."""
    hold = state.checkpoints.hold
    if hold is None or hold.number != stored.answers or hold.generation != stored.checkpoint.generation:
        return state
    # The clock of a node may be wrong: the report follows its request.
    since = max(min(reported_at, now), state.postponed.since if state.postponed is not None else reported_at)
    until = since + timedelta(seconds=ENDED_WITHIN) + hold.within
    held = HeldStep(number=hold.number, step=stored.checkpoint.step, problem=problem, until=until)
    state = state.replace(checkpoints=state.checkpoints.replace(held=held))
    return withdraw(state) if problem else state


def answer(state: RoleInJob, number: int) -> HeldStep | None:
    """The answer to a request; None as long as there is none."""
    held = state.checkpoints.held
    return held if held is not None and held.number == number else None


def answer_stored(state: RoleInJob, checkpoint_request: int) -> HeldStep | None:
    """The step that answers a request for a checkpoint, if the ranks wait at it or have; None where they have not."""
    hold = state.checkpoints.hold
    if hold is None or hold.stores != checkpoint_request:
        return None
    held = answer(state, hold.number)
    return held if held is not None and not held.problem else None


def have_trained_on(held: HeldStep, now: datetime) -> bool:
    """Whether the ranks do not wait at a step any more, as they were not ended there in time."""
    return held.until is not None and now >= held.until
