"""Where the ranks of a job are, asked of the agents of all nodes at once, and ranks that are at the same place."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from uuid import uuid4

from temporalio.client import WorkflowFailureError
from temporalio.exceptions import ActivityError, ApplicationError

from perdure.client.connection import Connection
from perdure.client.error_mapping import map_errors
from perdure.contract import NodeId, NodeStacks, RankPosition, ReadStacks, StackFrame
from perdure.contract.names import READ_NODE_STACKS, stacks_workflow_id

TIMEOUT = timedelta(seconds=20)
"""The limit for the answer of one agent, which has 10 s."""
_AGENTS_TOGETHER = 32
"""Agents that are asked at a time: each request is a workflow of its own."""


async def read_stacks(connection: Connection, job_id: str, nodes: Sequence[NodeId]) -> tuple[NodeStacks, ...]:
    """Asks the agents of these nodes; one that does not answer has the reason in its place."""
    turn = asyncio.Semaphore(_AGENTS_TOGETHER)

    async def ask(node: NodeId) -> NodeStacks:
        async with turn:
            return await _ask_agent(connection, job_id, node)

    return tuple(await asyncio.gather(*(ask(node) for node in nodes)))


async def _ask_agent(connection: Connection, job_id: str, node: NodeId) -> NodeStacks:
    request = ReadStacks(**dict(node))
    temporal = await connection.connect()
    try:
        async with map_errors(connection):
            return await temporal.execute_workflow(
                READ_NODE_STACKS,
                request,
                result_type=NodeStacks,
                id=stacks_workflow_id(job_id, request, uuid4().hex),
                task_queue=connection.endpoint.task_queue,
                execution_timeout=TIMEOUT,
                static_summary=f"stacks of node {node.rank}.{node.incarnation}",
                rpc_timeout=TIMEOUT,
            )
    except WorkflowFailureError as error:
        return NodeStacks(node=node.rank, problem=_why(error))


def _why(error: WorkflowFailureError) -> str:
    answer = error.cause.cause if isinstance(error.cause, ActivityError) else None
    if isinstance(answer, ApplicationError):
        return answer.message
    return "its agent does not answer: the node may be gone, or just starting"


@dataclass
class Branch:
    """A call that ranks have in common, and the calls that each of them made from there."""

    frame: StackFrame | None = None
    """None for the root, and for ranks that have no stack."""
    ranks: list[int] = field(default_factory=list[int])
    calls: dict[StackFrame, Branch] = field(default_factory=dict["StackFrame", "Branch"])

    @property
    def ends(self) -> list[int]:
        """The ranks whose innermost call this is."""
        deeper = {rank for branch in self.calls.values() for rank in branch.ranks}
        return [rank for rank in self.ranks if rank not in deeper]


def merged(positions: Iterable[RankPosition]) -> Branch:
    """Merges the stacks of the ranks' main threads from the outermost call on, as a debugger of many processes does."""
    root = Branch()
    for position in sorted(positions, key=lambda one: one.rank):
        if not position.threads:
            continue
        root.ranks.append(position.rank)
        branch = root
        for frame in reversed(position.threads[0].frames):
            branch = branch.calls.setdefault(frame, Branch(frame))
            branch.ranks.append(position.rank)
    return root


def positions_of(nodes: Iterable[NodeStacks]) -> Mapping[int, RankPosition]:
    """The ranks of these nodes, in order."""
    found = {position.rank: position for node in nodes for position in node.ranks}
    return dict(sorted(found.items()))
