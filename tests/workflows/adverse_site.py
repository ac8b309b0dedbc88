"""A job's complete site with overlapping faults: a real server, workers that stop and start, and nodes that train."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from uuid import uuid4

from temporalio.client import Client
from temporalio.service import RPCError

from perdure.contract import AgentMessage, JobStatus, NodeRequest
from tests.workflows.fleet import Fleet
from tests.workflows.left_out import no_event_left_out
from tests.workflows.played_node import PlayedNode
from tests.workflows.training_node import TrainingNode

FAULTS = (
    "rank",
    "torchrun",
    "all torchruns, slow to die",
    "torchrun, and the next one hangs",
    "node",
    "node, unseen",
    "agent",
    "report is late",
    "report is doubled",
    "report of an older incarnation",
    "report in words of the next release",
    "group",
    "worker",
)


class AdverseSite(Fleet):
    """The backend, the workers, and every node."""

    def __init__(self, client: Client, folder: Path, chance: random.Random, *, max_cached_workflows: int) -> None:
        super().__init__(client, f"perdure-{uuid4().hex[:8]}")
        self.chance = chance
        self._folder = folder
        self._max_cached = max_cached_workflows
        self._workers: AsyncExitStack | None = None
        self._coming_back: set[asyncio.Task[None]] = set()
        self.sent: list[tuple[str, str, AgentMessage]] = []
        """All messages of agents: workflow, signal and message."""
        self.delays: list[float] = []
        """The delays of the next messages, in seconds."""
        self.doubled = 0
        """So many of the next messages arrive twice."""
        self.words_of_the_next_release = 0
        """So many of the next messages have words that this release does not know."""
        self.hangs = 0
        """So many of the next commands do not come to the rendezvous."""

    def make_node(self, request: NodeRequest) -> PlayedNode:
        run_dir = self._folder / f"{request.node.rank}.{request.node.incarnation}"
        run_dir.mkdir()
        return TrainingNode(self, request, run_dir)

    def after(self, seconds: float, action: Callable[[], None]) -> None:
        asyncio.get_running_loop().call_later(seconds, action)

    # Nodes

    @property
    def training_nodes(self) -> list[TrainingNode]:
        return [node for node in self.nodes.values() if isinstance(node, TrainingNode) and node.alive]

    def inside(self, generation: int) -> list[TrainingNode]:
        """Nodes whose ranks are in this world."""
        return [node for node in self.training_nodes if node.command is not None and node.command.world == generation]

    def step(self) -> None:
        """Worlds that are whole make their first step."""
        for node in self.training_nodes:
            command = node.command
            if command is None or not command.world or command.steps or node.agent is None:
                continue
            together, world = self.inside(command.world), node.agent.node.state.world
            if world is not None and world.generation == command.world and len(together) == world.nodes:
                for one in together:
                    one.step()
        self.changed()

    def peers_notice(self, gone: TrainingNode, generation: int) -> None:
        """Ranks that were connected to those of a node fail soon."""
        for peer in self.inside(generation) if generation else ():
            command = peer.command
            if peer is gone or command is None or not command.steps or command.finished:
                continue
            command.steps = False

            def fail(peer: TrainingNode = peer) -> None:
                if peer.command is not None and peer.command.world == generation:
                    peer.ranks_fail(victim=True)

            self.after(self.chance.choice((0.01, 0.1, 0.4)), fail)

    def trains(self, nodes: int) -> bool:
        """So many nodes step, in the newest world."""
        newest = max((node.entered for node in self.training_nodes), default=0)
        stepping = [node for node in self.inside(newest) if node.command is not None and node.command.steps]
        return bool(newest) and len(stepping) == nodes

    # Faults

    async def inflict(self, fault: str) -> None:
        """Does one node, or the job, something; returns at once."""
        chance, nodes = self.chance, sorted(self.training_nodes, key=lambda node: node.rank)
        which = chance.random()
        node = nodes[int(which * len(nodes))] if nodes else None
        match fault:
            case "rank" if node:
                node.ranks_fail()
            case "torchrun" if node:
                node.end_command(signal=9)
            case "all torchruns, slow to die":
                for one in nodes:
                    one.end_command(signal=9, dying=chance.choice((0.0, 0.2, 1.0)))
            case "torchrun, and the next one hangs" if node:
                self.hangs += 1
                node.end_command(signal=9)
            case "node" if node:
                with suppress(RPCError):
                    await self.lose(node)
            case "node, unseen" if node:
                seen, self.withhold_events = self.withhold_events, True
                await self.lose(node)
                self.withhold_events = seen
            case "agent" if node:
                await node.agent_dies()
                self._later(chance.choice((0.1, 1.0, 4.0)), node.start_agent)
            case "report is late":
                self.delays += [chance.choice((0.3, 1.0, 2.0)) for _ in range(2)]
            case "report is doubled":
                self.doubled += 3
            case "report of an older incarnation":
                await self._repeat_old_reports()
            case "report in words of the next release":
                self.words_of_the_next_release += 2
            case "group":
                await self._terminate_group()
            case "worker":
                await self.stop_workers()
                self._later(chance.choice((0.1, 1.0, 3.0)), self.start_workers)
            case _:
                pass

    def _later(self, seconds: float, action: Callable[[], Any]) -> None:
        async def act() -> None:
            await asyncio.sleep(seconds)
            result = action()
            if asyncio.iscoroutine(result):
                await result

        task = asyncio.create_task(act())
        self._coming_back.add(task)
        task.add_done_callback(self._coming_back.discard)

    async def _repeat_old_reports(self) -> None:
        current = [node.request.node for node in self.training_nodes]
        old = [one for one in self.sent if one[2].sender not in current][-5:]
        for workflow, name, message in old:
            with suppress(RPCError):
                await self.client.get_workflow_handle(workflow).signal(name, message)

    async def _terminate_group(self) -> None:
        for node in self.training_nodes[:1]:
            with suppress(RPCError):
                await self.client.get_workflow_handle(node.request.group_id).terminate("by hand")

    # Workers

    async def start_workers(self) -> None:
        if self._workers is None:
            self._workers = AsyncExitStack()
            for worker in self.workers(max_cached_workflows=self._max_cached):
                await self._workers.enter_async_context(worker)
            self.withhold_events = False

    async def stop_workers(self) -> None:
        workers, self._workers = self._workers, None
        if workers is not None:
            # What happens to nodes meanwhile is seen by no watch.
            self.withhold_events = True
            await workers.aclose()

    async def mend(self) -> None:
        """No more faults: what was to come back is back."""
        while self._coming_back:
            await asyncio.wait(self._coming_back)
        self.delays.clear()
        self.doubled = self.words_of_the_next_release = self.hangs = 0

    # For tests

    async def until(self, condition: Callable[[], bool]) -> None:
        """Waits for what changes at this site."""
        while not condition():
            await self._changed.wait()

    def story(self, status: JobStatus | None) -> str:
        """Describes the state of everything, for a test that fails."""
        nodes = "; ".join(
            f"{node.rank}.{node.incarnation} {node.agent.node.state.summary if node.agent else 'no agent'}"
            f" gen {node.agent.node.state.generation if node.agent else '?'} {node.command}"
            for node in self.training_nodes
        )
        return f"{status} | {nodes}"


@asynccontextmanager
async def adverse_site(
    client: Client, chance: random.Random, *, max_cached_workflows: int
) -> AsyncIterator[AdverseSite]:
    """A site whose workers run."""
    # Sockets have short paths.
    with TemporaryDirectory(prefix="pd-") as folder, no_event_left_out():
        site = AdverseSite(client, Path(folder), chance, max_cached_workflows=max_cached_workflows)
        await site.start_workers()
        try:
            yield site
        finally:
            await site.mend()
            await site.stop_workers()
            await site.close()
