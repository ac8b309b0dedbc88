"""Where the ranks of a job are, asked of the agents of all nodes at once, and ranks that are at the same place."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from perdure.client.connection import Connection
from perdure.client.questions import Unanswered, ask_node
from perdure.contract import NodeId, NodeStacks, RankPosition, ReadStacks, StackFrame

_AGENTS_TOGETHER = 32
"""Agents that are asked at a time: each request is a workflow of its own."""


async def read_stacks(connection: Connection, job_id: str, nodes: Sequence[NodeId]) -> tuple[NodeStacks, ...]:
    """Asks the agents of these nodes; one that does not answer has the reason in its place."""
    turn = asyncio.Semaphore(_AGENTS_TOGETHER)

    async def ask(node: NodeId) -> NodeStacks:
        async with turn:
            try:
                return await ask_node(connection, job_id, ReadStacks(**dict(node)), NodeStacks)
            except Unanswered as error:
                return NodeStacks(node=node.rank, problem=str(error))

    return tuple(await asyncio.gather(*(ask(node) for node in nodes)))


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
