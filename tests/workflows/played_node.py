"""A simulated node: its agent's worker is real, and sends the reports that a test asks for."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from itertools import count
from typing import TYPE_CHECKING, Any, Literal

from temporalio import activity
from temporalio.client import Client
from temporalio.common import RawValue
from temporalio.exceptions import ApplicationError
from temporalio.worker import PollerBehaviorSimpleMaximum, Worker

from perdure.contract import (
    ApplyDesired,
    CheckConnection,
    Failure,
    FailureKind,
    Finished,
    GroupMissing,
    Joined,
    LeaseRequest,
    LeaseTaken,
    NodeDesired,
    NodeReached,
    NodeRequest,
    PortsChanged,
    RankExit,
    Ready,
    Stall,
    Stepping,
    StopRequest,
    StoreChanged,
    World,
)

if TYPE_CHECKING:
    from tests.workflows.fleet import Fleet


def now() -> datetime:
    return datetime.now(UTC)


@dataclass
class PlayedNode:
    """One incarnation: an agent with a real worker on the node's own queue."""

    fleet: Fleet
    request: NodeRequest
    started_at: datetime = field(default_factory=now)
    version: int = 0
    """Of the newest desired state that it was sent."""
    world: World | None = None
    inquiry: int = 0
    generation: int = 0
    entered: int = 0
    worlds: list[World] = field(default_factory=list)
    completed: int = 0
    stages_complete: int = 0
    command_restarts: int = 0
    unpacks_roles: bool = True
    """Its agent is not of an older release, which is told all roles as they are."""
    desired: NodeDesired = field(default_factory=NodeDesired)
    """The newest that it was sent."""
    stopped: bool = False
    store_changes: int = 0
    """The number of times that the store notified it."""
    leaving: bool = False
    """Refuses worlds, as an agent does whose node is being ended."""
    refused: int = 0
    """The number of refused worlds."""
    fails: str = ""
    """The error with which its agent answers each desired state, while its lease holds."""
    writes: RawValue | None = None
    """What another program writes in its place, and where; None: nothing."""
    writes_as: Literal["answer", "details", "heartbeat"] = "answer"
    silent: bool = False
    """Takes commands but does not step."""
    enters: bool = True
    """Its command runs, and enters each world that its agent takes."""
    asked_to_connect: list[CheckConnection] = field(default_factory=list)
    lease_epochs: list[int] = field(default_factory=list)
    lease_taken_at: datetime | None = None
    """When the newest lease came."""
    renews: bool = True
    """Its agent renews its lease."""
    renewals: int = 0
    """The number of times that it renewed a lease, whether or not the server heard it."""
    leases_left: int = 0
    """The number of leases that it no longer holds."""
    _client: Client | None = None
    _to_job: Any = field(default_factory=lambda: count(1))
    _to_group: Any = field(default_factory=lambda: count(1))
    _worker: asyncio.Task[None] | None = None
    _ports: Any = field(default_factory=lambda: count(30_000))

    @property
    def rank(self) -> int:
        return self.request.node.rank

    @property
    def client(self) -> Client:
        return self._client or self.fleet.client

    @property
    def incarnation(self) -> int:
        return self.request.node.incarnation

    def ports(self) -> tuple[int, ...]:
        return tuple(next(self._ports) for _ in range(4))

    async def start(self) -> None:
        """The agent comes up: worker, `joined`, and soon `ready`."""
        await self.serve()
        await self.to_group(
            "joined",
            Joined,
            agent_started_at=self.started_at,
            address="127.0.0.1",
            host="here",
            unpacks_roles=self.unpacks_roles,
        )
        if self.fleet.become_ready:
            await self.ready()

    async def serve(self) -> None:
        """The agent can be reached, and says nothing."""
        self._client = await self.fleet.agent_client(self.request)
        worker = Worker(
            self._client,
            task_queue=self.request.task_queue,
            activities=[
                self.hold_lease,
                self.apply_desired,
                self.check_connection,
                self.store_changed,
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

    async def ready(self, after: int = 0, *, stage: int = 0) -> None:
        await self.to_group("ready", Ready, after_generation=after, store_ports=self.ports(), stage=stage)

    async def step(self) -> None:
        await self.to_group("stepping", Stepping, generation=self.generation, entered_at=now())

    async def stall(self, since: datetime | None) -> None:
        """Its ranks have been stalled since then, or step again."""
        await self.to_group("stall", Stall, generation=self.generation, since=since)

    async def report(self, **fields: Any) -> None:
        await self.to_group("ports_changed", PortsChanged, **fields)

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
        await self.client.get_workflow_handle(self.request.job_id).signal("failure", failure)
        return failure

    async def finish(self, generation: int | None = None, *, command_runs: bool = False) -> None:
        finished = Finished(
            sender=self.request.node,
            sequence=next(self._to_job),
            time=now(),
            generation=generation or self.generation,
            command_runs=command_runs,
        )
        await self.client.get_workflow_handle(self.request.job_id).signal("finished", finished)

    async def to_job(self, signal: str, message: type, **fields: Any) -> None:
        fields = {"sender": self.request.node, "sequence": next(self._to_job), "time": now()} | fields
        await self.client.get_workflow_handle(self.request.job_id).signal(signal, message(**fields))

    async def to_group(self, signal: str, message: type, **fields: Any) -> None:
        fields = {"sender": self.request.node, "sequence": next(self._to_group), "time": now()} | fields
        await self.client.get_workflow_handle(self.request.group_id).signal(signal, message(**fields))

    @activity.defn(name="hold_lease")
    async def hold_lease(self, request: LeaseRequest) -> None:
        self.lease_epochs.append(request.epoch)
        self.lease_taken_at = now()
        self.fleet.changed()
        await self.to_group("lease_taken", LeaseTaken, agent_started_at=self.started_at, epoch=request.epoch)
        try:
            while True:
                if self.writes is not None and self.writes_as == "heartbeat":
                    activity.heartbeat(self.writes)
                    await asyncio.Event().wait()
                if self.renews:
                    activity.heartbeat({"epoch": request.epoch})
                    self.renewals += 1
                await asyncio.sleep(request.heartbeat.total_seconds())
        finally:
            self.leases_left += 1

    @activity.defn(name="apply_desired")
    async def apply_desired(self, command: ApplyDesired) -> NodeReached | RawValue:
        if command.node != self.request.node:
            raise ApplicationError("not for this incarnation", non_retryable=True)
        if self.fails:
            raise ApplicationError(self.fails)
        if self.writes is not None and self.writes_as == "answer":
            return self.writes
        if self.writes is not None and self.writes_as == "details":
            raise ApplicationError("no", self.writes, non_retryable=True)
        if command.version < self.version:
            return NodeReached(accepted=False, version=self.version)
        desired, self.version = command.desired, command.version
        self.desired = desired
        self.completed, self.stages_complete = desired.complete_generation, desired.stages_complete
        self.command_restarts = desired.command_restarts
        if desired.stop is not None:
            await self.stop(desired.stop)
        accepted, entered = True, self.entered
        if desired.world is not None and (desired.world != self.world or desired.inquiry != self.inquiry):
            accepted = await self._take_world(desired.world)
            self.inquiry = desired.inquiry
        self.fleet.changed()
        # It takes a moment to enter: longer than to answer.
        return NodeReached(accepted=accepted, version=self.version, generation=self.generation, entered=entered)

    async def _take_world(self, world: World) -> bool:
        if self.leaving:
            self.refused += 1
        if self.leaving or world.generation < self.generation:
            return False
        self.world, self.generation = world, world.generation
        self.worlds.append(world)
        self.enters = self.enters or world.members[self.rank].restart_command
        if self.enters:
            self.entered = world.generation
            if not self.silent:
                await self.step()
        return True

    async def stop(self, request: StopRequest) -> None:
        """Ends, as its group requests."""
        self.stopped = True

    @activity.defn(name="check_connection")
    async def check_connection(self, command: CheckConnection) -> None:
        self.asked_to_connect.append(command)
        self.fleet.changed()
        if problem := self.fleet.cut_off.get(self.rank):
            raise ApplicationError(problem, type="CutOff")

    @activity.defn(name="store_changed")
    async def store_changed(self, command: StoreChanged) -> None:
        assert command.node == self.request.node
        self.store_changes += 1
        self.fleet.changed()
