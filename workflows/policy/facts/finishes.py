"""All ranks of a node have ended with 0: a fact about its world, or about a command that needs none."""

from __future__ import annotations

from datetime import datetime

from perdure.contract import Finished, NodePhase
from perdure.workflows.policy.facts.agent_messages import accept_message, take_progress
from perdure.workflows.policy.state.job import RoleInJob


def on_finished(state: RoleInJob, finished: Finished, now: datetime) -> RoleInJob:
    """Takes in that all ranks of a node have ended with 0."""
    known = accept_message(state, finished, now)
    if known is None:
        return state
    state, node = known
    world, ended = state.world, not finished.command_runs
    if world is not None and state.is_member(node) and finished.generation == world.generation:
        node = node.replace(
            finished=finished.generation,
            ended=node.ended or ended,
            catching_up=node.catching_up and not ended,
        )
        return take_progress(state.with_node(node), finished.progress)
    outside = world is None or state.between_stages or not state.is_member(node)
    if not ended or not outside:
        return state
    # The command has nothing more to do. A world that the node is not a member of is not affected.
    text = "its command has ended with 0"
    return state.with_node(node.replace(ended=True, catching_up=False, phase=NodePhase.JOINED, since=now, reason=text))
