"""Chooses the number of nodes of an elastic role by its speed: each `scaling.policy` but `max` and `manual`.

A world's speed is measured once it has settled. A job tries few numbers of nodes: first the one of the current world,
then one far from it, then those that the measurements speak for (`goals.py`, `throughput.py`), until they speak for the
number that it has. It never tries a number twice, and a series of tries is bounded, so it cannot swing. A series begins
again where the job's own speed has changed, and seldom.

A try costs a change, and so do the nodes that are not there meanwhile. So it is made only while enough of the training
is left that all tries together cost little of it.

The choice is carried out as a user's request to scale is, within what the user allows; a request of a user replaces it.
"""

from __future__ import annotations

from datetime import datetime, timedelta
from math import lcm, log
from typing import NamedTuple

from perdure.base.words import count, counted
from perdure.contract import Evidence, EvidenceSource, Pace, Progress, Resized, ScalingView, World
from perdure.contract.agents import CHANGED_PACE
from perdure.spec.durations import format_duration
from perdure.spec.job import JobSpec
from perdure.spec.roles import Role
from perdure.spec.scaling import BatchSize, ScalingPolicy
from perdure.workflows.policy.capacity import goals, missing_nodes
from perdure.workflows.policy.capacity.goals import Choice, Outlook
from perdure.workflows.policy.capacity.throughput import Throughput
from perdure.workflows.policy.diagnosis import stragglers
from perdure.workflows.policy.diagnosis.hang_words import rank_names, verb
from perdure.workflows.policy.record import incidents, observations
from perdure.workflows.policy.state.job import RoleInJob
from perdure.workflows.policy.state.role import RoleState
from perdure.workflows.policy.state.scaling import StepAt, TotalAt

_MOST_TRIES = 5
"""Tries of a series."""
_APART = 20
"""The time between the begins of two series, and between two choices for a goal of time or money, in times over which
one world is measured."""
_SHARE_OF_REST = 1 / 40
"""What a change may cost, as a share of the time that is left: five tries and the way back cost less than a sixth."""
_FEWEST_STEPS = 20
"""Fewer steps do not tell how long pauses are."""
_MOST_STEPS = 10**15
"""More than any training makes: a script's greater numbers would only overflow."""
_LONGEST_STEP = 1e7
"""Seconds, four months: a longer step is none."""
_GOALS = (ScalingPolicy.DEADLINE, ScalingPolicy.BUDGET)


def learn(state: RoleInJob, world: World, *, step: float, spread: float, progress: Progress | None = None) -> RoleInJob:
    """Takes in how fast the current world steps, unless one of its ranks slows it down.

    A rank that is still slow at the next report, and about which nothing is done, has more work than the others or a
    machine that the job keeps: the speed is the job's.
    """
    if not 0 < step < _LONGEST_STEP:
        return state
    if _is_slowed(state, world):
        return state.replace(scaling=state.scaling.replace(slow_in=world.generation))
    state = _learn_total(_learn_pauses(state, world, step, progress), world, progress)
    known = state.scaling
    if all(pace.generation != world.generation for pace in known.paces):
        known = known.replace(paces_before=known.paces)
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


def doubt(state: RoleInJob, world: World) -> RoleInJob:
    """Forgets the measurement of the current world if one of its ranks, as is known now, slows it down."""
    known = state.scaling
    if _measured(state) is None or not _is_slowed(state, world):
        return state
    return state.replace(
        scaling=known.replace(paces=known.paces_before, doubted_until=None, judged=0, slow_in=world.generation)
    )


def _is_slowed(state: RoleInJob, world: World) -> bool:
    """Whether the world is slower than it may be: one of its ranks is slow, and that may pass or be repaired."""
    slow = [rank for rank in _slow_ranks(state, world) if not _is_own_work(state, world, rank)]
    memory = state.memory.slow_ranks
    is_in_hand = memory.suspect is not None or memory.experiment is not None
    return bool(slow) and (is_in_hand or state.scaling.slow_in != world.generation)


def _is_own_work(state: RoleInJob, world: World, rank: int) -> bool:
    return state.memory.slow_ranks.own_work.get(rank) == world.processes


def _slow_ranks(state: RoleInJob, world: World) -> list[int]:
    times = [times for node in state.members if node.step_times_in == world.generation for times in node.step_times]
    return [slow.rank for slow in stragglers.find(times)]


def _learn_pauses(state: RoleInJob, world: World, seconds: float, progress: Progress | None) -> RoleInJob:
    """Takes in how long the steps of a world take together with its pauses, from two reports of its progress."""
    known = state.scaling
    if progress is None or progress.last_step_at is None:
        return state
    newest = StepAt(generation=world.generation, step=progress.step, time=progress.last_step_at)
    first = known.first_step
    if first is None or first.generation != newest.generation or newest.step < first.step:
        return state.replace(scaling=known.replace(first_step=newest, newest_step=newest))
    pauses, steps = known.pauses, min(newest.step - first.step, _MOST_STEPS)
    if steps >= _FEWEST_STEPS and seconds > 0:
        pauses = max((newest.time - first.time).total_seconds() / (steps * seconds), 1.0)
    return state.replace(scaling=known.replace(newest_step=newest, pauses=pauses))


def _learn_total(state: RoleInJob, world: World, progress: Progress | None) -> RoleInJob:
    """Takes in how many steps the script makes in all: whether more nodes make it fewer shows only in another world."""
    if progress is None or progress.total_steps is None:
        return state
    known, newest = state.scaling, TotalAt(nodes=world.nodes, total=min(progress.total_steps, _MOST_STEPS))
    before = known.total
    fixed = known.fixed_steps
    if before is not None and before.nodes != newest.nodes:
        fixed = before.total == newest.total
    return state.replace(scaling=known.replace(total=newest, fixed_steps=fixed))


def _has_fixed_steps(state: RoleInJob, role: Role) -> bool:
    """Whether the training makes the same steps with any number of nodes: `scaling.steps` is such a number, and what a
    script tells shows it."""
    told = state.progress is not None and state.progress.total_steps is not None
    return bool(state.scaling.fixed_steps) if told else role.scaling.steps is not None


def follow(state: RoleInJob, job: JobSpec, now: datetime) -> RoleInJob:
    """Changes the number of nodes where the measurements speak for another one, or a try is due."""
    role, world = job.roles[state.role], state.world
    if role.scaling.policy is ScalingPolicy.MAX:
        # Where the cluster is shared, the number comes from there: `shared_nodes.py`.
        return state
    if world is None or not _may_change(state):
        return state
    state = missing_nodes.give_up(missing_nodes.note_arrival(state), role, now)
    measured = _measured(state)
    if measured is None or world.nodes not in sizes_of(state, role):
        return state
    state = _judge(state, role, measured, now)
    if _is_doubted(state, now):
        return state
    wanted, choice = _wanted(state, job, measured, now)
    state = _tell_problem(state, choice, now)
    if wanted is None or missing_nodes.places(state, wanted.nodes) == state.nodes_max:
        return state
    if _obstacle(state, job, measured, wanted, now):
        return state
    return _resize(state, role, wanted, choice, now)


def count_nodes(state: RoleState, role: Role, now: datetime) -> RoleState:
    """Adds what the nodes have taken since they were counted last.

    It is done before a decision takes anything in: until then there were the nodes that the state has.
    """
    known = state.scaling
    if role.scaling.policy is not ScalingPolicy.BUDGET:
        return state if known.counted_until is None else state.replace(scaling=known.replace(counted_until=None))
    nodes = sum(node.alive and not node.queued and node.uncreated_since is None for node in state.nodes.values())
    taken = nodes * max((now - (known.counted_until or now)).total_seconds(), 0.0)
    return state.replace(scaling=known.replace(node_seconds=known.node_seconds + taken, counted_until=now))


def measured_over(role: Role) -> timedelta | None:
    """The time of steps over which the speed of a role's worlds is measured; None for a role without a world.

    It is measured whatever the policy is, so that a user who sets another one need not wait for another world."""
    return role.scaling.settle if role.ready is None else None


def next_looks(state: RoleInJob, job: JobSpec) -> tuple[datetime | None, ...]:
    """The times at which the next series of tries and the next choice for a goal may be made, and at which nodes that
    do not come are given up or requested again."""
    role = job.roles[state.role]
    known = state.scaling
    return (
        _next_series(state, role),
        _next_choice(state, role),
        missing_nodes.next_look(state, role),
        known.doubted_until,
    )


def _next_series(state: RoleInJob, role: Role) -> datetime | None:
    """The time at which the next series of tries may begin; None where it may at once."""
    known = state.scaling
    if role.scaling.policy is ScalingPolicy.MAX or known.began_at is None or known.tries:
        return None
    return known.began_at + _APART * role.scaling.settle


def _next_choice(state: RoleInJob, role: Role) -> datetime | None:
    """The time at which another number may be chosen for a goal of time or money; None where it may at once."""
    if role.scaling.policy not in _GOALS:
        return None
    known = state.scaling
    chosen = [resized.time for resized in known.resized if not (resized.is_try or resized.gave_up)]
    if not chosen or (known.goal_at is not None and chosen[-1] <= known.goal_at):
        return None
    return chosen[-1] + _APART * role.scaling.settle


def allow(state: RoleInJob) -> RoleInJob:
    """Takes in that a user has said how many nodes there may be: what was chosen before counts no more, and tries begin
    at once."""
    return state.replace(
        scaling=state.scaling.replace(
            largest=None, tries=0, began_at=None, awaited_since=None, missed=None, advised=None
        )
    )


def is_own_choice(state: RoleInJob) -> bool:
    """Whether the present number of nodes is one that the job has chosen."""
    return state.scaling.largest is not None


def view(state: RoleInJob, job: JobSpec, now: datetime) -> ScalingView | None:
    """What is known, for users; None where nothing is measured."""
    role, known = job.roles[state.role], state.scaling
    if not role.scaling.measures:
        return None
    measured, sizes, throughput = _measured(state), _available(state, role, now), throughput_of(state, role)
    outlook = _outlook(state, job, measured, now)
    choice = goals.choose(role.scaling, throughput, sizes, outlook)
    return ScalingView(
        fewest=state.nodes_min,
        largest=largest_of(state),
        unit=lcm(state.unit, role.node_group),
        global_batch=role.scaling.batch is BatchSize.GLOBAL,
        min_efficiency=role.scaling.min_efficiency,
        paces=known.paces,
        chosen=choice.nodes,
        why=_why(state, job, measured, now),
        policy=role.scaling.policy,
        problem=choice.problem,
        meets=tuple(nodes for nodes in sizes if goals.meets(role.scaling, throughput, outlook, nodes)),
        price=role.scaling.price,
        steps_left=None if outlook.steps is None else round(outlook.steps),
        fixed_steps=outlook.fixed_steps,
        pauses=known.pauses,
        resized=known.resized,
        shares=role.scaling.share,
        priority=role.scaling.priority,
        advised=known.advised,
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
    urgent: bool = False
    """The goal is missed with the present number."""


def _measured(state: RoleInJob) -> Pace | None:
    """The measurement of the present world."""
    present = None if state.world is None else state.world.generation
    return next((pace for pace in state.scaling.paces if pace.generation == present), None)


def _judge(state: RoleInJob, role: Role, measured: Pace, now: datetime) -> RoleInJob:
    """Doubts a new measurement that is slower than others let expect for as long as it has taken: a slow rank may
    become known later than the speed."""
    known = state.scaling
    if known.judged == measured.generation:
        return state
    before = Throughput(known.paces_before, global_batch=role.scaling.batch is BatchSize.GLOBAL)
    slow = measured.step > (1 + CHANGED_PACE) * before.longest_step(measured.nodes)
    until = now + role.scaling.settle if slow else None
    return state.replace(scaling=known.replace(judged=measured.generation, doubted_until=until))


def _is_doubted(state: RoleInJob, now: datetime) -> bool:
    until = state.scaling.doubted_until
    return until is not None and now < until


def _available(state: RoleInJob, role: Role, now: datetime) -> range:
    """The numbers of nodes that a world may have, without those that lately did not come."""
    return missing_nodes.available(sizes_of(state, role), state, now)


def _outlook(state: RoleInJob, job: JobSpec, measured: Pace | None, now: datetime) -> Outlook:
    known, world, progress, role = state.scaling, state.world, state.progress, job.roles[state.role]
    total = role.scaling.steps if progress is None or progress.total_steps is None else progress.total_steps
    step, newest, left = 0.0 if progress is None else _counted(progress.step), known.newest_step, None
    seconds = 0.0 if measured is None else measured.step
    if newest is not None and world is not None and newest.generation == world.generation and seconds > 0:
        # The world has stepped on since it told its progress.
        step = _counted(newest.step) + max((now - newest.time).total_seconds(), 0.0) / (seconds * known.pauses)
    if total is not None:
        left = max(_counted(total) - step, 0.0)
    return Outlook(
        now=now,
        present=0 if world is None else world.nodes,
        steps=left,
        pauses=known.pauses,
        change=incidents.restart_cost(state, seconds) or job.timing.stragglers.restart_cost,
        node_hours=known.node_seconds / 3600,
        ranks=1 if world is None else world.processes / world.nodes,
        fixed_steps=_has_fixed_steps(state, role),
    )


def _counted(steps: int) -> float:
    return float(min(steps, _MOST_STEPS))


def _wanted(state: RoleInJob, job: JobSpec, measured: Pace, now: datetime) -> tuple[_Wanted | None, Choice]:
    """The number of nodes that is to be tried or kept, if any, and what the policy chooses."""
    role, present = job.roles[state.role], measured.nodes
    sizes, throughput = _available(state, role, now), throughput_of(state, role)
    outlook = _outlook(state, job, measured, now)
    known = [pace.nodes for pace in state.scaling.paces if pace.nodes in sizes]
    choice = goals.choose(role.scaling, throughput, sizes, outlook)
    may_try = state.scaling.tries < _MOST_TRIES
    if role.scaling.policy is ScalingPolicy.MANUAL or (role.scaling.policy in _GOALS and outlook.steps is None):
        return None, choice
    if len(known) < 2:
        far = sizes[-1] if choice.urgent and present != sizes[-1] else _far_from(present, sizes)
        return (_Wanted(far, is_try=True) if far != present and may_try else None), choice
    if choice.nodes is not None and choice.nodes not in known:
        if may_try:
            return _Wanted(choice.nodes, is_try=True, urgent=choice.urgent), choice
        choice = goals.choose(role.scaling, throughput, known, outlook)
    if role.scaling.policy is ScalingPolicy.EFFICIENT and choice.nodes is not None and may_try:
        valley = throughput.possible_valley(choice.nodes, sizes)
        if valley is not None:
            return _Wanted(valley, is_try=True), choice
    return (None if choice.nodes is None else _Wanted(choice.nodes, is_try=False, urgent=choice.urgent)), choice


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


def _tell_problem(state: RoleInJob, choice: Choice, now: datetime) -> RoleInJob:
    """Records, once, that no number of nodes reaches the goal, and what would."""
    known = state.scaling
    if bool(choice.problem) == bool(known.problem):
        return state
    state = state.replace(scaling=known.replace(problem=choice.problem))
    if not choice.problem:
        return state
    evidence = Evidence(time=now, source=EvidenceSource.AGENT, text=choice.problem)
    return observations.observe_missed_goal(state, evidence, now)


def _obstacle(state: RoleInJob, job: JobSpec, measured: Pace, wanted: _Wanted, now: datetime) -> str:
    """Why a change is not made now; empty where it is."""
    role = job.roles[state.role]
    due = _next_series(state, role) if wanted.is_try else None
    if due is not None and now < due:
        return f"its speed has changed; it tries other numbers of nodes again at {due:%H:%M:%S} UTC"
    due = None if wanted.is_try else _next_choice(state, role)
    if due is not None and now < due:
        chosen = counted(wanted.nodes, "node", "are")
        return f"{chosen} chosen; it changes their number at {due:%H:%M:%S} UTC at the earliest"
    outlook = _outlook(state, job, measured, now)
    if outlook.steps is None or wanted.urgent:
        return ""
    rest, cost = outlook.steps * measured.step, outlook.change.total_seconds()
    if cost <= rest * _SHARE_OF_REST:
        return ""
    return f"a change costs {cost:.1f} s, too much of the {rest:,.0f} s that are left"


def _why(state: RoleInJob, job: JobSpec, measured: Pace | None, now: datetime) -> str:
    role, world = job.roles[state.role], state.world
    if role.scaling.share:
        advised = state.scaling.advised
        return "the sharing of the cluster has advised nothing" if advised is None else advised.why
    if world is None or not state.stepping:
        return "no world trains"
    if measured is None and world.pace_over is None:
        return "the speed of its world is not measured, which a release before 0.4 has formed; that of the next one is"
    if measured is None and (slow := _slow_ranks(state, world)) and state.scaling.slow_in == world.generation:
        waits = format_duration(_APART * role.scaling.settle)
        return (
            f"{rank_names(slow)} {verb(len(slow), 'be')} slow, so the speed with {count(world.nodes, 'node')} counts "
            f"only once that has lasted for {waits}, or is repaired (perdure explain)"
        )
    if measured is None:
        nodes, settle = count(world.nodes, "node"), role.scaling.settle.total_seconds()
        return f"the speed with {nodes} is being measured, over {settle:g} s"
    if _is_doubted(state, now):
        return (
            f"{counted(world.nodes, 'node', 'are')} slower than others let expect: it waits until "
            f"{state.scaling.doubted_until:%H:%M:%S} UTC for a slow rank to be found"
        )
    wanted, choice = _wanted(state, job, measured, now)
    size = world.nodes if wanted is None else wanted.nodes
    if wanted is not None and missing_nodes.places(state, size) != state.nodes_max:
        obstacle = _obstacle(state, job, measured, wanted, now)
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
    sizes = sizes_of(state, role)
    if choice.why or size not in sizes:
        return choice.why
    return goals.compare(role.scaling, throughput_of(state, role), sizes, size)


def _resize(state: RoleInJob, role: Role, wanted: _Wanted, choice: Choice, now: datetime) -> RoleInJob:
    size, known, before = wanted.nodes, state.scaling, state.nodes_max
    expected = throughput_of(state, role).step(size)
    resized = Resized(
        time=now,
        before=before,
        after=size,
        is_try=wanted.is_try,
        expected_step=None if expected is None else expected.seconds,
    )
    text = f"to measure the speed with {count(size, 'node')}" if wanted.is_try else choice.why
    changed = range(min(before, size), max(before, size))
    known = known.replace(
        largest=largest_of(state),
        tries=known.tries + wanted.is_try,
        began_at=now if wanted.is_try and not known.tries else known.began_at,
        awaited_since=now if state.world is not None and size > state.world.nodes else None,
    ).with_resized(resized)
    reasons = state.request_reasons | dict.fromkeys(changed, f"{text} (scaling.policy is {role.scaling.policy})")
    places = missing_nodes.places(state, size)
    return state.replace(scaling=known, nodes_max=places, ready_since=None, request_reasons=reasons)
