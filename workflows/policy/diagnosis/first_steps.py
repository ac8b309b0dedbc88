"""Limits the time to a world's first step, so that ranks that hang at their start are restarted.

After its first step, a stall only means that ranks wait, and torch's own timeouts end that. Before it, ranks may hang
where nothing has a timeout: in an import, in a lock, on a file system. But a first step may also take long: it
compiles, loads, or skips data. So the job learns how long its first steps take, and gives a later world several times
as long. A job that has made no step has nothing to compare with, and no limit unless its specification sets one.

The agents measure the time, because only they can tell a hang from a report that is late. Each restart doubles the
limit: a first step that takes longer than ever before is not prevented for good.
"""

from __future__ import annotations

from datetime import datetime, timedelta

from perdure.contract import ExtendFirstStep, Failure, FailureClass
from perdure.contract.transitions import NodeStalled, NodeStepping
from perdure.spec.durations import format_duration
from perdure.spec.job import JobSpec
from perdure.workflows.policy.diagnosis.interruptions import interrupt
from perdure.workflows.policy.record import incidents
from perdure.workflows.policy.repair import memory
from perdure.workflows.policy.state.job import RoleInJob
from perdure.workflows.policy.state.node import NodeFailure, NodeState

_MOST_DOUBLINGS = 6


def limit_of(state: RoleInJob, job: JobSpec) -> timedelta | None:
    """The time that the next world has for its first step; None for no limit."""
    timing = job.timing.stall
    limit = timing.first_step
    # A world may fail before its nodes have reported their first step.
    known = state.first_step or state.stepped_within
    if limit is None and known is not None:
        limit = max(timing.first_step_least, timing.first_steps * known)
    if not limit:
        return None
    return limit * 2 ** min(memory.times_for_role(state, ExtendFirstStep), _MOST_DOUBLINGS)


def learn(state: RoleInJob, stepping: NodeStepping, now: datetime) -> RoleInJob:
    """Takes in that a node has made its first step in the current world."""
    entered_at = stepping.entered_at
    if entered_at is not None:
        took = max(stepping.time - entered_at, timedelta())
        state = state.replace(first_step=max(state.first_step or took, took))
    # This is read for each of a thousand nodes, so the cheap check comes first.
    if memory.times_for_role(state, ExtendFirstStep) and state.stepped:
        state = memory.forget_all(state, ExtendFirstStep)
    return _withdraw(state, stepping.rank, now)


def learn_from_failure(state: RoleInJob, failure: Failure) -> RoleInJob:
    """Takes in that a world which fails has made steps, where no first step was reported: it took no longer than the
    world lasted."""
    world, progress, begun = state.world, failure.progress, state.world_decided_at
    if state.first_step is not None or world is None or begun is None:
        return state
    if progress is None or not progress.generation_steps:
        return state
    if failure.generation != world.generation or progress.generation not in (0, world.generation):
        return state
    lasted = max(failure.time - begun, timedelta())
    return state.replace(stepped_within=max(state.stepped_within or lasted, lasted))


def miss(state: RoleInJob, node: NodeState, stalled: NodeStalled, now: datetime) -> RoleInJob:
    """Takes in that the ranks of a node have made no first step in time."""
    world = state.world
    if world is None or stalled.generation != world.generation:
        return state
    if not state.is_member(node) or state.outcome is not None or state.between_stages:
        return state
    others_step = any(member.stepped >= world.generation for member in state.members)
    if others_step and not node.stepped:
        # Ranks without an optimizer never step: an evaluator, a reader of data.
        return state
    limit = f" within {format_duration(world.first_step)}" if world.first_step else ""
    known = f"; the longest first step took {format_duration(_rounded(state.first_step))}" if state.first_step else ""
    text = f"no rank of node {node.rank} has made a step{limit} after it entered generation {world.generation}{known}"
    # The nodes of a world wait for each other, and each reports it: none of them is known to be the one that hangs.
    failure = NodeFailure(rank=node.rank, failure=FailureClass.HANG, time=stalled.time, text=text, certain=False)
    return interrupt(state, failure, now=now, generation=world.generation)


def describe(state: RoleInJob) -> str:
    """The steps that are missed in a world whose ranks run; empty where all step, as far as is known."""
    if stalled := state.stalled:
        nodes = ", ".join(str(node.rank) for node in stalled)
        since = min(node.stalled_since for node in stalled if node.stalled_since)
        return f"no steps on node{'s' if len(stalled) > 1 else ''} {nodes} since {since:%H:%M:%S} UTC"
    return "" if state.stepped or state.finished else "no step was seen on every node yet"


def awaited(state: RoleInJob) -> str:
    """What the job waits for before the first step of a world whose ranks run; empty once all have stepped."""
    world = state.world
    if world is None or state.stepped or not state.stepping or state.finished:
        return ""
    first = f"the first step of generation {world.generation}"
    if world.first_step is not None:
        return f"waits for {first}, for {format_duration(_rounded(world.first_step))} from its beginning"
    if state.first_step is not None:
        return f"waits for {first}, without a limit"
    return (
        f"waits for {first}, without a limit: the job has made no step yet, and a program may make none "
        "(timing.stall.first_step sets a limit)"
    )


def _withdraw(state: RoleInJob, rank: int, now: datetime) -> RoleInJob:
    """Takes back what a node has reported of its first step, if it steps before the job has decided on that."""
    interruption = state.interruption
    if interruption is None or interruption.decided or rank not in interruption.ranks_with(FailureClass.HANG):
        return state
    left = tuple(one for one in interruption.failures if (one.rank, one.failure) != (rank, FailureClass.HANG))
    if left or interruption.requested is not None:
        return state.replace(interruption=interruption.replace(failures=left))
    state = incidents.abandon(state, now, "the ranks have made their first step after all")
    return state.replace(interruption=None)


def _rounded(duration: timedelta) -> timedelta:
    return timedelta(seconds=round(duration.total_seconds(), 1))
