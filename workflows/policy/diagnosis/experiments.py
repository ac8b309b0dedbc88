"""Finds out whether a slow rank is slow because of its machine or because of its work: two nodes exchange their places.

A rank that is given longer samples than the others looks like one on a slow machine. After the exchange the nodes have
each other's ranks, and each measurement favors one of three causes: the suspect is still slow, the node that has its
place is, or neither. A sequential test ends the experiment, mostly after five measurements.
"""

from __future__ import annotations

from datetime import datetime, timedelta
from statistics import median

from perdure.contract import Incarnation, SlowCause, Slowness
from perdure.contract.identity import identity_of
from perdure.workflows.policy.diagnosis import sequential_test
from perdure.workflows.policy.state.job import RoleInJob
from perdure.workflows.policy.state.node import NodeState
from perdure.workflows.policy.state.slow_ranks import Experiment

MEASUREMENTS = 15
"""After these an experiment ends without a verdict: a test whose measurements agree ends after five."""
LONGEST = timedelta(hours=1)
"""Where steps take minutes, so does each measurement."""
MOST_RANKS = 1024
"""Ranks of a job beyond which its nodes report their slowest rank only."""


def choose_partner(state: RoleInJob, suspect: NodeState) -> NodeState | None:
    """The node whose place the suspect is given: on another machine, not that of rank 0, and as fast as is usual."""
    world = state.world
    if world is None or world.processes > MOST_RANKS:
        return None
    others = [
        node
        for node in state.members
        if node.rank != suspect.rank and node.alive and node.reachable and node.processes == suspect.processes
    ]
    computes = {node.rank: max((one.compute for one in node.step_times), default=0.0) for node in others}
    usual = median(computes.values()) if computes else 0.0

    def fitness(node: NodeState) -> tuple[bool, bool, float]:
        same_machine = bool(suspect.host) and node.host == suspect.host
        return same_machine, world.members[node.rank].group_rank == 0, abs(computes[node.rank] - usual)

    return min(others, key=fitness, default=None)


def plan(
    state: RoleInJob, slowness: Slowness, suspect: NodeState, partner: NodeState, now: datetime
) -> Experiment | None:
    """The experiment for which the next world exchanges the places of two nodes."""
    world = state.world
    if world is None:
        return None
    own, other = world.members[suspect.rank], world.members[partner.rank]
    return Experiment(
        slowness=slowness,
        suspect=Incarnation(**identity_of(suspect)),
        partner=Incarnation(**identity_of(partner)),
        local_rank=slowness.rank.rank - own.base_rank,
        places=(own.group_rank, other.group_rank),
        generation=state.generation + 1,
        until=now + LONGEST,
    )


def has_begun(state: RoleInJob, experiment: Experiment) -> bool:
    """Whether the current world is that of the experiment, and nothing has interrupted it."""
    world, suspect, partner = state.world, experiment.suspect, experiment.partner
    if world is None or world.generation != experiment.generation or state.interruption is not None:
        return False
    members = [world.members.get(node.rank) for node in (suspect, partner)]
    places = tuple(member.group_rank for member in members if member is not None)
    same = all(world.member(node) is not None for node in (suspect, partner))
    return same and places == experiment.places[::-1]


def judge(state: RoleInJob, experiment: Experiment, *, over: bool) -> Slowness | None:
    """Returns the slow rank with the verdict of the experiment, which has begun; None where that needs more
    measurements.

    Args:
        state: The job.
        experiment: The experiment.
        over: No more measurements are waited for.
    """
    ratios = _ratios(state, experiment)
    before = _ratio(experiment.slowness.rank.compute, experiment.slowness.rank.usual)
    favored = [_favored(machine, place, before) for machine, place in ratios]
    decision = sequential_test.decide(favored)
    if decision is None and not over and len(ratios) < MEASUREMENTS:
        return None
    used = ratios[: decision.observations] if decision is not None else ratios
    return experiment.slowness.replace(
        cause=decision.hypothesis if decision is not None else SlowCause.UNKNOWN,
        machine_ratio=median(machine for machine, _ in used) if used else None,
        place_ratio=median(place for _, place in used) if used else None,
        measurements=len(used),
        p_value=decision.p_value if decision is not None else None,
    )


def describe(experiment: Experiment, found: Slowness) -> str:
    """Describes the verdict, for people."""
    suspect, partner = experiment.suspect.rank, experiment.partner.rank
    if found.machine_ratio is None or found.place_ratio is None:
        return f"node {suspect} and node {partner} have exchanged their places, and nothing was measured"
    verdict = {
        SlowCause.MACHINE: "it is the machine",
        SlowCause.PLACE: "it is the work of the rank",
        SlowCause.NEITHER: "neither is slow since",
    }.get(found.cause or SlowCause.UNKNOWN, "no verdict")
    sure = f"p <= {found.p_value:.2g}, " if found.p_value is not None else ""
    return (
        f"at the place of node {partner}, node {suspect} computes {found.machine_ratio:.2f} times as long as the "
        f"others, and node {partner} at its place {found.place_ratio:.2f} times: {verdict} ({sure}"
        f"{found.measurements} measurements)"
    )


def _ratios(state: RoleInJob, experiment: Experiment) -> list[tuple[float, float]]:
    """How many times as long as the others the suspect, and the node that has its place, compute in each
    measurement."""
    world = state.world
    times = {
        one.rank: one.computes
        for node in state.members
        if world is not None and node.step_times_in == world.generation
        for one in node.step_times
    }
    if world is None or len(times) < world.processes:
        return []
    suspect, partner = (
        world.members[node.rank].base_rank + experiment.local_rank for node in (experiment.suspect, experiment.partner)
    )
    others = [computes for rank, computes in times.items() if rank not in (suspect, partner)]
    found: list[tuple[float, float]] = []
    for at in range(min(map(len, times.values()))):
        usual = median(computes[at] for computes in others)
        found.append((_ratio(times[suspect][at], usual), _ratio(times[partner][at], usual)))
    return found


def _favored(machine: float, place: float, before: float) -> SlowCause | None:
    """The cause that one measurement favors; None where both are slow. A rank is slow if at least half of what it
    computed longer before is left."""
    bar = 1 + (before - 1) / 2
    match machine >= bar, place >= bar:
        case True, True:
            return None
        case True, False:
            return SlowCause.MACHINE
        case False, True:
            return SlowCause.PLACE
        case _:
            return SlowCause.NEITHER


def _ratio(compute: float, usual: float) -> float:
    return compute / max(usual, 1e-6)
