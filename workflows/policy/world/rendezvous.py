"""Forms worlds: which nodes are members, with which ranks, and which of them serves the store.

A survivor keeps its rank wherever the new world has that rank, so that its data in memory and on disk stays useful; the
others fill the holes in the order of their slots. In a role that serves, whose processes continue in the next world
with the rank that they were started with, the rank is the slot: there may be holes.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta

from perdure.contract import CheckpointRef, KnownStates, Member, UnsoundSteps, World
from perdure.spec.network import FEWEST_PORTS, Network, read_ports
from perdure.workflows.policy.state.node import NodeState

_PORTS_REMEMBERED = 64


@dataclass(frozen=True)
class StoreChoice:
    """The address that the next generation's store is served from."""

    rank: int
    address: str
    port: int


def usable(count: int, *, minimum: int, maximum: int, unit: int) -> int:
    """The number of `count` nodes that a world may have: whole units, at most `maximum`; 0 where that is below
    `minimum`."""
    size = min(count, maximum) // unit * unit
    return size if size >= minimum else 0


def choose_members(candidates: Iterable[NodeState], size: int, previous: World | None) -> list[int]:
    """The ranks (slots) of the next world: members of the current one first, then the lowest."""
    current = previous.members if previous else {}
    return sorted(sorted((node.rank for node in candidates), key=lambda rank: (rank not in current, rank))[:size])


def assign_group_ranks(ranks: list[int], previous: World | None, *, exchanged: Sequence[int] = ()) -> dict[int, int]:
    """Group ranks 0..n-1 by slot; a member of the previous world keeps its own where it is below n, or has that of the
    other one of two that exchange theirs."""
    size = len(ranks)
    before = {rank: member.group_rank for rank, member in previous.members.items()} if previous else {}
    if len(exchanged) == 2 and set(exchanged) <= set(ranks) & set(before):
        one, other = exchanged
        before |= {one: before[other], other: before[one]}
    kept = {rank: before[rank] for rank in ranks if before.get(rank, size) < size}
    free = iter(sorted(set(range(size)) - set(kept.values())))
    return {rank: kept[rank] if rank in kept else next(free) for rank in ranks}


def choose_store(nodes: Mapping[int, NodeState], group_ranks: Mapping[int, int]) -> StoreChoice | None:
    """A port that no generation has used, on the member with the lowest group rank that has one.

    The first rank's own node is preferred: its store calls stay local.
    """
    for rank in sorted(group_ranks, key=lambda rank: group_ranks[rank]):
        node = nodes[rank]
        if node.store_ports and node.reachable:
            return StoreChoice(rank=rank, address=node.address, port=node.store_ports[0])
    return None


def ports_remembered(network: Network) -> int:
    """The number of a node's last ports that are not used again. With few ports it is small, since all are reused in
    turn."""
    if network.store_ports is None:
        return _PORTS_REMEMBERED
    return min(_PORTS_REMEMBERED, len(read_ports(network.store_ports)) // FEWEST_PORTS)


def form_world(
    nodes: Mapping[int, NodeState],
    ranks: list[int],
    *,
    generation: int,
    previous: World | None,
    restarted: Collection[int] = (),
    stage: int = 0,
    first_step: timedelta | None = None,
    distrusted_checkpoints: tuple[CheckpointRef, ...] = (),
    unsound: UnsoundSteps | None = None,
    script_failures: tuple[int, ...] = (),
    known: KnownStates | None = None,
    exchanged: Sequence[int] = (),
    measurements: int = 0,
    pace_over: timedelta | None = None,
    keeps_processes: bool = False,
    serves: bool = False,
) -> World | None:
    """Forms the next world; returns None while no member offers a port for its store.

    Args:
        nodes: All known nodes, by slot.
        ranks: The slots of the members.
        generation: The number of the new world.
        previous: The world that it follows.
        restarted: Slots whose command must be started again to enter it.
        stage: The torchrun of the command that it is for, from 0.
        first_step: The time that its ranks have to make their first step; None for no limit.
        distrusted_checkpoints: Those in the job's storage that its ranks do not load.
        unsound: The saved states that its ranks do not load; None for none.
        script_failures: The generations that the script's own failures have ended.
        known: The saved states of which the job knows.
        exchanged: Two slots that exchange their places; empty for none.
        measurements: The measurements of steps that its nodes report in any case.
        pace_over: The time of steps over which its speed is measured; None where it is not.
        keeps_processes: Whether processes that run continue in it.
        serves: Whether it is a role's whose processes serve others, and have the rank of their slot for life.
    """
    group_ranks = {rank: rank for rank in ranks} if serves else assign_group_ranks(ranks, previous, exchanged=exchanged)
    store = choose_store(nodes, group_ranks)
    if store is None:
        return None
    members: dict[int, Member] = {}
    base = 0
    for rank in sorted(ranks, key=lambda rank: group_ranks[rank]):
        processes = nodes[rank].processes
        base = rank * processes if serves else base
        members[rank] = Member(
            incarnation=nodes[rank].incarnation,
            group_rank=group_ranks[rank],
            base_rank=base,
            processes=processes,
            restart_command=rank in restarted,
        )
        base += processes
    return World(
        generation=generation,
        members=members,
        nodes=len(members),
        processes=sum(member.processes for member in members.values()),
        store_address=store.address,
        store_port=store.port,
        store_rank=store.rank,
        stage=stage,
        first_step=first_step,
        distrusted_checkpoints=distrusted_checkpoints,
        unsound=unsound,
        script_failures=script_failures,
        known=known,
        measurements=measurements,
        pace_over=pace_over,
        keeps_processes=keeps_processes,
    )
