"""Finds a node that works while the others of its role idle, such as a parameter server with the largest variables.

Nodes that train in steps wait for each other, so the slow one is found by its steps. Those of a service do not.
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median
from typing import TYPE_CHECKING

from perdure.contract import JobStatus, NodeView, ResourceUse

if TYPE_CHECKING:
    from perdure.client.client import Client

_BUSY = 0.8
"""Cores that a node at its limit needs at least: one that answers from a single thread has no more than one. It needs
what it uses and what it waits for: on a machine that is busy, or under a limit, it gets less than one."""
_TIMES_THE_OTHERS = 4.0
_WORTH_SAYING = 0.05
"""Cores that are not rounded to none."""


async def find_hot_nodes(client: Client, status: JobStatus) -> tuple[str, ...]:
    """Returns a warning for each hot node of a running job of several roles.

    Args:
        client: Reads the nodes' latest reports.
        status: The job's status; of its roles, those in `by_role` are looked at.
    """
    roles = [one.name for one in status.by_role if not status.finished_at]
    nodes = [await client.nodes(status.name, namespace=status.namespace, role=role) for role in roles]
    return tuple(words for role, views in zip(roles, nodes, strict=True) for words in describe_hot_nodes(role, views))


def describe_hot_nodes(role: str, nodes: Sequence[NodeView]) -> tuple[str, ...]:
    """Returns a warning for each node of a service that uses far more processor time than the others."""
    known = {node.rank: node.metrics for node in nodes if node.metrics and node.metrics.cpu_cores is not None}
    needed = {rank: (used.cpu_cores or 0) + (used.cpu_wait_cores or 0) for rank, used in known.items()}
    if len(needed) < 2 or any(node.progress for node in nodes):
        return ()
    return tuple(
        f"{role} node {rank} is hot: it {_describe_use(known[rank])}, and the others need {others:.1f} in the median, "
        "so they wait for it. Give it less to hold or to do, such as by a partitioner of variables, or its role more "
        "processors"
        for rank, cores in needed.items()
        for others in [median(other for known, other in needed.items() if known != rank)]
        if cores >= max(_BUSY, _TIMES_THE_OTHERS * others)
    )


def _describe_use(use: ResourceUse) -> str:
    waited = use.cpu_wait_cores or 0
    more = f" and waits for {waited:.1f} more" if waited >= _WORTH_SAYING else ""
    return f"uses {use.cpu_cores or 0:.1f} cores{more}"
