"""Nodes that train like real ones, without processes: a real agent between the real server and a simulated command.

The agent is complete: its outboxes, leases, telemetry and decisions. Simulated are its launcher with one torchrun, and
the network between agent and server, which delays, duplicates and changes messages.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any

from perdure.agent.config import AgentConfig
from perdure.agent.job_liveness import JobLiveness
from perdure.agent.node import Node
from perdure.agent.process import Agent
from perdure.agent.transport import TemporalControlPlane
from perdure.contract import (
    AgentMessage,
    DatasetAnswer,
    DatasetRequest,
    Destination,
    Failure,
    NodeRequest,
    PortsChanged,
    StoreAnswers,
    StoreRequest,
)
from perdure_training.node_api.bodies import (
    CommandExit,
    EnteredReport,
    FinishedReport,
    HandlerHello,
    LauncherHello,
    RankExit,
    ReadyReport,
)
from tests.workflows.played_node import PlayedNode

if TYPE_CHECKING:
    from tests.workflows.adverse_site import AdverseSite

_PEER_LOST = "RuntimeError: [gloo] Connection closed by peer [127.0.0.1]:123"
_PIDS = count(1000)
_PORTS = count(30_000)


class AdverseNetwork:
    """Stands between an agent and the server."""

    def __init__(self, site: AdverseSite, config: AgentConfig) -> None:
        self._site = site
        self._config = config
        self._server = TemporalControlPlane(config, client=site.client)
        self.serving: asyncio.Task[Any] | None = None
        """Takes commands. An agent that ends does not wait for it: it usually ends with the process."""

    async def signal(self, message: AgentMessage) -> None:
        site, to, name = self._site, message.route.to, message.route.name
        workflow = self._config.job_id if to is Destination.JOB else self._config.group_id
        site.sent.append((workflow, name, message))
        await asyncio.sleep(site.delays.pop() if site.delays else 0)
        if site.words_of_the_next_release and (changed := _in_words_of_the_next_release(message)):
            site.words_of_the_next_release -= 1
            await site.client.get_workflow_handle(workflow).signal(name, changed)
            return
        await self._server.signal(message)
        if site.doubled:
            site.doubled -= 1
            await self._server.signal(message)

    async def exchange(self, dataset: str, request: DatasetRequest) -> DatasetAnswer:
        return await self._server.exchange(dataset, request)

    async def call_store(self, request: StoreRequest) -> StoreAnswers:
        return await self._server.call_store(request)

    async def job_liveness(self) -> JobLiveness:
        return await self._server.job_liveness()

    async def why_refused(self) -> str:
        return await self._server.why_refused()

    async def serve(self, commands: Sequence[Callable[..., Any]]) -> None:
        self.serving = asyncio.current_task()
        await self._server.serve(commands)


def _in_words_of_the_next_release(message: AgentMessage) -> dict[str, Any] | None:
    """The message as an agent of the next release may send it; None where it has no words that can be new."""
    body = message.model_dump(mode="json")
    match message:
        case Failure():
            return body | {"kind": "A_KIND_OF_THE_NEXT_RELEASE"}
        case PortsChanged():
            return body | {"a_field_of_the_next_release": 7}
        case _:
            return None


@dataclass
class Command:
    """One start of the command: a torchrun."""

    attempt: int
    pid: int
    asks: bool = False
    """It waits for a world."""
    left: int = 0
    """The newest world that it has left."""
    world: int = 0
    """The one that it is in."""
    steps: bool = False
    finished: bool = False
    """Its ranks have ended with 0, and it is in its exit barrier."""
    ending: bool = False


class TrainingNode(PlayedNode):
    """One incarnation: agent, launcher and command."""

    def __init__(self, site: AdverseSite, request: NodeRequest, run_dir: Path) -> None:
        super().__init__(site, request)
        self.site = site
        self.alive = True
        self.agent: Agent | None = None
        self.command: Command | None = None
        self.attempts = 0
        """Starts of the command."""
        self.entered = 0
        """The newest generation that the launcher entered."""
        self._network: AdverseNetwork | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self._reports: deque[Callable[[Node], None]] = deque()
        """Reports of the node's processes while their agent is away."""
        self.config = AgentConfig(
            node=request.node,
            job_id=request.job_id,
            job_first_run_id=request.job_first_run_id,
            group_id=request.group_id,
            task_queue=request.task_queue,
            address="127.0.0.1",
            host="here",
            nodes=str(request.spec.roles[request.node.role].nodes),
            run_dir=run_dir,
            timing=request.spec.timing,
            termination_grace=0.5,
        )

    # The node as its backend and its faults have it

    async def start(self) -> None:
        """The machine comes up."""
        self.start_agent()

    async def die(self) -> None:
        """The machine is gone, and with it what the agent had not delivered."""
        if self.alive:
            self.alive = False
            world = self.command.world if self.command is not None else 0
            self.command = None
            self.site.peers_notice(self, world)
        await self.agent_dies()

    async def agent_dies(self) -> None:
        """Training continues without it."""
        tasks, self._tasks, agent, network = self._tasks, [], self.agent, self._network
        self.agent = None
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if agent is not None:
            # A process closes everything with its end.
            agent._server.close()
            agent._checkpoints._socket.close()
            await asyncio.gather(*(asyncio.to_thread(exporter.close) for exporter in agent._events))
        if network is not None and network.serving is not None:
            await asyncio.gather(network.serving, return_exceptions=True)

    def start_agent(self) -> None:
        if not self.alive or self.agent is not None:
            return
        self._network = AdverseNetwork(self.site, self.config)
        self.agent = Agent(self.config, self._network)
        node = self.agent.node
        node.on_launcher_hello(LauncherHello(pid=1, attempt=self.attempts, mode="torchrun", processes=1))
        self._tasks = [asyncio.create_task(self.agent.run()), asyncio.create_task(self._follow_always(node))]
        if self.command is not None and self.command.asks:
            self._say_ready(self.command)

    async def _follow_always(self, node: Node) -> None:
        while True:
            self.follow()
            seen = node.state
            await node.changed.wait_for(lambda seen=seen: node.state is not seen)

    # The launcher and its command

    def follow(self) -> None:
        """Says what the agent has not heard, and makes true what it wants."""
        if self.agent is None:
            return
        node = self.agent.node
        while self._reports:
            self._reports.popleft()(node)
        desired, command = node.state.desired, self.command
        if command is None:
            if desired.exit:
                # The launcher leaves, and the node is gone with it.
                self.alive = False
                self.site.changed()
            elif desired.run and desired.attempt > self.attempts:
                self.attempts = desired.attempt
                started = self.command = Command(desired.attempt, next(_PIDS))
                self.site.after(0.1, lambda: self._comes_to_the_rendezvous(started))
        elif command.ending:
            pass
        elif desired.exit or desired.attempt > command.attempt:
            self.end_command(signal=15)
        elif command.asks:
            world = node.state.world_for(0)
            if world is not None and world.generation > command.left:
                self._enter(command, world.generation)
        elif command.finished and node.state.complete >= command.world:
            self.end_command(exit_code=0)
        elif command.world and node.state.generation > command.world:
            if command.finished:
                self.end_command(exit_code=87, superseded=True)
            else:
                command.left, command.world, command.steps, command.asks = command.world, 0, False, True
                self.site.after(0.05, self.follow)

    def _say(self, report: Callable[[Node], None]) -> None:
        self._reports.append(report)
        self.follow()

    def _comes_to_the_rendezvous(self, command: Command) -> None:
        if command is not self.command or command.ending:
            return
        if self.site.hangs:
            self.site.hangs -= 1
            return
        command.asks, command.left = True, self.entered
        hello = HandlerHello(pid=command.pid, min_nodes=1, max_nodes=9, processes=1)
        self._say(lambda node: node.on_handler_hello(hello))
        self._say_ready(command)

    def _say_ready(self, command: Command) -> None:
        body = ReadyReport(after_generation=command.left, store_ports=_ports())
        self._say(lambda node: node.on_ready(body))

    def _enter(self, command: Command, generation: int) -> None:
        command.asks, command.world, command.steps = False, generation, False
        self.entered = generation
        body = EnteredReport(generation=generation, time=datetime.now(UTC).timestamp(), store_ports=_ports())
        self._say(lambda node: node.on_entered(body))
        self.site.after(0.02, self.site.step)

    def step(self) -> None:
        """Its ranks make their first step, as all others of their world do."""
        command = self.command
        assert command is not None
        command.steps = True
        generation = command.world
        self._say(lambda node: node.training.report_stepping(generation, counted=True, starts=None))

    def finish(self) -> None:
        """Its ranks end with 0."""
        command = self.command
        if command is not None and command.steps:
            command.finished = True
            body = FinishedReport(generation=command.world, time=datetime.now(UTC).timestamp())
            self._say(lambda node: node.on_finished(body))

    def end_command(
        self,
        *,
        signal: int | None = None,
        exit_code: int | None = None,
        superseded: bool = False,
        dying: float = 0.0,
    ) -> None:
        """The command ends, and takes a while to be gone."""
        command = self.command
        if command is None or command.ending:
            return
        stepped, command.ending, command.steps = command.steps, True, False
        body = CommandExit(
            attempt=command.attempt,
            generation=self.entered,
            signal=signal,
            exit_code=exit_code,
            superseded=superseded,
            time=datetime.now(UTC).timestamp(),
        )

        def gone() -> None:
            if self.command is command:
                self.command = None
                self._say(lambda node: node.on_exited(body))

        self.site.after(dying, gone)
        if stepped and not command.finished:
            self.site.peers_notice(self, command.world)

    def ranks_fail(self, *, victim: bool = False) -> None:
        """torchrun lives and asks for the next world."""
        command = self.command
        if command is None or command.ending or command.finished or not command.world:
            return
        world, command.left = command.world, command.world
        command.world, command.steps, command.asks = 0, False, True
        how: dict[str, Any] = {"exit_code": 1, "error": _PEER_LOST} if victim else {"signal": 9}
        rank = RankExit(local_rank=0, pid=next(_PIDS), time=datetime.now(UTC).timestamp(), **how)
        body = ReadyReport(after_generation=world, ranks=(rank,), store_ports=_ports())
        self._say(lambda node: node.on_ready(body))
        self.site.peers_notice(self, world)
        self.follow()


def _ports() -> tuple[int, ...]:
    return tuple(next(_PORTS) for _ in range(4))
