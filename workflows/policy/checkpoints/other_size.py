"""States that only a world of one size can load: values in them differ between ranks, and cannot be split anew.

The ranks of a world of another size report it and wait. The job forms a world of that size as soon as there are nodes
for it, and none of another one: that would begin below a state that is still there. It says nothing about the script,
so nothing is charged. What ends the wait is `recovery.replace_timeout`, as for any world that lacks nodes.
"""

from __future__ import annotations

from datetime import datetime

from perdure.base.words import count
from perdure.contract import AwaitNodes, CheckpointRef, Evidence, EvidenceSource, NewWorld, Restore, RestoreSource, Stop
from perdure.spec.job import JobSpec
from perdure.workflows.policy.record import incidents
from perdure.workflows.policy.repair import actions
from perdure.workflows.policy.repair.case import Rejected, Verdict
from perdure.workflows.policy.state.checkpoint import BoundState
from perdure.workflows.policy.state.job import RoleInJob
from perdure.workflows.policy.state.role import Interruption

_RULE = 'checkpoints/2 "only a world of another size can load the state: wait for its nodes"'


def refuse(state: RoleInJob, restored: Restore, *, rank: int, time: datetime, job: JobSpec, now: datetime) -> RoleInJob:
    """Takes in that the ranks of the current world cannot load a state.

    Args:
        state: The role.
        restored: What its ranks have found.
        rank: The node (slot) that reports it.
        time: When.
        job: The job's specification.
        now: The time.
    """
    world, ranks = state.world, restored.of_ranks
    if world is None or ranks is None or state.between_stages:
        return state
    bound = _bound(state, restored, ranks)
    if state.interruption is not None:
        # The next world is due for another reason, and is of that size.
        return state.replace(checkpoints=state.checkpoints.replace(bound=bound))
    place = "storage" if restored.source is RestoreSource.STORAGE else "memory"
    text = f"step {restored.step:,} in {place} was not loaded: {restored.refused}"
    state = incidents.add_evidence(
        state, Evidence(time=time, source=EvidenceSource.AGENT, rank=rank, text=text), now=now
    )
    state = state.replace(checkpoints=state.checkpoints.replace(bound=bound))
    if bound.nodes is None or (bound.nodes > state.nodes_max and _is_another_runs(state, restored.checkpoint)):
        return actions.apply(state, _stop(bound), now)
    title = f"the state of step {bound.step:,} is of {count(ranks, 'rank')}: waits for {count(bound.nodes, 'node')}"
    verdict = Verdict(
        rule=_RULE,
        title=title,
        actions=(AwaitNodes(patience=job.recovery.replace_timeout),),
        rejected=(Rejected(NewWorld(reason="begin anew"), "the state would be lost, and it is still there"),),
    )
    interruption = Interruption(since=now, requested=title, actions=verdict.actions)
    return actions.apply(state.replace(interruption=interruption), verdict, now)


def needed_nodes(state: RoleInJob) -> int | None:
    """The number of nodes that the next world must have to load the state; None where any size can."""
    bound = state.checkpoints.bound
    return bound.nodes if bound is not None else None


def why_needed(state: RoleInJob) -> str:
    """Why it must have as many nodes, as the end of a sentence; empty where any size can load the state."""
    bound = state.checkpoints.bound
    if bound is None or bound.nodes is None:
        return ""
    advice = f", more than nodes allows now: `perdure scale {bound.nodes}`" if bound.nodes > state.nodes_max else ""
    return f"the state of step {bound.step:,} needs {count(bound.nodes, 'node')}{advice} ({bound.problem})"


def forget(state: RoleInJob) -> RoleInJob:
    """A user has decided to continue without that state."""
    return state.replace(checkpoints=state.checkpoints.replace(bound=None))


def end_memory(state: RoleInJob) -> RoleInJob:
    """Records that all nodes end, and with them what they have in memory: where nothing is stored, nothing is left that
    would be bound to a size. A world whose ranks find the state nevertheless reports it again."""
    known = state.checkpoints
    return state if known.bound is None or known.stored or known.durable is not None else forget(state)


def loaded(state: RoleInJob, generation: int) -> RoleInJob:
    """Records that a world has loaded a state: if it has another size, the state is no longer bound to one."""
    bound, world = state.checkpoints.bound, state.world
    if bound is None or world is None or generation != world.generation or world.processes == bound.ranks:
        return state
    return state.replace(checkpoints=state.checkpoints.replace(bound=None))


def _bound(state: RoleInJob, restored: Restore, ranks: int) -> BoundState:
    """The state, with the number of nodes that have as many ranks; None where no number has."""
    world = state.world
    of_node = {member.processes for member in world.members.values()} if world is not None else set[int]()
    each = of_node.pop() if len(of_node) == 1 else 0
    nodes = ranks // each if each and ranks % each == 0 and ranks // each % state.unit == 0 else None
    return BoundState(step=restored.step, ranks=ranks, nodes=nodes, problem=restored.refused)


def _is_another_runs(state: RoleInJob, checkpoint: CheckpointRef | None) -> bool:
    return checkpoint is not None and checkpoint.run != state.uid


def _stop(bound: BoundState) -> Verdict:
    """Stops a job that can never have a world of that size."""
    title = f"the state of step {bound.step:,} is of {count(bound.ranks, 'rank')}"
    nodes = f"; submit the job with nodes: {bound.nodes}" if bound.nodes is not None else ""
    return Verdict(
        rule='checkpoints/3 "no world of this job can load the state: stop"',
        title=title,
        actions=(Stop(reason=f"{title}, and this job has no world of that size: {bound.problem}{nodes}", exit_code=1),),
        rejected=(Rejected(AwaitNodes(), "no node is due that would give the world this size"),),
    )
