"""Sends more signals than one run of a NodeGroup accepts, to a job that counts the results."""

from __future__ import annotations

import asyncio
import time
from collections import defaultdict
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any
from uuid import uuid4

from temporalio import activity, workflow
from temporalio.client import Client, WorkflowHandle
from temporalio.worker import Worker

from perdure.activities.signals import SignalActivities
from perdure.contract import (
    CreatedNode,
    DesiredNode,
    GroupDesire,
    GroupTransitions,
    NodeCredentials,
    NodeRequest,
    NodesCreated,
    NodesRef,
    NodesRequest,
    NodeView,
    PortsChanged,
    Ready,
    Stepping,
    WatchRequest,
)
from perdure.contract.names import group_workflow_id, watch_task_queue
from perdure.contract.transitions import NodePortsChanged
from perdure.spec.validate import parse_spec
from perdure.workflows.node_group import NodeGroup
from perdure.workflows.node_record import GroupInput
from tests.support.waiting import eventually
from tests.workflows.fleet import job_spec
from tests.workflows.played_node import PlayedNode, now

UID = "0123abcd"

AT_ONCE = 4
"""Signals in flight: with more, a server on SQLite is too busy taking them to let the group run at all."""

KINDS = ("READY", "STEPPING", "STORE_PORTS")
"""The transitions that the flood's signals cause: one each, so that none can be missing unnoticed."""


@workflow.defn(name="ListeningJob", sandboxed=False)
class ListeningJob:
    """Stands where a TrainingJob stands, and writes down every edge."""

    def __init__(self) -> None:
        self._heard: dict[int, list[tuple[str, int]]] = defaultdict(list)
        self._over = False

    @workflow.run
    async def run(self) -> None:
        await workflow.wait_condition(lambda: self._over)

    @workflow.signal(name="transitions")
    def transitions(self, message: GroupTransitions) -> None:
        for transition in message.transitions:
            if transition.kind in KINDS:
                number = (
                    transition.store_ports[0] if isinstance(transition, NodePortsChanged) else transition.generation
                )
                self._heard[transition.rank].append((transition.kind, number))
        self._over = self._over or message.wound_down

    @workflow.query
    def heard(self) -> dict[int, list[tuple[str, int]]]:
        return self._heard


@activity.defn(name="create_node")
async def create_node(request: NodeRequest) -> CreatedNode:
    return CreatedNode(name=request.name)


@activity.defn(name="create_nodes")
async def create_nodes(request: NodesRequest) -> NodesCreated:
    return NodesCreated(created={one.node.rank: await create_node(one) for one in request.each}, refused={})


@activity.defn(name="delete_nodes")
async def delete_nodes(request: NodesRef) -> None: ...


@activity.defn(name="watch_nodes")
async def watch_nodes(request: WatchRequest) -> None:
    while True:
        activity.heartbeat()
        await asyncio.sleep(1)


@dataclass(frozen=True)
class Flooded:
    """The result of a flood."""

    sent: dict[int, list[tuple[str, int]]]
    heard: dict[int, list[tuple[str, int]]]
    runs: int
    seconds: float

    @property
    def signals_sent(self) -> int:
        return sum(len(transitions) for transitions in self.sent.values())

    @property
    def signals_lost(self) -> int:
        return sum(len(set(transitions) - set(self.heard.get(rank, []))) for rank, transitions in self.sent.items())


async def flood(client: Client, *, nodes: int, signals_per_node: int) -> Flooded:
    """Sends so many signals to one group, in order per node, and waits for what it makes of them."""
    async with _listening(client, nodes) as (job, group):
        began = time.monotonic()
        at_once = asyncio.Semaphore(AT_ONCE)
        sent = await asyncio.gather(*(_talk(group, rank, signals_per_node, at_once) for rank in range(nodes)))
        seconds = time.monotonic() - began
        expected = sum(len(transitions) for transitions in sent)

        async def all_heard() -> dict[int, list[tuple[str, int]]] | None:
            heard = await job.query(ListeningJob.heard)
            return heard if sum(len(transitions) for transitions in heard.values()) >= expected else None

        heard = await eventually(all_heard, what=f"{expected} transitions are heard")
        return Flooded(
            sent=dict(enumerate(sent)),
            heard={rank: [(kind, number) for kind, number in transitions] for rank, transitions in heard.items()},
            runs=await runs_of(client, group.id),
            seconds=seconds,
        )


async def _talk(
    group: WorkflowHandle[Any, Any], rank: int, signals: int, at_once: asyncio.Semaphore
) -> list[tuple[str, int]]:
    """One node's signals, each after the one before was taken."""
    transitions: list[tuple[str, int]] = []
    for number in range(1, signals + 1):
        known = {"sender": _identity(rank), "sequence": number, "time": now()}
        kind = KINDS[number % len(KINDS)]
        async with at_once:
            match kind:
                case "READY":
                    await group.signal("ready", Ready(**known, after_generation=number))
                case "STEPPING":
                    await group.signal("stepping", Stepping(**known, generation=number))
                case _:
                    await group.signal("ports_changed", PortsChanged(**known, store_ports=(number,)))
        transitions.append((kind, number))
    return transitions


def _identity(rank: int) -> NodeCredentials:
    return NodeCredentials(uid=UID, role="worker", rank=rank, incarnation=1, token="token")


@asynccontextmanager
async def _listening(
    client: Client, nodes: int
) -> AsyncIterator[tuple[WorkflowHandle[Any, Any], WorkflowHandle[Any, Any]]]:
    """A group with its nodes, which no agent holds, and its job."""
    queue = f"perdure-{uuid4().hex[:8]}"
    spec = job_spec(str(nodes))
    job_id = f"job/default/{spec['name']}"
    async with (
        Worker(
            client,
            task_queue=queue,
            workflows=[NodeGroup, ListeningJob],
            activities=[create_node, create_nodes, delete_nodes, *SignalActivities(client).all],
        ),
        Worker(client, task_queue=watch_task_queue(queue), activities=[watch_nodes]),
    ):
        job = await client.start_workflow(ListeningJob.run, id=job_id, task_queue=queue)
        desire = GroupDesire(
            version=1, nodes={rank: DesiredNode(incarnation=1, token="token") for rank in range(nodes)}
        )
        group = await client.start_workflow(
            "NodeGroup",
            GroupInput(
                job_id=job_id,
                job_first_run_id=job.result_run_id or "",
                uid=UID,
                group=0,
                role="worker",
                spec=parse_spec(spec),
                desire=desire,
            ),
            id=group_workflow_id(job_id, UID, "worker", 0),
            task_queue=queue,
        )

        async def all_listed() -> bool:
            return len(await group.query("nodes", result_type=list[NodeView])) >= nodes

        await eventually(all_listed, what=f"{nodes} nodes are listed")
        yield job, client.get_workflow_handle(group.id)
        await client.get_workflow_handle(group.id).signal("desire", GroupDesire(version=2, nodes={}, wind_down=True))
        await job.result()


async def reports(nodes: list[PlayedNode]) -> None:
    """One report of each node that changes nothing, a few at once."""
    at_once = asyncio.Semaphore(AT_ONCE)

    async def beat(node: PlayedNode) -> None:
        async with at_once:
            await node.report()

    await asyncio.gather(*(beat(node) for node in nodes))


async def runs_of(client: Client, workflow_id: str) -> int:
    """Returns the number of the workflow's runs, counted backwards from the newest."""
    runs, run_id = 0, (await client.get_workflow_handle(workflow_id).describe()).run_id
    while run_id:
        runs += 1
        events = client.get_workflow_handle(workflow_id, run_id=run_id).fetch_history_events(page_size=1)
        run_id = (await anext(events)).workflow_execution_started_event_attributes.continued_execution_run_id
    return runs
