"""Chooses the number of nodes of an elastic role by its speed: `scaling.policy` is `efficient`.

A world's speed is measured once it has settled. A job tries few numbers of nodes: first the one of the current world,
then one far from it, then those that the measurements speak for (`throughput.py`), until they speak for the number that
it has. It never tries a number twice, and a series of tries is bounded, so it cannot swing. A series begins again where
the job's own speed has changed, and seldom.

A try costs a change, and so do the nodes that are not there meanwhile. So it is made only while enough of the training
is left that all tries together cost little of it.

The choice is carried out as a user's request to scale is, within what the user allows; a request of a user replaces it.
"""

from __future__ import annotations

from datetime import datetime, timedelta
from math import lcm, log
from typing import NamedTuple

from perdure.contract import Pace, Resized, ScalingView, World
from perdure.contract.agents import CHANGED_PACE
from perdure.spec.job import JobSpec
from perdure.spec.roles import Role
from perdure.spec.scaling import BatchSize, ScalingPolicy
from perdure.workflows.policy.capacity import missing_nodes
from perdure.workflows.policy.capacity.throughput import Throughput
from perdure.workflows.policy.diagnosis import stragglers
from perdure.workflows.policy.record import incidents
from perdure.workflows.policy.state.job import RoleInJob
from perdure.workflows.policy.state.role import RoleState

_MOST_TRIES = 5
"""Tries of a series."""
_SERIES_APART = 20
"""The time between the begins of two series, in times over which one world is measured."""
_SHARE_OF_REST = 1 / 40
"""What a change may cost, as a share of the time that is left: five tries and the way back cost less than a sixth."""


def learn(state: RoleInJob, world: World, *, step: float, spread: float) -> RoleInJob:
    """Takes in how fast the current world steps, unless one of its ranks slows it down."""
    times = [times for node in state.members if node.step_times_in == world.generation for times in node.step_times]
    if stragglers.find(times):
        return state
    known = state.scaling
    others = {pace.nodes: pace for pace in known.paces}
    before = others.pop(world.nodes, None)
    pace = Pace(nodes=world.nodes, step=step, spread=spread, generation=world.generation)
    if before is not None and abs(step - before.step) > CHANGED_PACE * before.step:
        known, others = known.replace(tries=0), {}
    elif before is not None:
        # What is only noise must not speak for another number.
        pace = before.replace(generation=world.generation)
    paces = sorted((*others.values(), pace), key=lambda one: one.nodes)
    return state.replace(scaling=known.replace(paces=tuple(paces)))


def follow(state: RoleInJob, job: JobSpec, now: datetime) -> RoleInJob:
    """Changes the number of nodes where the measurements speak for another one, or a try is due."""
    role, world = job.roles[state.role], state.world
    if role.scaling.policy is ScalingPolicy.MAX or world is None or not _may_change(state):
        return state
    state = missing_nodes.give_up(missing_nodes.note_arrival(state), role, now)
    measured = next((pace for pace in state.scaling.paces if pace.generation == world.generation), None)
    if measured is None or world.nodes not in sizes_of(state, role):
        return state
    wanted = _wanted(state, role, world.nodes, now)
    if wanted is None or missing_nodes.places(state, wanted.nodes) == state.nodes_max:
        return state
    if _obstacle(state, job, measured, now, is_try=wanted.is_try):
        return state
    return _resize(state, role, wanted, now)


def measured_over(role: Role) -> timedelta | None:
    """The time of steps over which the speed of a role's worlds is measured; None where it is not."""
    return None if role.scaling.policy is ScalingPolicy.MAX else role.scaling.settle


def next_looks(state: RoleInJob, job: JobSpec) -> tuple[datetime | None, datetime | None]:
    """The times at which the next series of tries may begin, and at which nodes that do not come are given up or
    requested again."""
    return _next_series(state, job), missing_nodes.next_look(state, job.roles[state.role])


def _next_series(state: RoleInJob, job: JobSpec) -> datetime | None:
    """The time at which the next series of tries may begin; None where it may at once."""
    role, known = job.roles[state.role], state.scaling
    if role.scaling.policy is ScalingPolicy.MAX or known.began_at is None or known.tries:
        return None
    return known.began_at + _SERIES_APART * role.scaling.settle


def allow(state: RoleInJob) -> RoleInJob:
    """Takes in that a user has said how many nodes there may be: what was chosen before counts no more, and tries begin
    at once."""
    return state.replace(
        scaling=state.scaling.replace(largest=None, tries=0, began_at=None, awaited_since=None, missed=None)
    )


def is_own_choice(state: RoleInJob) -> bool:
    """Whether the present number of nodes is one that the job has chosen."""
    return state.scaling.largest is not None


def view(state: RoleInJob, job: JobSpec, now: datetime) -> ScalingView | None:
    """What is known, for users; None where the job chooses nothing."""
    role, known, world = job.roles[state.role], state.scaling, state.world
    if role.scaling.policy is ScalingPolicy.MAX:
        return None
    measured = None if world is None else next((p for p in known.paces if p.generation == world.generation), None)
    return ScalingView(
        fewest=state.nodes_min,
        largest=largest_of(state),
        unit=lcm(state.unit, role.node_group),
        global_batch=role.scaling.batch is BatchSize.GLOBAL,
        min_efficiency=role.scaling.min_efficiency,
        paces=known.paces,
        chosen=throughput_of(state, role).efficient(_available(state, role, now), role.scaling.min_efficiency),
        why=_why(state, job, measured, now),
        resized=known.resized,
    )


def sizes_of(state: RoleInJob, role: Role) -> range:
    """The numbers of nodes that a world may have, ascending."""
    return range(state.nodes_min, largest_of(state) + 1, lcm(state.unit, role.node_group))


def largest_of(state: RoleInJob | RoleState) -> int:
    """The most nodes that the specification or a user allows."""
    return state.nodes_max if state.scaling.largest is None else state.scaling.largest


def throughput_of(state: RoleInJob, role: Role) -> Throughput:
    """The measurements with numbers of nodes that a world may have."""
    sizes = sizes_of(state, role)
    paces = [pace for pace in state.scaling.paces if pace.nodes in sizes]
    return Throughput(paces, global_batch=role.scaling.batch is BatchSize.GLOBAL)


class _Wanted(NamedTuple):
    nodes: int
    is_try: bool
    """It is wanted to measure it; otherwise the measurements speak for it."""


def _available(state: RoleInJob, role: Role, now: datetime) -> range:
    """The numbers of nodes that a world may have, without those that lately did not come."""
    return missing_nodes.available(sizes_of(state, role), state, now)


def _wanted(state: RoleInJob, role: Role, present: int, now: datetime) -> _Wanted | None:
    """The number of nodes that is to be tried or kept; None where nothing speaks for another one."""
    sizes, throughput = _available(state, role, now), throughput_of(state, role)
    known = [pace.nodes for pace in state.scaling.paces if pace.nodes in sizes]
    may_try = state.scaling.tries < _MOST_TRIES
    if len(known) < 2:
        far = _far_from(present, sizes)
        return _Wanted(far, is_try=True) if far != present and may_try else None
    size = throughput.efficient(sizes, role.scaling.min_efficiency)
    if size is not None and size not in known:
        if may_try:
            return _Wanted(size, is_try=True)
        size = throughput.efficient(known, role.scaling.min_efficiency)
    return None if size is None else _Wanted(size, is_try=False)


def _far_from(present: int, sizes: range) -> int:
    """A number in the middle of all, by ratio; the smallest one where that is the present one."""
    middle = min(sizes, key=lambda size: abs(log(size) - (log(sizes[0]) + log(sizes[-1])) / 2))
    return middle if middle != present else sizes[0] if sizes[0] != present else sizes[-1]


def _may_change(state: RoleInJob) -> bool:
    """Whether the world trains, and nothing else is in progress."""
    if state.interruption is not None or state.postponed is not None or state.repairs_paused_until is not None:
        return False
    if state.between_stages or not state.stepping or state.stalled:
        return False
    return all(one.alive and one.reachable and not state.has_finished(one) for one in state.members)


def _obstacle(state: RoleInJob, job: JobSpec, measured: Pace, now: datetime, *, is_try: bool) -> str:
    """Why a change is not made now; empty where it is."""
    due = _next_series(state, job) if is_try else None
    if due is not None and now < due:
        return f"its speed has changed; it tries other numbers of nodes again at {due:%H:%M:%S} UTC"
    progress = state.progress
    if progress is None or progress.total_steps is None:
        return ""
    rest = max(progress.total_steps - progress.step, 0) * timedelta(seconds=measured.step)
    cost = incidents.restart_cost(state, measured.step) or job.timing.stragglers.restart_cost
    if cost <= rest * _SHARE_OF_REST:
        return ""
    return f"a change costs {cost.total_seconds():.1f} s, too much of the {rest.total_seconds():,.0f} s that are left"


def _why(state: RoleInJob, job: JobSpec, measured: Pace | None, now: datetime) -> str:
    role, world = job.roles[state.role], state.world
    if world is None or not state.stepping:
        return "no world trains"
    if measured is None:
        return f"the speed with {world.nodes} nodes is being measured, over {role.scaling.settle.total_seconds():g} s"
    wanted = _wanted(state, role, world.nodes, now)
    size = world.nodes if wanted is None else wanted.nodes
    if wanted is not None and missing_nodes.places(state, size) != state.nodes_max:
        obstacle = _obstacle(state, job, measured, now, is_try=wanted.is_try)
        if obstacle:
            return obstacle
    if size > world.nodes:
        end = missing_nodes.end_of_wait(state, role)
        return f"it waits for nodes: {size} are wanted" + (f", until {end:%H:%M:%S} UTC" if end is not None else "")
    missed = state.scaling.missed
    if missed is not None and now < missed.until and size == world.nodes:
        return (
            f"{missed.nodes} nodes were requested and did not come; they are requested again at "
            f"{missed.until:%H:%M:%S} UTC, if they are still wanted"
        )
    return _comparison(state, role, size)


def _resize(state: RoleInJob, role: Role, wanted: _Wanted, now: datetime) -> RoleInJob:
    (size, is_try), known, before = wanted, state.scaling, state.nodes_max
    expected = throughput_of(state, role).step(size)
    resized = Resized(
        time=now, before=before, after=size, is_try=is_try, expected_step=None if expected is None else expected.seconds
    )
    text = f"to measure the speed with {size} nodes" if is_try else _comparison(state, role, size)
    changed = range(min(before, size), max(before, size))
    largest = largest_of(state)
    known = known.replace(
        largest=largest,
        tries=known.tries + is_try,
        began_at=now if is_try and not known.tries else known.began_at,
        awaited_since=now if state.world is not None and size > state.world.nodes else None,
    ).with_resized(resized)
    reasons = state.request_reasons | dict.fromkeys(changed, f"{text} (scaling.policy is {role.scaling.policy})")
    return state.replace(
        scaling=known, nodes_max=missing_nodes.places(state, size), ready_since=None, request_reasons=reasons
    )


def _comparison(state: RoleInJob, role: Role, size: int) -> str:
    """What speaks for a number of nodes: how much faster the next larger one is, or it than the next smaller one."""
    sizes, throughput = sizes_of(state, role), throughput_of(state, role)
    if len(sizes) == 1:
        return "no other number of nodes is allowed"
    fewer, more = (size, size + sizes.step) if size + sizes.step in sizes else (size - sizes.step, size)
    before, after = (throughput.speed(one) for one in (fewer, more))
    if before is None or after is None:
        return ""
    least = 1 + role.scaling.min_efficiency * (more / fewer - 1)
    verb = "are" if throughput.is_measured(fewer) and throughput.is_measured(more) else "would be"
    return (
        f"{more} nodes {verb} {after / before:.2f} times as fast as {fewer}, and {least:.2f} times is what "
        f"scaling.min_efficiency {role.scaling.min_efficiency:g} asks for"
    )
