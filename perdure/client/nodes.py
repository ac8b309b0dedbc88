"""Reads the nodes of a job: from the job, from their groups, and from the agents' reports in their leases."""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Iterable, Sequence
from typing import NamedTuple

from temporalio.client import Client as TemporalClient
from temporalio.client import WorkflowQueryFailedError
from temporalio.service import RPCError

from perdure.base.errors import Refused
from perdure.base.executions import QueryRejected, describe, query
from perdure.client.connection import CALL_TIMEOUT, Connection
from perdure.client.error_mapping import map_errors
from perdure.client.leases import leases_of
from perdure.client.views import NodeLease, merge_nodes
from perdure.contract import JobStatus, NodeId, NodePhase, NodesQuery, NodeView
from perdure.contract.names import job_workflow_id, role_of_group

_GROUPS_TOGETHER = 8
"""The most groups whose nodes a job returns in one answer; a larger job is queried group by group."""


async def read_nodes(connection: Connection, name: str, namespace: str, status: JobStatus) -> tuple[NodeView, ...]:
    """The nodes of the role of a job with this status, with their latest progress.

    Raises:
        NoWorker: if no worker runs to answer for them.
    """
    temporal = await connection.connect()
    groups = [group for group in status.groups if role_of_group(group) == status.role]
    async with map_errors(connection, name, namespace):
        job = await _nodes_of_job(temporal, job_workflow_id(namespace, name), status.role, groups)
    answers = await asyncio.gather(*(_group(temporal, group) for group in groups))
    views = [view for group_views, _ in answers for view in group_views]
    leases = [lease for _, group_leases in answers for lease in group_leases]
    return merge_nodes(job, views, leases)


async def refresh_nodes(
    temporal: TemporalClient, nodes: Sequence[NodeView], groups: Iterable[str]
) -> tuple[NodeView, ...]:
    """The nodes with their leases' latest reports; what the job and its groups know stays as it was."""
    answers = await asyncio.gather(*(_leases(temporal, group) for group in groups))
    return merge_nodes(nodes, (), [lease for leases in answers for lease in leases])


class RunningNode(NamedTuple):
    """A node whose agent can be asked."""

    id: NodeId
    view: NodeView


def running_nodes(
    status: JobStatus, views: Sequence[NodeView], node: int | Collection[int] | None
) -> tuple[RunningNode, ...]:
    """Chooses the nodes with agents, of these numbers or of all.

    Raises:
        Refused: if there is none.
    """
    chosen = (node,) if isinstance(node, int) else node
    found = tuple(
        RunningNode(NodeId(uid=status.uid, role=status.role, rank=view.rank, incarnation=view.incarnation), view)
        for view in views
        if view.phase in (NodePhase.JOINED, NodePhase.READY) and (chosen is None or view.rank in chosen)
    )
    if not found:
        remedy = f"The nodes it has: `perdure nodes {status.name}`."
        raise Refused(f"{status.name} has no such node that runs now", remedy=remedy)
    return found


def require_one_role(status: JobStatus, role: str | None) -> None:
    """Refuses to guess which role of several is meant.

    Raises:
        Refused: if the job has several roles, and none is named.
    """
    if role is None and len(status.roles) > 1:
        roles = ", ".join(status.roles)
        raise Refused(f"{status.name} has several roles: {roles}", remedy=f"Name one, such as `--role {status.role}`.")


async def _nodes_of_job(temporal: TemporalClient, job_id: str, role: str, groups: list[str]) -> list[NodeView]:
    """The job's own view of a role's nodes, in several answers if one could not hold all."""
    handle = temporal.get_workflow_handle(job_id)
    indices = [int(group.rpartition("/")[2]) for group in groups] if len(groups) > _GROUPS_TOGETHER else [None]
    answers = [
        await query(handle, "nodes", args=[request], result_type=list[NodeView], rpc_timeout=CALL_TIMEOUT)
        for request in (NodesQuery(group=index, role=role) for index in indices)
    ]
    return [view for views in answers for view in views]


async def _group(temporal: TemporalClient, group_id: str) -> tuple[list[NodeView], list[NodeLease]]:
    """A group's table and its leases' latest reports; each empty if the group has ended or does not answer now."""
    return await asyncio.gather(_table(temporal, group_id), _leases(temporal, group_id))


async def _table(temporal: TemporalClient, group_id: str) -> list[NodeView]:
    handle = temporal.get_workflow_handle(group_id)
    try:
        return await query(handle, "nodes", result_type=list[NodeView], rpc_timeout=CALL_TIMEOUT)
    except (RPCError, WorkflowQueryFailedError, QueryRejected):
        return []


async def _leases(temporal: TemporalClient, group_id: str) -> list[NodeLease]:
    try:
        return await leases_of(temporal, await describe(temporal, group_id, rpc_timeout=CALL_TIMEOUT))
    except RPCError:
        return []
