"""Derives the desired state of each group of a role from the job's state, instead of storing it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeVar

from perdure.contract import (
    DesiredNode,
    GroupDesire,
    RoleAddresses,
)
from perdure.contract.names import group_index
from perdure.workflows.policy.checkpoints import commits, holds
from perdure.workflows.policy.repair import hold_on_failure
from perdure.workflows.policy.state.job import JobState, RoleInJob
from perdure.workflows.policy.state.node import NodeState
from perdure.workflows.policy.state.role import RoleState

_OfNode = TypeVar("_OfNode")
_ONE_ROLE: Mapping[str, RoleAddresses] = {}


def groups_of(role: RoleState) -> tuple[int, ...]:
    """Every group that has, had or will have nodes of the role."""
    return tuple(sorted({group_index(rank) for rank in (*role.nodes, *range(role.nodes_max))}))


def desires_of(
    state: RoleInJob, roles: Mapping[str, RoleAddresses] = _ONE_ROLE, *, packed_roles: str = ""
) -> dict[int, GroupDesire]:
    """The desired state of each group; versions are set when it is sent.

    Args:
        state: The role.
        roles: The addresses of all roles of the job, where it has several.
        packed_roles: The same in compressed form, where they are large.
    """
    nodes, members = _by_group(state.nodes), _by_group(state.world.members if state.world else {})
    world = state.world if state.world is not None and not state.rests else None
    common = GroupDesire(
        version=0,
        nodes={},
        nodes_min=state.nodes_min,
        undisturbed=state.world is not None and state.interruption is None and not state.between_stages,
        inquiry=state.inquiry,
        complete_generation=state.complete_generation,
        stages_complete=state.stages_complete,
        commit=commits.commit_of(state),
        checkpoint_request=commits.open_request(state),
        hold=holds.open_request(state),
        roles={} if packed_roles else dict(roles),
        packed_roles=packed_roles,
        wind_down=state.outcome is not None and not state.held,
        reason=_reason(state),
    )
    return {
        group: common.replace(
            nodes=_desired_nodes(state, nodes.get(group, {})), world=world.of(members.get(group, {})) if world else None
        )
        for group in groups_of(state)
    }


def _by_group(by_rank: Mapping[int, _OfNode]) -> dict[int, dict[int, _OfNode]]:
    groups: dict[int, dict[int, _OfNode]] = {}
    for rank, of_node in by_rank.items():
        groups.setdefault(group_index(rank), {})[rank] = of_node
    return groups


def _desired_nodes(state: RoleInJob, nodes: Mapping[int, NodeState]) -> dict[int, DesiredNode]:
    return {
        rank: DesiredNode(
            incarnation=node.incarnation,
            token=node.token,
            avoids=node.avoids,
            command_restarts=node.command_restarts,
            released=node.released,
            check_runs=node.check_runs,
            memory=node.memory,
            cpu=node.cpu,
        )
        for rank, node in sorted(nodes.items())
        # A group that winds down desires nothing, and is not sent that again whenever a node has gone.
        if node.alive and (state.outcome is None or (state.held and hold_on_failure.is_inspectable(node)))
    }


def is_over(state: JobState) -> bool:
    """The outcome is known and all the job's nodes and groups are gone."""
    gone = all(set(groups_of(role)) <= set(role.wound_down_groups) for role in state.roles.values())
    return state.outcome is not None and not state.held and gone


def _reason(state: RoleInJob) -> str:
    if state.outcome is not None:
        return f"job ends: {state.outcome.reason}"
    incident = state.open_incident
    return f"#{incident.number}: {incident.title}" if incident is not None else ""
