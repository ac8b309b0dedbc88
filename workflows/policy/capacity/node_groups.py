"""Replaces nodes together that belong together, such as those of one rack: `roles.<name>.node_group`.

Only members of the world that broke are concerned: nodes that are still starting have no ranks that miss the others.
"""

from __future__ import annotations

from datetime import datetime

from perdure.contract import Evidence, EvidenceSource, NodePhase
from perdure.spec.job import JobSpec
from perdure.workflows.policy.record import incidents
from perdure.workflows.policy.state.job import RoleInJob
from perdure.workflows.policy.world import succession


def replace_whole(state: RoleInJob, job: JobSpec, now: datetime) -> RoleInJob:
    """Gives up the other nodes of each group of which a member was lost."""
    size, world = job.roles[state.role].node_group, state.world
    if size == 1 or world is None or state.interruption is None:
        return state
    members = [node for rank in sorted(world.members) if state.is_member(node := state.nodes[rank])]
    lost = {node.rank // size: node for node in reversed(members) if node.phase is NodePhase.LOST}
    for node in members:
        if node.alive and (cause := lost.get(node.rank // size)) is not None:
            text = f"replaced with node {cause.rank}, with which it is in a group (node_group: {size})"
            evidence = Evidence(time=now, source=EvidenceSource.AGENT, rank=node.rank, text=text)
            state = incidents.add_evidence(state, evidence, now=now)
            state = succession.dismiss(state, node, job, now, phase=NodePhase.LOST, reason=text, failed_starts=0)
    return state
