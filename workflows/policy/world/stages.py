"""The torchruns of a command, one after another: each is a *stage* of the job, with worlds of its own.

A stage is complete when all ranks of one world have finished. Then the job only follows the commands: each of them
continues with other work (an upload, an evaluation), requests the next stage's world, or ends. The job has succeeded
when each command has ended with 0. Only `limits.active_deadline` limits how long a command works between and after its
torchruns.

A command that starts over (a replacement, or one that failed) begins with its first torchrun. Its torchruns of complete
stages end with 0 at once, so a node takes part again when it has caught up with the others.
"""

from __future__ import annotations

from collections.abc import Iterable
from datetime import datetime

from perdure.base.words import count
from perdure.contract import JobPhase, NodePhase, RestartCommands
from perdure.spec.job import JobSpec
from perdure.workflows.policy.diagnosis.interruptions import record_command_failure
from perdure.workflows.policy.record import incidents
from perdure.workflows.policy.repair import memory
from perdure.workflows.policy.state.job import Outcome, RoleInJob
from perdure.workflows.policy.state.node import NodeState

_ON_ITS_WAY = (NodePhase.REQUESTED, NodePhase.PENDING, NodePhase.CREATED)


def advance(state: RoleInJob, now: datetime) -> RoleInJob:
    """Completes the stage if all ranks of its world have finished, and the role if all commands have ended."""
    world = state.world
    if world is not None and state.finished and state.complete_generation < world.generation:
        state = incidents.abandon(
            state.replace(complete_generation=world.generation, stages_complete=world.stage + 1), now, "finished"
        )
        state = memory.forget_all(state, RestartCommands)
        for node in state.members:
            if node.alive and not node.ended:
                # Its torchrun exits; the node is ready again when the next torchrun requests a world.
                joined = node.replace(phase=NodePhase.JOINED, since=now, reason="", failed=None)
                state = state.with_node(joined)
                if node.failed is not None:
                    state = record_command_failure(state, node.failed, now)
    return _succeed(state, now) if _all_ended(state) else state


def working_nodes(state: RoleInJob) -> tuple[NodeState, ...]:
    """Reachable nodes whose command runs and has not requested a world of the current stage."""
    return tuple(node for node in _nodes(state) if node.reachable and _works(state, node))


def silent_nodes(state: RoleInJob) -> tuple[NodeState, ...]:
    """Unreachable nodes whose command is not known to have ended."""
    return tuple(node for node in _nodes(state) if not node.reachable and not node.ended)


def awaits_nodes(state: RoleInJob) -> bool:
    """Whether nodes may still become ready."""
    nodes = [state.nodes.get(rank) for rank in range(state.nodes_max)]
    return any(
        node is None
        or (not node.alive and not node.ended)
        or (node.alive and node.predecessor)
        or node.phase in _ON_ITS_WAY
        for node in nodes
    )


def at_stage(state: RoleInJob, node: NodeState) -> bool:
    """Whether the node is ready for a world of the current stage."""
    return node.phase is NodePhase.READY and node.stage >= state.stages_complete and not node.ended


def restart_commands(state: RoleInJob, ranks: Iterable[int]) -> RoleInJob:
    """Restarts commands between two worlds, and disturbs no other."""
    for rank in ranks:
        node = state.nodes[rank]
        if node.alive and not node.ended:
            state = state.with_node(node.replace(command_restarts=node.command_restarts + 1, catching_up=True))
    return state


def has_recovered(state: RoleInJob) -> bool:
    """Whether all commands that failed between two worlds have caught up with the others."""
    lost = any(not node.alive and not node.ended for node in state.members)
    return not lost and not any(node.catching_up for node in _nodes(state))


def is_done(state: RoleInJob, node: NodeState) -> bool:
    """Whether the node needs no successor if it is lost: its command has ended with 0, or the others still train and no
    longer need its ranks."""
    if state.is_member(node) and not state.between_stages:
        return state.interruption is None and state.has_finished(node)
    # In the first stage the others' world may still need the node, if it breaks.
    return node.ended and (state.world is None or state.between_stages or state.stages_complete > 0)


def complete_services(state: RoleInJob, job: JobSpec) -> frozenset[int]:
    """The nodes (slots) of a service whose process has ended with 0: the others need no process there any more."""
    if job.roles[state.role].ready is None:
        return frozenset()
    return frozenset(node.rank for node in state.nodes.values() if node.ended and node.rank < state.nodes_max)


def stop_if_commands_disagree(state: RoleInJob, now: datetime, *, ready_nodes: int) -> RoleInJob:
    """Stops a job whose commands disagree: some have ended with 0, and too few others request a world. Waiting would
    change nothing."""
    ended = sorted(node.rank for node in _nodes(state) if node.ended)
    if not ready_nodes or not ended or awaits_nodes(state) or working_nodes(state) or silent_nodes(state):
        return state
    count = "node" if len(ended) == 1 else "nodes"
    reason = (
        f"the command of {count} {', '.join(map(str, ended))} has ended with 0, and {ready_nodes} other"
        f"{'s ask' if ready_nodes > 1 else ' asks'} for torchrun {state.stages_complete + 1}: fewer than nodes.min = "
        f"{state.nodes_min}. Every node's command must start the same torchruns"
    )
    return state.stop(Outcome(phase=JobPhase.FAILED, exit_code=1, reason=reason, decided_at=now))


def describe(state: RoleInJob) -> str:
    """Describes, for people, the state of the commands between two worlds."""
    nodes = _nodes(state)
    done = f"torchrun {state.stages_complete} has finished"
    counts = (
        (sum(_works(state, node) for node in nodes), "at work"),
        (sum(at_stage(state, node) for node in nodes), f"ready for torchrun {state.stages_complete + 1}"),
        (sum(node.ended for node in nodes), "ended with 0"),
    )
    commands = ", ".join(f"{count} {what}" for count, what in counts if count)
    return f"{done}; commands: {commands}" if commands else done


def describe_command(state: RoleInJob, node: NodeState) -> str:
    """Describes, for people, a node's command without ranks; empty where its ranks or its rendezvous say more."""
    if node.ended:
        return "its command has ended with 0"
    if not state.between_stages or not node.alive or not _works(state, node):
        return ""
    return "its command starts over" if node.catching_up else "its command works without ranks"


def next_action(state: RoleInJob) -> str:
    """Describes what the job waits for between two worlds; empty where it does not wait for commands."""
    busy = working_nodes(state)
    if not busy:
        return ""
    behind = [node for node in busy if node.catching_up]
    if behind:
        return f"waits for node {behind[0].rank}, whose command was started again, to catch up with the others"
    names = f"node {busy[0].rank}" if len(busy) == 1 else f"{len(busy)} nodes"
    return f"waits for the command of {names} to end or to start another torchrun, for as long as that takes"


def _nodes(state: RoleInJob) -> tuple[NodeState, ...]:
    return tuple(node for node in state.nodes.values() if node.alive and node.rank < state.nodes_max)


def _works(state: RoleInJob, node: NodeState) -> bool:
    if node.ended or node.phase in _ON_ITS_WAY:
        return False
    return node.phase is not NodePhase.READY or node.stage < state.stages_complete


def _all_ended(state: RoleInJob) -> bool:
    world = state.world
    if world is None:
        # The nodes' current incarnations have run no torchrun, or the command starts none at all.
        nodes = [state.nodes.get(rank) for rank in range(state.nodes_max)]
        return all(node is not None and node.ended for node in nodes)
    if state.complete_generation < world.generation:
        return False
    kept = (state.nodes[rank] for rank in world.members if rank < state.nodes_max)
    others = (
        node for node in _nodes(state) if node.requested_world and node.phase in (NodePhase.JOINED, NodePhase.READY)
    )
    return all(node.ended for node in (*kept, *others))


def _succeed(state: RoleInJob, now: datetime) -> RoleInJob:
    world, stages = state.world, state.stages_complete
    if world is not None and stages <= 1:
        ranks = "its rank" if world.processes == 1 else f"all {world.processes:,} ranks"
        reason = f"{ranks} finished in generation {world.generation}"
    else:
        runs = f"{count(stages, 'torchrun')} finished" if stages else "it started no torchrun"
        reason = f"the command ended with 0 on every node; {runs}"
    return incidents.abandon(state, now, "finished").replace(completed=reason, interruption=None)
