"""Names the nodes that probably hang, where ranks only report that another rank did not come.

A rank that hangs reports nothing: the others time out while they wait for it. So those that report no failure of their
own are suspected, and those that stopped stepping before the others. Both are signs and not proofs: a rank that is
killed before its own timeout reports nothing, either. A suspicion is shown, and never called a finding.
"""

from __future__ import annotations

from collections.abc import Iterable
from datetime import timedelta

from perdure.contract import Member, Suspect
from perdure.workflows.policy.state.job import RoleInJob
from perdure.workflows.policy.state.node import NodeState
from perdure.workflows.policy.state.role import Interruption

_BEFORE_THE_OTHERS = timedelta(seconds=2)
"""By how much earlier than that of another node a last step must have been, to count: agents sample twice a second."""

_NAMED = 8


def suspects_of(state: RoleInJob, interruption: Interruption) -> tuple[Suspect, ...]:
    """The nodes of the current world that probably hang; empty where the reports single out none."""
    world = state.world
    if world is None:
        return ()
    failed = {rank for failure in interruption.failures for rank in failure.ranks}
    waited = {failure.rank: bool(failure.ranks) for failure in interruption.failures}
    left = {rank: _ranks_of(member) - failed for rank, member in world.members.items()}
    stopped_first = _stopped_first(state.stalled)
    silent = [node.rank for node in state.members if node.rank not in waited]
    # Where every node reports, a rank that does not is one that hangs, or that torchrun ended with the first of them.
    named = silent or [rank for rank, ranks in left.items() if ranks and waited.get(rank)]
    if stopped_first and (both := [rank for rank in named if rank in stopped_first]):
        named = both
    named = named or sorted(stopped_first)
    if not named or len(named) == len(world.members) > 1:
        return ()
    return tuple(
        Suspect(rank=rank, ranks=tuple(sorted(left[rank])), stalled_first=rank in stopped_first)
        for rank in sorted(named)
    )


def suspected_again(state: RoleInJob, suspects: tuple[Suspect, ...]) -> int | None:
    """The only suspect, if it was the only one of the last interruption as well; None otherwise."""
    over = (one for one in reversed(state.own_incidents) if one.observation is None and one.over_at is not None)
    last = next(over, None)
    if last is None or len(suspects) != 1 or [one.rank for one in last.suspects] != [suspects[0].rank]:
        return None
    return suspects[0].rank


def names(suspects: tuple[Suspect, ...]) -> str:
    """`node 1`, or `nodes 1, 3, 4`."""
    shown = ", ".join(str(one.rank) for one in suspects[:_NAMED])
    more = f" and {len(suspects) - _NAMED} more" if len(suspects) > _NAMED else ""
    return f"node{'s' if len(suspects) > 1 else ''} {shown}{more}"


def without(suspects: tuple[Suspect, ...], rank: int, failed: Iterable[int]) -> tuple[Suspect, ...]:
    """The suspects after a late report: ranks that timed out themselves are no longer suspected."""
    gone = set(failed)
    left = (
        one.replace(ranks=tuple(number for number in one.ranks if number not in gone)) if one.rank == rank else one
        for one in suspects
    )
    return tuple(one for one in left if one.ranks or one.rank != rank)


def _ranks_of(member: Member) -> set[int]:
    return set(range(member.base_rank, member.base_rank + member.processes))


def _stopped_first(stalled: tuple[NodeState, ...]) -> set[int]:
    """The stalled nodes whose last step was before that of others."""
    times = {node.rank: node.stalled_since for node in stalled if node.stalled_since and not node.stalled_at_start}
    if not times:
        return set()
    newest = max(times.values())
    return {rank for rank, time in times.items() if newest - time >= _BEFORE_THE_OTHERS}
