"""Gives up nodes that a role has requested to train with more of them, and that do not come.

The world trains meanwhile, so nothing is lost but the choice: a role that waited for a number of nodes that never
becomes free would try no other one. What did not come is requested again, after pauses that grow.
"""

from __future__ import annotations

from datetime import datetime, timedelta
from math import lcm

from perdure.base.words import do
from perdure.contract import Evidence, EvidenceSource, Resized
from perdure.spec.durations import format_duration
from perdure.spec.roles import Role
from perdure.workflows.policy.record import observations
from perdure.workflows.policy.state.job import RoleInJob
from perdure.workflows.policy.state.scaling import MissedNodes

LONGEST_PAUSE = timedelta(hours=4)
"""The longest time before nodes that did not come are requested again."""

_MOST_DOUBLINGS = 20
"""More of them would make any pause the longest one, and lie beyond what a duration holds."""


def note_arrival(state: RoleInJob) -> RoleInJob:
    """Takes in that the requested nodes train."""
    known, world = state.scaling, state.world
    if world is None or not state.stepped:
        return state
    if known.missed is not None and world.nodes >= known.missed.nodes:
        known = known.replace(missed=None)
    if known.awaited_since is not None and world.nodes >= state.nodes_max:
        known = known.replace(awaited_since=None)
    return state.replace(scaling=known)


def end_of_wait(state: RoleInJob, role: Role) -> datetime | None:
    """The time at which nodes that have not come are given up; None where none are awaited.

    Nodes that have come begin the wait for the others again.
    """
    since = state.scaling.awaited_since
    if since is None:
        return None
    return max(since, state.world_decided_at or since) + role.scaling.patience


def next_look(state: RoleInJob, role: Role) -> datetime | None:
    """The time at which nodes are given up, or may be requested again."""
    missed = state.scaling.missed
    return end_of_wait(state, role) or (None if missed is None else missed.until)


def available(sizes: range, state: RoleInJob, now: datetime) -> range:
    """The numbers of nodes without those that lately did not come."""
    missed = state.scaling.missed
    if missed is None or now >= missed.until:
        return sizes
    return range(sizes.start, min(sizes.stop, missed.nodes), sizes.step)


def places(state: RoleInJob, nodes: int) -> int:
    """The places (slots) that a world of so many nodes needs: those of the present world are not always the first."""
    world = state.world
    return max(nodes, max(world.members) + 1) if world is not None and nodes == world.nodes else nodes


def give_up(state: RoleInJob, role: Role, now: datetime) -> RoleInJob:
    """Requests no more nodes than the world has, if those that are awaited did not come in time."""
    known, world, end = state.scaling, state.world, end_of_wait(state, role)
    if world is None or known.awaited_since is None or end is None or now < end:
        return state
    fewest = world.nodes + lcm(state.unit, role.node_group)
    again_in_a_row = known.missed is not None and world.nodes < known.missed.nodes
    times = known.missed.times + 1 if known.missed is not None and again_in_a_row else 1
    until = now + min(2 ** min(times, _MOST_DOUBLINGS) * role.scaling.patience, LONGEST_PAUSE)
    # Only a world that was formed is a try.
    formed = state.world_decided_at is not None and state.world_decided_at >= known.awaited_since
    tries = known.tries if formed else max(known.tries - 1, 0)
    wanted, kept = state.nodes_max, places(state, world.nodes)
    why = next(
        (f"node {n.rank}: {n.reason}" for n in state.nodes.values() if n.alive and n.reason and not state.is_member(n)),
        "their agents have not reported",
    )
    since = f"requested at {known.awaited_since:%H:%M:%S} UTC"
    state = observations.observe_missed_nodes(
        state,
        f"{wanted} nodes were requested and {world.nodes} {do(world.nodes, 'train')}: the others did not come "
        f"within {format_duration(role.scaling.patience)}",
        Evidence(time=now, source=EvidenceSource.BACKEND, text=f"{wanted} nodes, {since}, did not come; {why}"),
        since=known.awaited_since,
        again=until,
        now=now,
    )
    return state.replace(
        nodes_max=kept,
        ready_since=None,
        request_reasons={rank: why for rank, why in state.request_reasons.items() if rank < kept},
        scaling=known.replace(
            awaited_since=None,
            missed=MissedNodes(nodes=fewest, times=times, until=until),
            tries=tries,
            began_at=known.began_at if tries else None,
        ).with_resized(Resized(time=now, before=wanted, after=kept, is_try=False, gave_up=True)),
    )
