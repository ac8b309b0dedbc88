"""Checks of the machines of a running job: each node's agent measures its own, and the figures are judged beside each
other.

The links between nodes are measured in two rounds of pairs: neighbours, and then the slowest node with the fastest. A
node that is slow with both of its partners has a bad link; where both nodes are fast with another one, the link between
them is bad.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Iterable, Mapping, Sequence

from perdure.client.connection import Connection
from perdure.client.nodes import RunningNode
from perdure.client.questions import Unanswered, ask_node
from perdure.contract import Check, CheckKind, CheckNode, NodeChecks, NodeLink, Peer
from perdure.workflows.policy.diagnosis import links, preflight
from perdure.workflows.policy.diagnosis.links import Pair

_AGENTS_TOGETHER = 32
"""Agents that are asked at a time: each request is a workflow of its own."""
_PEERS = 16
"""Nodes that each node is to reach, the next ones by number: a thousand nodes would make a million connections."""
_ANY_PORT = 29_500
"""A port of a node that listens on none now: a machine that refuses a connection can be reached."""
_LINK_PORTS = range(20_000, 29_000)
"""Ports for the store of a pair, below those that kernels give to connections."""


async def replay_step(connection: Connection, job_id: str, nodes: Sequence[RunningNode]) -> tuple[NodeChecks, ...]:
    """Has the ranks of all nodes replay their next step; returns what each of them has compared."""
    # Agents of all nodes name the same replay, and a later one by a larger number.
    request = time.time_ns() // 1_000_000

    async def ask(node: RunningNode) -> NodeChecks:
        question = CheckNode(**dict(node.id), kind=CheckKind.REPLAY, request=request)
        try:
            found = await ask_node(connection, job_id, question, NodeChecks)
        except Unanswered as error:
            return NodeChecks.unanswered(node.id, str(error))
        if any(check.name != "replay" for check in found.checks):
            return NodeChecks.unanswered(node.id, "its agent is of an earlier release, and replays nothing")
        return found

    return tuple(await asyncio.gather(*map(ask, nodes)))


async def check_nodes(
    connection: Connection, job_id: str, nodes: Sequence[RunningNode], *, full: bool
) -> tuple[NodeChecks, ...]:
    """Checks these nodes, those that fail a second time; returns what they found, with verdicts."""
    turn = asyncio.Semaphore(_AGENTS_TOGETHER)
    kind = CheckKind.FULL if full else CheckKind.QUICK

    async def ask(node: RunningNode) -> NodeChecks:
        question = CheckNode(**dict(node.id), kind=kind, peers=_peers(node, nodes))
        async with turn:
            try:
                return await ask_node(connection, job_id, question, NodeChecks)
            except Unanswered as error:
                return NodeChecks.unanswered(node.id, str(error))

    first = await asyncio.gather(*map(ask, nodes))
    failed = {found.node for found in preflight.judge(first) if found.failed}
    again = {
        found.node: found for found in await asyncio.gather(*(ask(node) for node in nodes if node.id.rank in failed))
    }
    found = preflight.judge(_better(one, again.get(one.node)) for one in first)
    if full and len(nodes) > 1:
        found = await _with_links(connection, job_id, {node.id.rank: node for node in nodes}, found)
    return found


def _better(first: NodeChecks, again: NodeChecks | None) -> NodeChecks:
    return first if again is None else again.replace(checks=preflight.better(first.checks, again.checks))


def _peers(node: RunningNode, nodes: Sequence[RunningNode]) -> tuple[Peer, ...]:
    position = nodes.index(node)
    others = [*nodes[position + 1 :], *nodes[:position]][:_PEERS]
    return tuple(
        Peer(rank=other.id.rank, address=other.view.address, port=next(iter(other.view.store_ports), _ANY_PORT))
        for other in others
        if other.view.address
    )


async def _with_links(
    connection: Connection, job_id: str, nodes: Mapping[int, RunningNode], found: Iterable[NodeChecks]
) -> tuple[NodeChecks, ...]:
    measured: dict[Pair, Check] = {}
    for choose in (links.neighbours, links.slowest_with_fastest):
        for pairs in choose(tuple(nodes), measured):
            figures = await asyncio.gather(*(_measure(connection, job_id, nodes, pair) for pair in pairs))
            measured.update(zip(pairs, figures, strict=True))
    by_node = links.judge(measured)
    return tuple(one.replace(checks=(*one.checks, *by_node.get(one.node, ()))) for one in found)


async def _measure(connection: Connection, job_id: str, nodes: Mapping[int, RunningNode], pair: Pair) -> Check:
    """Measures one link, from both of its ends."""
    address, port = nodes[pair[0]].view.address, random.choice(_LINK_PORTS)

    async def ask(end: int) -> Check:
        link = NodeLink(address=address, port=port, end=1 if end else 0)
        question = CheckNode(**dict(nodes[pair[end]].id), kind=CheckKind.LINK, link=link)
        try:
            answer = await ask_node(connection, job_id, question, NodeChecks)
        except Unanswered as error:
            return Check(name="link", problem=str(error))
        return next(iter(answer.checks), Check(name="link", problem="nothing was measured"))

    return min(await asyncio.gather(ask(0), ask(1)), key=lambda check: check.value or 0.0)
