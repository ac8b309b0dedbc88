"""Verifies what a node reports against what is known of it: a node speaks for its own ranks and worlds only.

A wrong claim is cut or becomes unknown, and is counted: the report itself is what else it says, and is never dropped.
Agents verify what ranks and launchers tell them, and jobs what agents tell them, since a machine that joined may run
any program in an agent's place.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from perdure.contract.agents import MOST_EXITS, UNKNOWN_RANK, Failure, FailureKind, RankExit
from perdure.contract.base import shorten

if TYPE_CHECKING:
    # Agents verify exits without a job's state, and start sooner without its models.
    from perdure.workflows.policy.state.job import RoleInJob
    from perdure.workflows.policy.state.node import NodeState

MOST_AHEAD = 10_000
"""Generations by which a node can be ahead of its job. One that was reset has lost the worlds of its last run, whose
history has room for fewer."""

MOST_AHEAD_OF_SERVICE = 1_000_000
"""Generations by which a node can be ahead of a store or a dataset, which learns of none before it is used."""


def own_exits(
    exits: Sequence[RankExit], *, first_ranks: Collection[int], processes: int
) -> tuple[tuple[RankExit, ...], int]:
    """Verifies the ends of ranks that a node reports.

    Args:
        exits: What it reports.
        first_ranks: The global ranks of its first rank, in the worlds that it may report about; none: a global rank
            cannot be verified, and stays as it is.
        processes: The number of its ranks.

    Returns:
        No more ends than the node has ranks; ranks that are not its own are unknown. And the number of wrong claims.
    """
    wrong = max(len(exits) - processes, 0)
    own: list[RankExit] = []
    for one in exits[:processes]:
        exists = 0 <= one.local_rank < processes
        placed = one.global_rank is None or not first_ranks or one.global_rank - one.local_rank in first_ranks
        if exists and placed:
            own.append(one)
            continue
        wrong += 1
        local_rank = one.local_rank if exists else UNKNOWN_RANK
        own.append(replace(one, local_rank=local_rank, global_rank=None))
    return tuple(own), wrong


def verify_failure(state: RoleInJob, node: NodeState, failure: Failure) -> tuple[RoleInJob, Failure]:
    """Returns the state with the wrong claims of a failure counted, and the failure without them."""
    # Ranks that started without Perdure's rendezvous have no place in a world.
    reported = () if failure.kind is FailureKind.UNPROTECTED else failure.ranks
    member = state.world.members.get(node.rank) if state.world is not None else None
    processes = max(member.processes if member else 1, node.processes)
    known = {member.base_rank} if member else set[int]()
    if (before := state.first_ranks_before.get(node.rank)) is not None:
        known.add(before)
    exits, wrong = own_exits(reported, first_ranks=known, processes=processes)
    if wrong:
        failure = failure.replace(ranks=exits)
    if wrong := wrong + min(max(failure.wrong_claims, 0), MOST_EXITS):
        state = count(state, f"node {node.rank} has reported the end of ranks that it does not have", wrong)
    return state, failure


def remember_ranks(state: RoleInJob) -> RoleInJob:
    """Keeps where the ranks of a world were that another one follows: nodes may still report their ends."""
    if state.world is None:
        return state
    return state.replace(first_ranks_before={rank: one.base_rank for rank, one in state.world.members.items()})


def may_report_restore(state: RoleInJob, node: NodeState, generation: int) -> bool:
    """Whether the node can have rank 0 in this generation, which reports for all ranks with what they continue."""
    if state.world is None or generation > state.generation:
        return False
    if generation == state.world.generation:
        return node.rank in state.world.members and state.world.members[node.rank].base_rank == 0
    return state.first_ranks_before.get(node.rank, 0) == 0


def is_possible(state: RoleInJob, generation: int) -> bool:
    """Whether a node can be in this generation."""
    return generation <= state.generation + MOST_AHEAD


def why_beyond(generation: int, *, newest: int) -> str:
    """Why a service of the job refuses a generation; empty if a node can be in it.

    Args:
        generation: What a node says.
        newest: The newest that the service knows.
    """
    if generation <= newest + MOST_AHEAD_OF_SERVICE:
        return ""
    return f"generation {shorten(str(generation), 30)} is not one of this job, whose newest one known here is {newest}"


def count(state: RoleInJob, text: str, number: int = 1) -> RoleInJob:
    """Counts wrong claims.

    Args:
        state: The job.
        text: Who has claimed what, for users.
        number: How many they are.
    """
    return state.replace(wrong_claims=state.wrong_claims + number, last_wrong_claim=text)
