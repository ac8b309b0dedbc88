"""No two generations train at once: nodes enter a world when the ranks that had their places before have ended.

A node that is given up may still save a checkpoint, or run unseen on a machine that does not answer. These report or
presume its end:

| what is reported | by whom |
|-|-|
| its processes have ended | its backend's watch, its own agent, or the deletion, which returns when nothing runs |
| its machine is silent | Kubernetes, whose deletion then returns, too |
| nothing, for `limits.termination_grace_period` and `timing.processes.presumed_gone` | the job's timer |

Who waits for it depends on why it is given up:

| why | who waits |
|-|-|
| a request: relaunch, scale down, suspend | the whole job, as any member of the next world may get its ranks |
| a verdict on a failure | its replacement only; the others of an elastic job continue with fewer nodes at once |
| its command ended while the world did not include it | its replacement only |

After a request every machine answers as far as is known: the wait is as long as the processes take to end, usually less
than a second. A node that a verdict gives up on is silent. It can report no end, so waiting for it would always take
until it is presumed gone, and it gains nothing from the time: its ranks cannot step without the others, and it cannot
be asked to save.

A node whose end is known, whose ranks have finished, or that was never in a world, delays nothing.
"""

from __future__ import annotations

from datetime import datetime, timedelta

from perdure.contract import NodePhase, World
from perdure.contract.transitions import NodeLost, NodeRemoved
from perdure.spec.job import JobSpec
from perdure.workflows.policy.record import incidents
from perdure.workflows.policy.state.job import RoleInJob
from perdure.workflows.policy.state.node import LeavingNode, NodeState


def drop(state: RoleInJob, node: NodeState, **changes: object) -> NodeState:
    """Gives up a node although nothing proves that its processes have ended."""
    was_in_a_world = state.is_member(node) or node.left_world or max(node.commanded, node.stepping) > 0
    return node.replace(may_still_run=was_in_a_world and not node.ranks_ended, **changes)


def dismiss(state: RoleInJob, node: NodeState, job: JobSpec, now: datetime, **changes: object) -> RoleInJob:
    """Gives up a node on request: no world is formed while its ranks may run."""
    dropped = drop(state, node, since=now, **changes)
    ranks_are_over = state.between_stages or state.has_finished(node) or node.ended
    state = state.with_node(dropped)
    if not dropped.may_still_run or ranks_are_over:
        return state
    leaving = LeavingNode(rank=node.rank, incarnation=node.incarnation, until=now + patience(job))
    return state.replace(leaving=(*state.leaving, leaving))


def leave_out(state: RoleInJob, formed: World) -> RoleInJob:
    """Updates the nodes that leave the current world, before a new one is sent out."""
    for node in state.members:
        if node.alive and node.rank not in formed.members:
            state = state.with_node(node.replace(left_world=True))
    return state


def reason_of_successor(node: NodeState) -> str:
    """Returns why the next incarnation is not ready yet: the node that it replaces is gone, or could not be created."""
    return f"replaces: {node.reason}" if node.reason and node.uncreated_since is None else node.reason


def succeed(state: RoleInJob, older: NodeState | None, newer: NodeState, job: JobSpec, now: datetime) -> NodeState:
    """Returns a new incarnation, with its predecessor if it must wait for that."""
    if older is None:
        return newer
    predecessor, until = older.predecessor, older.predecessor_until
    if older.may_still_run:
        predecessor, until = older.incarnation, older.since + patience(job)
    if until is None or now >= until:
        return newer
    return newer.replace(predecessor=predecessor, predecessor_until=until)


def observe_end(state: RoleInJob, end: NodeLost | NodeRemoved) -> RoleInJob:
    """Records that an incarnation has ended, whether or not the job still counts on it."""
    node = state.nodes.get(end.rank)
    if node is not None and node.incarnation == end.incarnation and isinstance(end, NodeRemoved) and end.left:
        node = node.replace(left=end.left)
        state = state.with_node(node)
    if node is None or (isinstance(end, NodeRemoved) and not end.certain):
        return state
    state = state.replace(leaving=tuple(one for one in state.leaving if one.key != end.key))
    if node.predecessor == end.incarnation:
        return state.with_node(node.replace(predecessor=0, predecessor_until=None))
    if node.incarnation == end.incarnation and node.may_still_run:
        return state.with_node(node.replace(may_still_run=False))
    return state


def presume_ends(state: RoleInJob, now: datetime) -> RoleInJob:
    """Stops waiting for ends that nothing has reported in time."""
    for one in state.leaving:
        if now >= one.until:
            text = f"nothing proved that incarnation {one.incarnation} of node {one.rank} has ended: presumed gone"
            state = incidents.waits(state, text)
    if state.leaving:
        state = state.replace(leaving=tuple(one for one in state.leaving if now < one.until))
    for node in waiting_nodes(state):
        if node.predecessor_until is not None and now >= node.predecessor_until:
            text = f"nothing proved that incarnation {node.predecessor} of node {node.rank} has ended: presumed gone"
            state = incidents.waits(state, text)
            state = state.with_node(node.replace(predecessor=0, predecessor_until=None))
    return state


def hold(state: RoleInJob) -> RoleInJob:
    """Records that a world is possible and waits for nodes that leave."""
    return incidents.waits(state, why_held(state))


def why_held(state: RoleInJob) -> str:
    """Describes, for people, which leaving nodes the next world waits for, and until when; empty where it waits for
    none."""
    if not state.leaving or (state.world is not None and state.interruption is None):
        return ""
    first, *others = sorted(state.leaving, key=lambda one: one.rank)
    more = f" and {len(others)} more" if others else ""
    until = max(one.until for one in state.leaving)
    return (
        f"waits until incarnation {first.incarnation} of node {first.rank}{more}, whose ranks may still save, has ended"
        f", at most until {until:%H:%M:%S} UTC"
    )


def waiting_nodes(state: RoleInJob) -> list[NodeState]:
    """Nodes that may enter no world yet because of their predecessors."""
    return [node for node in state.nodes.values() if node.predecessor and node.alive]


def why_waiting(node: NodeState) -> str:
    """Describes, for people, what a node of `waiting_nodes` waits for, and until when."""
    until = f", at most until {node.predecessor_until:%H:%M:%S} UTC" if node.predecessor_until else ""
    return f"waits until incarnation {node.predecessor} has ended{until}"


def describe(node: NodeState) -> NodeState:
    """Returns the node with its wait as the reason, if it waits for nothing else."""
    if node.predecessor and node.alive and node.phase in (NodePhase.JOINED, NodePhase.READY):
        return node.replace(reason=why_waiting(node))
    return node


def patience(job: JobSpec) -> timedelta:
    """The time after which an incarnation is presumed gone if nothing reports its end."""
    return job.limits.termination_grace_period + job.timing.processes.presumed_gone
