"""Simulated nodes that answer in milliseconds, for tests of workflows: a fleet simulates the backend and all agents.

Everything in between is real: the server, the workflows, task queues, leases and signals. Simulated are the reports
that a real agent sends after its processes acted, so that a test can send them in any order, twice, late, or never.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress
from datetime import timedelta
from typing import Any, TypeVar, overload
from uuid import uuid4

from temporalio import activity
from temporalio.client import Client, WorkflowHandle
from temporalio.exceptions import ApplicationError
from temporalio.service import RPCError
from temporalio.worker import UnsandboxedWorkflowRunner, Worker, WorkflowRunner
from temporalio.worker.workflow_sandbox import SandboxedWorkflowRunner

from perdure.activities.archive import ArchiveActivities, ArchivePlaces
from perdure.activities.datasets import DatasetActivities
from perdure.activities.nodes.activities import refuse_outdated_watch
from perdure.activities.notifications import NotificationActivities
from perdure.activities.scheduled_jobs import ScheduledJobActivities
from perdure.activities.signals import SignalActivities
from perdure.activities.site import SiteActivities
from perdure.agent.job_liveness import JobLiveness, OwnerLiveness
from perdure.contract import (
    Adopt,
    CreatedNode,
    GroupDesire,
    GroupRef,
    GroupTransitions,
    Incarnation,
    NodeEvent,
    NodeEventKind,
    NodeEvents,
    NodeId,
    NodeRequest,
    NodesCreated,
    NodesDeleted,
    NodesRef,
    NodesRequest,
    SiteFacts,
    WatchRequest,
)
from perdure.contract.names import REMOVAL_DENIED, node_name, watch_task_queue
from perdure.page.report import report_of
from perdure.workflows.archiver import Archiver
from perdure.workflows.dataset import Dataset
from perdure.workflows.delivery import Delivery
from perdure.workflows.node_group import NodeGroup
from perdure.workflows.notifier import Notifier
from perdure.workflows.scheduled_job import ScheduledJob
from perdure.workflows.store import KeyValueStore
from perdure.workflows.training_job import TrainingJob
from tests.workflows.left_out import no_event_left_out
from tests.workflows.observed_tasks import ObservedRunner
from tests.workflows.played_node import PlayedNode, now

_RPC_TIMEOUT = timedelta(seconds=5)


class _Signals(SignalActivities):
    """Delivers signals when the fleet lets them arrive."""

    def __init__(self, fleet: Fleet) -> None:
        super().__init__(fleet.client)
        self._fleet = fleet

    async def _deliver(
        self, workflow_id: str, signal: str, message: GroupDesire | Adopt | GroupTransitions
    ) -> Delivery:
        await self._fleet.signals_arrive.wait()
        return await super()._deliver(workflow_id, signal, message)


class Fleet:
    """The backend's activities, and the nodes that they made."""

    archive_places = ArchivePlaces(own_machine=True)
    """Where its workers write archives."""

    def __init__(self, client: Client, task_queue: str) -> None:
        self.client = client
        self.task_queue = task_queue
        self.nodes: dict[tuple[str, int, int], PlayedNode] = {}
        """The nodes of the newest job of each name, by their `place`, rank and incarnation."""
        self._started: list[PlayedNode] = []
        self.deleted: list[str] = []
        self.become_ready = True
        self.pending: dict[int, str] = {}
        self.refused: dict[int, str] = {}
        self.endless: set[int] = set()
        """Ranks whose creation ends only when it is cancelled."""
        self._making: set[str] = set()
        self.deleted_too_early: list[str] = []
        """Nodes that were being made."""
        self.alone: set[int] = set()
        """Ranks that are not created together with others."""
        self.together: list[tuple[int, ...]] = []
        """Ranks that were asked for together."""
        self.cut_off: dict[int, str] = {}
        """By rank, why the node does not get to the others."""
        self.told_early: dict[int, str] = {}
        """By rank, why no machine is given to it: the watch reports it before the node's maker has answered, and
        nothing after that."""
        self.unseen: set[int] = set()
        """Ranks whose first incarnation is taken away before it is seen."""
        self.unwatched: set[int] = set()
        """Ranks of which the watch says nothing."""
        self.withhold_events = False
        self.left: dict[int, str] = {}
        """What is left of nodes that are deleted, by rank."""
        self.delete_nothing = False
        """Nodes that are to be deleted stay."""
        self.away = ""
        """Why nothing can be deleted for now."""
        self.denied: dict[str, int] = {}
        """How often the deletion of each node was denied, by its name."""
        self.denies = False
        """Nothing may be deleted."""
        self.watches = 0
        """The number of watches that were started."""
        self.watches_die = asyncio.Event()
        self.may_end = asyncio.Event()
        """Nodes that are deleted end."""
        self.may_end.set()
        self.signals_arrive = asyncio.Event()
        """Signals between jobs and groups are delivered; until then they are on their way."""
        self.signals_arrive.set()
        self._away: set[str] = set()
        """Nodes that were made and are no more, without a request."""
        self._changed = asyncio.Event()

    def changed(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    @staticmethod
    def place(job_id: str, role: str = "") -> str:
        """A job of one role, or a role of a job with several."""
        return f"{job_id}/{role}" if role else job_id

    def node(self, job_id: str, rank: int, role: str = "") -> PlayedNode:
        """The newest incarnation."""
        place = self.place(job_id, role)
        return max(
            (node for (known, slot, _), node in self.nodes.items() if known == place and slot == rank),
            key=lambda node: node.incarnation,
        )

    def started(self, node: PlayedNode) -> None:
        """A node that came by itself: it ends with the fleet."""
        self._started.append(node)

    async def agent_client(self, request: NodeRequest) -> Client:
        """The connection of a node's agent."""
        return self.client

    def make_node(self, request: NodeRequest) -> PlayedNode:
        """An incarnation that has not started yet."""
        return PlayedNode(self, request)

    def workers(self, *, max_cached_workflows: int, sandboxed: bool = False) -> tuple[Worker, Worker]:
        """Workers for both queues, with this fleet as the backend."""
        runner: WorkflowRunner = SandboxedWorkflowRunner() if sandboxed else UnsandboxedWorkflowRunner()
        facts = SiteActivities(SiteFacts(search_attributes=True, backends=("local", "kubernetes")))
        return (
            Worker(
                self.client,
                task_queue=self.task_queue,
                workflow_runner=ObservedRunner(runner),
                # A decision may take seconds beside others' tests: the SDK would take it for a deadlock after two, and
                # may then never get rid of the run.
                debug_mode=True,
                workflows=[TrainingJob, ScheduledJob, NodeGroup, Dataset, KeyValueStore, Notifier, Archiver],
                activities=[
                    self.create_node,
                    self.create_nodes,
                    self.delete_nodes,
                    self.clear_group,
                    *facts.all,
                    *_Signals(self).all,
                    *ScheduledJobActivities(self.client).all,
                    *NotificationActivities(self.client, own_machine=True).all,
                    *ArchiveActivities(self.client, self.archive_places, report_of).all,
                ],
                max_cached_workflows=max_cached_workflows,
                max_heartbeat_throttle_interval=timedelta(seconds=1),
            ),
            Worker(
                self.client,
                task_queue=watch_task_queue(self.task_queue),
                activities=[self.watch_nodes, *DatasetActivities(self.client).watches],
            ),
        )

    async def lose(self, node: PlayedNode, reason: str = "killed") -> None:
        """The node and its agent are gone; the watch reports it unless told not to."""
        await node.die()
        self._away.add(node.request.name)
        if not self.withhold_events:
            event = self._gone(node.rank, node.incarnation, reason)
            await self.client.get_workflow_handle(node.request.group_id).signal(
                "node_events", NodeEvents(events=(event,))
            )

    async def close(self) -> None:
        await asyncio.gather(*(node.die() for node in self._started))

    @activity.defn(name="create_node")
    async def create_node(self, request: NodeRequest) -> CreatedNode:
        rank = request.node.rank
        if rank in self.refused:
            raise ApplicationError(self.refused[rank], type="NodeRefused", non_retryable=True)
        if rank in self.unseen and request.node.incarnation == 1:
            self._away.add(request.name)
            return CreatedNode(name=request.name)
        if rank in self.endless:
            await self._create_indefinitely(request.name)
        role = request.node.role if len(request.spec.roles) > 1 else ""
        key = (self.place(request.job_id, role), rank, request.node.incarnation)
        if key not in self.nodes or self.nodes[key].request.node.uid != request.node.uid:
            node = self.nodes[key] = self.make_node(request)
            self._started.append(node)
            if rank in self.told_early:
                await self._tell_that_it_waits(request, self.told_early[rank])
            elif rank not in self.pending:
                await node.start()
        self.changed()
        return CreatedNode(name=request.name, host="here", pending=self.pending.get(rank, ""))

    async def _tell_that_it_waits(self, request: NodeRequest, reason: str) -> None:
        node = request.node
        event = NodeEvent(
            kind=NodeEventKind.PENDING,
            rank=node.rank,
            incarnation=node.incarnation,
            time=now(),
            reason=reason,
            queued=True,
        )
        group = self.client.get_workflow_handle(request.group_id)
        await group.signal("node_events", NodeEvents(events=(event,)))

    async def _create_indefinitely(self, name: str) -> None:
        self._making.add(name)
        try:
            while True:
                activity.heartbeat()
                await asyncio.sleep(0.1)
        finally:
            self._making.remove(name)

    @activity.defn(name="create_nodes")
    async def create_nodes(self, request: NodesRequest) -> NodesCreated:
        self.together.append(tuple(requested.node.rank for requested in request.nodes))
        created: dict[int, CreatedNode] = {}
        refused: dict[int, str] = {}
        for one in request.each:
            rank = one.node.rank
            if rank in self.refused:
                refused[rank] = self.refused[rank]
            elif rank not in self.alone:
                created[rank] = await self.create_node(one)
        return NodesCreated(created=created, refused=refused)

    @activity.defn(name="delete_nodes")
    async def delete_nodes(self, request: NodesRef) -> NodesDeleted:
        while self.delete_nothing:
            activity.heartbeat()
            await asyncio.sleep(0.1)
        names = {ref.name for ref in request.nodes}
        if self.away:
            raise ApplicationError(self.away)
        if self.denies:
            self.denied |= {name: self.denied.get(name, 0) + 1 for name in names}
            raise ApplicationError("forbidden", type=REMOVAL_DENIED, non_retryable=True)
        self.deleted += sorted(names)
        self.deleted_too_early += sorted(names & self._making)
        while not self.may_end.is_set():
            activity.heartbeat()
            with suppress(TimeoutError):
                await asyncio.wait_for(self.may_end.wait(), 1)
        await asyncio.gather(*(node.die() for node in self._started if node.request.name in names))
        self.changed()
        return NodesDeleted(left={ref.name: self.left[ref.rank] for ref in request.nodes if ref.rank in self.left})

    @activity.defn(name="clear_group")
    async def clear_group(self, group: GroupRef) -> None:
        if self.denies:
            self.denied |= {group.uid: self.denied.get(group.uid, 0) + 1}
            raise ApplicationError("forbidden", type=REMOVAL_DENIED, non_retryable=True)

    @activity.defn(name="watch_nodes")
    async def watch_nodes(self, request: WatchRequest) -> None:
        """Tells of nodes that exist, of known ones that do not any more, and that the job has closed."""
        refuse_outdated_watch()
        self.watches += 1
        group = self.client.get_workflow_handle(request.group_id)
        owner = OwnerLiveness(
            self.client,
            job_id=request.job_id,
            first_run_id=request.job_first_run_id,
            owned_id=request.group_id,
            rpc_timeout=_RPC_TIMEOUT,
        )
        told: set[tuple[int, int]] = set()
        waiting = [self._gone(node.rank, node.incarnation) for node in request.known if self._is_away(request, node)]
        while not self.watches_die.is_set():
            activity.heartbeat()
            waiting += self._news(request, told)
            owner_closed = await owner.query() is JobLiveness.CLOSED
            if waiting or owner_closed:
                with suppress(RPCError):
                    await group.signal("node_events", NodeEvents(events=tuple(waiting), owner_closed=owner_closed))
                    waiting.clear()
            with suppress(TimeoutError):
                async with asyncio.timeout(0.5):
                    await self.watches_die.wait()
        raise ApplicationError("its worker has died")

    def _news(self, request: WatchRequest, told: set[tuple[int, int]]) -> list[NodeEvent]:
        """Returns events of nodes that were not reported yet."""
        events: list[NodeEvent] = []
        for (_, rank, incarnation), node in self.nodes.items():
            ours = node.request.job_id == request.job_id and node.request.group_id == request.group_id
            if not ours or node.request.name in self._away or (rank, incarnation) in told:
                continue
            if rank in self.told_early or rank in self.unwatched:
                continue
            told.add((rank, incarnation))
            kind = NodeEventKind.PENDING if rank in self.pending else NodeEventKind.RUNNING
            reason = self.pending.get(rank, "")
            events.append(NodeEvent(kind=kind, rank=rank, incarnation=incarnation, time=now(), reason=reason))
        return events

    def _is_away(self, request: WatchRequest, node: Incarnation) -> bool:
        name = request.job_id.rpartition("/")[2]
        named = NodeId(uid=request.uid, role=request.role, rank=node.rank, incarnation=node.incarnation)
        return node_name(name, named) in self._away

    @staticmethod
    def _gone(rank: int, incarnation: int, reason: str = "deleted while no watch ran") -> NodeEvent:
        return NodeEvent(kind=NodeEventKind.GONE, rank=rank, incarnation=incarnation, time=now(), reason=reason)


FleetType = TypeVar("FleetType", bound=Fleet)


@overload
def running_fleet(  # pyrefly: ignore[inconsistent-overload]
    client: Client, *, max_cached_workflows: int = ..., sandboxed: bool = ...
) -> AbstractAsyncContextManager[Fleet]: ...
@overload
def running_fleet(  # pyrefly: ignore[inconsistent-overload]
    client: Client, *, fleet_type: type[FleetType], max_cached_workflows: int = ..., sandboxed: bool = ...
) -> AbstractAsyncContextManager[FleetType]: ...
@asynccontextmanager
async def running_fleet(
    client: Client, *, fleet_type: type[Fleet] = Fleet, max_cached_workflows: int = 1000, sandboxed: bool = False
) -> AsyncIterator[Fleet]:
    """Workers for both queues with a fleet behind them."""
    fleet = fleet_type(client, f"perdure-{uuid4().hex[:8]}")
    main, watching = fleet.workers(max_cached_workflows=max_cached_workflows, sandboxed=sandboxed)
    with no_event_left_out():
        try:
            async with main, watching:
                yield fleet
        finally:
            # Only now: until its workers have ended, a group may start further nodes.
            await fleet.close()


def job_spec(nodes: str = "2", **fields: Any) -> dict[str, Any]:
    """A spec with a name of its own."""
    return {
        "name": f"t-{uuid4().hex[:8]}",
        "roles": {"worker": {"nodes": nodes, "command": ["torchrun", "train.py"]}},
        "timing": {"rendezvous": {"last_call": "200ms"}},
    } | fields


async def submit(fleet: Fleet, spec: dict[str, Any]) -> WorkflowHandle[Any, Any]:
    return await fleet.client.start_workflow(
        "TrainingJob", spec, id=f"job/default/{spec['name']}", task_queue=fleet.task_queue
    )
