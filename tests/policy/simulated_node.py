"""Nodes of a simulated site: an agent's real decisions, between a simulated launcher and a simulated command."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from perdure.agent.config import AgentConfig
from perdure.agent.node import Node
from perdure.agent.state import AgentState, StateFile
from perdure.contract import (
    AgentMessage,
    Failure,
    Finished,
    Joined,
    LeaseTaken,
    NodeCredentials,
    NodeEvent,
    NodeEventKind,
    PortsChanged,
    Progress,
    Ready,
    Stepping,
)
from perdure.contract.transitions import NodeUnreachable
from perdure.workflows import agent_reports
from perdure_training.node_api.bodies import (
    CommandExit,
    EnteredReport,
    HandlerHello,
    LauncherHello,
    RankExit,
    ReadyReport,
)

if TYPE_CHECKING:
    from tests.policy.simulated_site import Site

LAPSE = 10.0
"""Seconds after which a lease that is not renewed lapses."""
PEER_LOST = "RuntimeError: [gloo] Connection closed by peer [10.0.0.1]:123"


class _Memory:
    """An agent's state, kept nowhere else."""

    stale = False

    def load(self) -> AgentState:
        return AgentState()

    def save(self, state: AgentState) -> None:
        """Nothing to do."""


@dataclass
class _Outbox:
    """The messages of one agent for one destination."""

    agent: SimulatedNode
    take: Callable[[AgentMessage], None]
    waiting: list[AgentMessage] = field(default_factory=list[AgentMessage])
    sending: bool = False

    def put(self, message: AgentMessage, *, first: bool = False) -> None:
        del first
        sequence = next(self.agent.sequences)
        self.waiting.append(message.model_copy(update={"sequence": sequence, "time": self.agent.site.job.now}))
        self._send_soon()

    def _send_soon(self) -> None:
        if not self.sending:
            self.sending = True
            self.agent.site.after(self.agent.site.delay(), self._send)

    def _send(self) -> None:
        site = self.agent.site
        self.sending = False
        if not self.agent.machine or not self.waiting:
            return
        if not self.agent.connected:
            self.sending = True
            site.after(5.0, self._send)
            return
        message = self.waiting.pop(0)
        self.take(message)
        if site.faulty and site.chance.random() < 0.2:
            site.after(site.delay(), lambda: self.take(message))
        if self.waiting:
            self._send_soon()


@dataclass
class _Process:
    """One start of the command."""

    attempt: int
    number: int
    after: int = 0
    """The newest world that it has left."""
    waits: bool = False
    inside: int = 0
    """The world that it is in."""
    steps: bool = False
    ending: bool = False


class SimulatedNode:
    """One incarnation: machine, agent, launcher and command."""

    def __init__(self, site: Site, identity: NodeCredentials) -> None:
        self.site, self.identity = site, identity
        self.machine = True
        self.connected = True
        self.sequences = count(1)
        self.lease_epoch = count(1)
        self.to_group = _Outbox(self, self._group_takes)
        self.to_job = _Outbox(self, self._job_takes)
        self.process: _Process | None = None
        self.started = 0
        self.entered = 0
        """The newest generation that the launcher entered."""
        self.overdue_since: tuple[int, float] = (0, 0.0)
        config = AgentConfig(
            node=identity,
            job_id="job/a/b",
            job_first_run_id="first",
            group_id="group",
            task_queue="queue",
            address=f"10.0.0.{identity.rank}",
            nodes=site.nodes,
            run_dir=Path("/nowhere"),
            timing=site.job.job.timing,
        )
        self.node = Node(
            config,
            cast(StateFile, _Memory()),
            to_job=self.to_job,
            to_group=self.to_group,
            progress=Progress,
        )
        self.node.on_launcher_hello(LauncherHello(pid=1, mode="torchrun", processes=1))
        self.to_group.put(Joined(**self._envelope(), agent_started_at=site.job.now, address=config.address, host="h"))

    def _envelope(self) -> Any:
        return {"sender": self.identity, "sequence": 1, "time": self.site.job.now}

    def _group_takes(self, message: AgentMessage) -> None:
        table = self.site.table
        match message:
            case Joined():
                agent_reports.joined(table, message)
            case Ready():
                agent_reports.ready(table, message)
            case Stepping():
                agent_reports.stepping(table, message)
            case PortsChanged():
                agent_reports.ports_changed(table, message)
            case LeaseTaken():
                agent_reports.lease_taken(table, message)
            case _:
                pass
        self.site.reconcile()

    def _job_takes(self, message: AgentMessage) -> None:
        if isinstance(message, Failure | Finished):
            self.site.take(message)

    # The launcher and its command

    def follow(self) -> None:
        """Makes true what the agent wants."""
        if not self.machine:
            return
        self._watch_for_overdue()
        desired, process = self.node.state.desired, self.process
        if process is None:
            if desired.run and not desired.exit and desired.attempt > self.started:
                self.started = desired.attempt
                started = self.process = _Process(desired.attempt, next(self.site.numbers))
                self.site.after(1.0, lambda: self._comes_to_the_rendezvous(started))
        elif not process.ending:
            if desired.exit or desired.attempt > process.attempt:
                self.end_command(signal=15)
            elif process.waits:
                self._enter(process)
            elif process.inside and self.node.state.generation > process.inside:
                process.after, process.inside, process.steps, process.waits = process.inside, 0, False, True
                self.site.after(0.3, self.follow)

    def _watch_for_overdue(self) -> None:
        generation = self.node.state.generation
        if self.overdue_since[0] == generation:
            return
        self.overdue_since = (generation, self.site.clock)
        patience = self.site.job.job.timing.rendezvous.enter_timeout.total_seconds()

        def look() -> None:
            if self.machine and self.node.state.generation == generation and self.site.agents_report_overdue:
                self.node.report_overdue()

        self.site.after(patience, look)

    def _comes_to_the_rendezvous(self, process: _Process) -> None:
        if process is not self.process or process.ending or not self.machine:
            return
        if self.site.hangs_at_start(self):
            return
        hello = HandlerHello(pid=process.number, min_nodes=1, max_nodes=9, processes=1)
        self.node.on_handler_hello(hello)
        process.waits, process.after = True, self.entered
        self.node.on_ready(ReadyReport(after_generation=0, store_ports=self.site.ports()))
        self.follow()

    def _enter(self, process: _Process) -> None:
        world = self.node.state.world_for(0)
        if world is not None and world.generation > max(process.after, process.inside):
            process.waits, process.inside, process.steps = False, world.generation, False
            self.entered = world.generation
            ports = self.site.ports()
            self.node.on_entered(
                EnteredReport(generation=world.generation, time=self.site.job.now.timestamp(), store_ports=ports)
            )
            self.to_group.put(PortsChanged(**self._envelope(), store_ports=ports))
            self.site.after(0.2, self.site.step)

    def end_command(self, *, signal: int | None = None, code: int | None = None, dying: float = 0.0) -> None:
        """The command ends, and takes a while to be gone."""
        process = self.process
        if process is None or process.ending:
            return
        process.ending, process.steps = True, False
        ended_at, inside, attempt = self.site.job.now, process.inside, process.attempt

        def gone() -> None:
            self.process = None
            if self.machine:
                body = CommandExit(
                    attempt=attempt,
                    generation=self.entered,
                    signal=signal,
                    exit_code=code,
                    time=ended_at.timestamp(),
                )
                self.node.on_exited(body)
                self.follow()

        self.site.after(dying, gone)
        self.site.peers_notice(self, inside)

    def ranks_fail(self, *, victim: bool) -> None:
        """torchrun lives and asks for the next world."""
        process = self.process
        if process is None or process.ending or not process.inside or not self.machine:
            return
        generation, process.after = process.inside, process.inside
        process.inside, process.steps, process.waits = 0, False, True
        how: dict[str, Any] = {"exit_code": 1, "error": PEER_LOST} if victim else {"signal": 9}
        rank = RankExit(local_rank=0, pid=next(self.site.numbers), time=self.site.job.now.timestamp(), **how)
        self.node.on_ready(ReadyReport(after_generation=generation, ranks=(rank,), store_ports=self.site.ports()))
        self.site.peers_notice(self, generation)
        self.follow()

    # Faults of the node

    def disconnect(self, seconds: float) -> None:
        """The agent does not reach the control plane for a while."""
        if not self.connected or not self.machine:
            return
        self.connected = False
        self.site.after(LAPSE, self._lapse)
        self.site.after(seconds, self.connect)

    def connect(self) -> None:
        if self.machine and not self.connected:
            self.connected = True
            record = self.site.table.current(self.identity)
            epoch = record.epoch if record is not None else 0
            self.to_group.put(LeaseTaken(**self._envelope(), agent_started_at=self.site.job.now, epoch=epoch))

    def _lapse(self) -> None:
        record = self.site.table.current(self.identity)
        if (self.machine and self.connected) or record is None or not record.joined or not record.reachable:
            return
        self.site.table.put(record.replace(unreachable_since=self.site.job.now, reason="silent"))
        self.site.transition(record, NodeUnreachable, detail="silent")

    def crash(self, *, seen_after: float | None) -> None:
        """The machine is gone, and with it what its agent had not delivered; its backend may see that."""
        if not self.machine:
            return
        inside = self.process.inside if self.process is not None else 0
        self.machine, self.process = False, None
        self.site.after(LAPSE, self._lapse)
        self.site.peers_notice(self, inside, silent=seen_after is None)
        if seen_after is not None:
            event = NodeEvent(
                kind=NodeEventKind.GONE,
                rank=self.identity.rank,
                incarnation=self.identity.incarnation,
                time=self.site.job.now,
                reason="killed",
            )
            self.site.after(seen_after, lambda: self.site.backend_says(event))
