"""Simulated nodes that answer in milliseconds, for tests of workflows: a fleet simulates the backend and all agents.

Everything in between is real: the server, the workflows, task queues, leases and signals. Simulated are the reports
that a real agent sends after its processes acted, so that a test can send them in any order, twice, late, or never.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from itertools import count
from typing import Any
from uuid import uuid4

from temporalio import activity
from temporalio.client import Client, WorkflowHandle
from temporalio.exceptions import ApplicationError
from temporalio.service import RPCError
from temporalio.worker import PollerBehaviorSimpleMaximum, Worker

from activities.signals import SignalActivities
from activities.site import SiteActivities
from tests.workflows.left_out import no_event_left_out
from workflows.messages import (
    ApplyWorld,
    CheckConnection,
    CommandAnswer,
    CompleteGeneration,
    CreatedNode,
    Failure,
    FailureKind,
    Finished,
    GroupMissing,
    Heartbeat,
    Incarnation,
    Joined,
    LeaseRequest,
    LeaseTaken,
    NodeEvent,
    NodeEventKind,
    NodeEvents,
    NodeId,
    NodeRequest,
    NodesCreated,
    NodesRef,
    NodesRequest,
    RankExit,
    Ready,
    RestartCommand,
    SiteFacts,
    Stall,
    Stepping,
    StopNode,
    WatchRequest,
)
from workflows.names import node_name, watch_task_queue
from workflows.node_group import NodeGroup
from workflows.training_job import TrainingJob


def now() -> datetime:
    return datetime.now(UTC)


@dataclass
class PlayedNode:
    """One incarnation: an agent with a real worker on the node's own queue."""

    fleet: Fleet
    request: NodeRequest
    started_at: datetime = field(default_factory=now)
    generation: int = 0
    entered: int = 0
    worlds: list[ApplyWorld] = field(default_factory=list)
    completed: int = 0
    stages_complete: int = 0
    command_restarts: int = 0
    stopped: bool = False
    leaving: bool = False
    """Refuses worlds, as an agent does whose node is being ended."""
    refused: int = 0
    """The number of refused worlds."""
    silent: bool = False
    """Takes commands but does not step."""
    enters: bool = True
    """Its command runs, and enters each world that its agent takes."""
    asked_to_connect: list[CheckConnection] = field(default_factory=list)
    lease_epochs: list[int] = field(default_factory=list)
    lease_taken_at: datetime | None = None
    """When the newest lease came."""
    _to_job: Any = field(default_factory=lambda: count(1))
    _to_group: Any = field(default_factory=lambda: count(1))
    _worker: asyncio.Task[None] | None = None
    _ports: Any = field(default_factory=lambda: count(30_000))

    @property
    def rank(self) -> int:
        return self.request.node.rank

    @property
    def incarnation(self) -> int:
        return self.request.node.incarnation

    def ports(self) -> tuple[int, ...]:
        return tuple(next(self._ports) for _ in range(4))

    async def start(self) -> None:
        """The agent comes up: worker, `joined`, and soon `ready`."""
        await self.serve()
        await self.to_group("joined", Joined, agent_started_at=self.started_at, address="127.0.0.1", host="here")
        if self.fleet.become_ready:
            await self.ready()

    async def serve(self) -> None:
        """The agent can be reached, and says nothing."""
        worker = Worker(
            self.fleet.client,
            task_queue=self.request.task_queue,
            activities=[
                self.hold_lease,
                self.apply_world,
                self.check_connection,
                self.complete_generation,
                self.restart_command,
                self.stop_node,
            ],
            activity_task_poller_behavior=PollerBehaviorSimpleMaximum(1),
            max_concurrent_activities=8,
            max_heartbeat_throttle_interval=timedelta(seconds=1),
        )
        self._worker = asyncio.create_task(worker.run())

    async def die(self) -> None:
        """The agent goes without a word."""
        if self._worker is not None:
            self._worker.cancel()
            await asyncio.gather(self._worker, return_exceptions=True)
            self._worker = None

    async def restart(self) -> None:
        """A new agent beside the same training."""
        await self.die()
        self.started_at = now()
        ready, self.fleet.become_ready = self.fleet.become_ready, False
        await self.start()
        self.fleet.become_ready = ready

    async def join_again(self) -> None:
        """The agent holds no lease although the job runs."""
        await self.to_group("joined", Joined, agent_started_at=self.started_at, address="127.0.0.1", host="here")

    async def miss_group(self) -> None:
        """The server knows no open group."""
        await self.to_job("group_missing", GroupMissing)

    async def ready(self, after: int = 0, *, stage: int | None = None) -> None:
        await self.to_group("ready", Ready, after_generation=after, store_ports=self.ports(), stage=stage)

    async def step(self) -> None:
        await self.to_group("stepping", Stepping, generation=self.generation, entered_at=now())

    async def stall(self, since: datetime | None) -> None:
        """Its ranks have been stalled since then, or step again."""
        await self.to_group("stall", Stall, generation=self.generation, since=since)

    async def heartbeat(self, **fields: Any) -> None:
        await self.to_group("heartbeat", Heartbeat, generation=self.generation, **fields)

    async def rank_dies(self, *, signal: int | None = 9, error: str | None = None, **fields: Any) -> None:
        exit_code = None if signal else 1
        exits = (RankExit(local_rank=0, global_rank=self.rank, signal=signal, exit_code=exit_code, error=error),)
        await self.fail(kind=FailureKind.RANKS, ranks=exits, **fields)

    async def fail(self, **fields: Any) -> Failure:
        failure = Failure(
            sender=fields.pop("sender", self.request.node),
            sequence=fields.pop("sequence", None) or next(self._to_job),
            time=fields.pop("time", now()),
            generation=fields.pop("generation", self.generation),
            store_ports=self.ports(),
            **fields,
        )
        await self.fleet.client.get_workflow_handle(self.request.job_id).signal("failure", failure)
        return failure

    async def finish(self, generation: int | None = None, *, command_runs: bool = False) -> None:
        finished = Finished(
            sender=self.request.node,
            sequence=next(self._to_job),
            time=now(),
            generation=generation or self.generation,
            command_runs=command_runs,
        )
        await self.fleet.client.get_workflow_handle(self.request.job_id).signal("finished", finished)

    async def to_job(self, signal: str, message: type, **fields: Any) -> None:
        fields = {"sender": self.request.node, "sequence": next(self._to_job), "time": now()} | fields
        await self.fleet.client.get_workflow_handle(self.request.job_id).signal(signal, message(**fields))

    async def to_group(self, signal: str, message: type, **fields: Any) -> None:
        fields = {"sender": self.request.node, "sequence": next(self._to_group), "time": now()} | fields
        await self.fleet.client.get_workflow_handle(self.request.group_id).signal(signal, message(**fields))

    @activity.defn(name="hold_lease")
    async def hold_lease(self, request: LeaseRequest) -> None:
        self.lease_epochs.append(request.epoch)
        self.lease_taken_at = now()
        self.fleet.changed()
        await self.to_group("lease_taken", LeaseTaken, agent_started_at=self.started_at, epoch=request.epoch)
        while True:
            activity.heartbeat({"epoch": request.epoch})
            await asyncio.sleep(request.heartbeat.total_seconds())

    @activity.defn(name="apply_world")
    async def apply_world(self, world: ApplyWorld) -> CommandAnswer:
        if world.node != self.request.node:
            raise ApplicationError("not for this incarnation", non_retryable=True)
        if self.leaving:
            self.refused += 1
            self.fleet.changed()
        if self.leaving or world.generation < self.generation:
            return CommandAnswer(accepted=False, generation=self.generation)
        self.generation = world.generation
        self.worlds.append(world)
        self.fleet.changed()
        self.enters = self.enters or world.restart_command
        # It takes a moment to enter: longer than to answer.
        answer = CommandAnswer(accepted=True, generation=world.generation, entered=self.entered)
        if self.enters:
            self.entered = world.generation
        if self.enters and not self.silent:
            await self.step()
        return answer

    @activity.defn(name="check_connection")
    async def check_connection(self, command: CheckConnection) -> None:
        self.asked_to_connect.append(command)
        self.fleet.changed()
        if problem := self.fleet.cut_off.get(self.rank):
            raise ApplicationError(problem, type="CutOff")

    @activity.defn(name="complete_generation")
    async def complete_generation(self, request: CompleteGeneration) -> CommandAnswer:
        self.completed, self.stages_complete = request.generation, request.stages_complete
        self.fleet.changed()
        return CommandAnswer(accepted=True, generation=request.generation)

    @activity.defn(name="restart_command")
    async def restart_command(self, request: RestartCommand) -> CommandAnswer:
        self.command_restarts = request.number
        self.fleet.changed()
        return CommandAnswer(accepted=True, generation=self.generation)

    @activity.defn(name="stop_node")
    async def stop_node(self, request: StopNode) -> CommandAnswer:
        self.stopped = True
        self.fleet.changed()
        return CommandAnswer(accepted=True, generation=self.generation)


class Fleet:
    """The backend's activities, and the nodes that they made."""

    def __init__(self, client: Client, task_queue: str) -> None:
        self.client = client
        self.task_queue = task_queue
        self.nodes: dict[tuple[str, int, int], PlayedNode] = {}
        """The nodes of the newest job of each name."""
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
        """By rank, why no machine is given to it: the watch reports it before the node's maker has answered."""
        self.unseen: set[int] = set()
        """Ranks whose first incarnation is taken away before it is seen."""
        self.withhold_events = False
        self.delete_nothing = False
        """Nodes that are to be deleted stay."""
        self.watches = 0
        """The number of watches that were started."""
        self.watches_die = asyncio.Event()
        self.may_end = asyncio.Event()
        """Nodes that are deleted end."""
        self.may_end.set()
        self._away: set[str] = set()
        """Nodes that were made and are no more, without a request."""
        self._changed = asyncio.Event()

    def changed(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    def node(self, job_id: str, rank: int) -> PlayedNode:
        """The newest incarnation."""
        return max(
            (node for (job, slot, _), node in self.nodes.items() if job == job_id and slot == rank),
            key=lambda node: node.incarnation,
        )

    def started(self, node: PlayedNode) -> None:
        """A node that came by itself: it ends with the fleet."""
        self._started.append(node)

    def make_node(self, request: NodeRequest) -> PlayedNode:
        """An incarnation that has not started yet."""
        return PlayedNode(self, request)

    def workers(self, *, max_cached_workflows: int) -> tuple[Worker, Worker]:
        """Workers for both queues, with this fleet as the backend."""
        facts = SiteActivities(SiteFacts(search_attributes=True, backends=("local",)))
        return (
            Worker(
                self.client,
                task_queue=self.task_queue,
                workflows=[TrainingJob, NodeGroup],
                activities=[
                    self.create_node,
                    self.create_nodes,
                    self.delete_nodes,
                    *facts.all,
                    *SignalActivities(self.client).all,
                ],
                max_cached_workflows=max_cached_workflows,
                max_heartbeat_throttle_interval=timedelta(seconds=1),
            ),
            Worker(self.client, task_queue=watch_task_queue(self.task_queue), activities=[self.watch_nodes]),
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
            await self._make_for_ever(request.name)
        key = (request.job_id, rank, request.node.incarnation)
        if key not in self.nodes or self.nodes[key].request.node.uid != request.node.uid:
            node = self.nodes[key] = self.make_node(request)
            self._started.append(node)
            if rank in self.told_early:
                await self._tell_that_it_waits(request, self.told_early[rank])
            elif rank not in self.pending:
                await node.start()
        self.changed()
        return CreatedNode(name=request.name, address="127.0.0.1", host="here", pending=self.pending.get(rank, ""))

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

    async def _make_for_ever(self, name: str) -> None:
        self._making.add(name)
        try:
            while True:
                activity.heartbeat()
                await asyncio.sleep(0.1)
        finally:
            self._making.remove(name)

    @activity.defn(name="create_nodes")
    async def create_nodes(self, request: NodesRequest) -> NodesCreated:
        self.together.append(tuple(order.node.rank for order in request.orders))
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
    async def delete_nodes(self, request: NodesRef) -> None:
        while self.delete_nothing:
            activity.heartbeat()
            await asyncio.sleep(0.1)
        names = {ref.name for ref in request.nodes}
        self.deleted += sorted(names)
        self.deleted_too_early += sorted(names & self._making)
        while not self.may_end.is_set():
            activity.heartbeat()
            with suppress(TimeoutError):
                await asyncio.wait_for(self.may_end.wait(), 1)
        await asyncio.gather(*(node.die() for node in self._started if node.request.name in names))
        self.changed()

    @activity.defn(name="watch_nodes")
    async def watch_nodes(self, request: WatchRequest) -> None:
        """Tells of nodes that exist, of known ones that do not any more, and that the job has closed."""
        self.watches += 1
        job = self.client.get_workflow_handle(request.job_id)
        group = self.client.get_workflow_handle(request.group_id)
        told: set[tuple[int, int]] = set()
        waiting = [self._gone(node.rank, node.incarnation) for node in request.known if self._is_away(request, node)]
        while not self.watches_die.is_set():
            activity.heartbeat()
            waiting += self._news(request, told)
            described = await job.describe()
            owner_closed = (
                described.raw_description.workflow_execution_info.first_run_id != request.job_first_run_id
                or (described.status is not None and described.status.name != "RUNNING")
            )
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
        for (job_id, rank, incarnation), node in self.nodes.items():
            ours = job_id == request.job_id and node.request.group_id == request.group_id
            if not ours or node.request.name in self._away or (rank, incarnation) in told:
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


@asynccontextmanager
async def running_fleet(client: Client, *, max_cached_workflows: int = 1000) -> AsyncIterator[Fleet]:
    """Workers for both queues with a fleet behind them."""
    fleet = Fleet(client, f"perdure-{uuid4().hex[:8]}")
    main, watching = fleet.workers(max_cached_workflows=max_cached_workflows)
    with no_event_left_out():
        async with main, watching:
            try:
                yield fleet
            finally:
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
