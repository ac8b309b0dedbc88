"""Simulates the agents of pods in which nothing runs: `python -m benchmarks.kubernetes.agents`, many per process.

Each agent has a worker and a queue of its own, takes leases and worlds, and sends heartbeats at the real agents' rate;
its reports about processes are made up. It starts when its pod runs, and ends without a shutdown report when its pod is
gone. Several agents share a connection: a thousand connections would burden the machine, which the server uses as well.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import sys
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from temporalio import activity
from temporalio.client import Client
from temporalio.envconfig import ClientConfig

from perdure.activities.nodes.kubernetes.pod import INCARNATION, PREPARE, RANK
from perdure.agent.config import AgentConfig
from perdure.agent.outbox import Outbox, envelope, spread_of
from perdure.agent.transport import TemporalControlPlane, shared_runtime
from perdure.base.encryption.codec import PayloadEncryption
from perdure.base.kubernetes import Changed, KubernetesApi, Listed, Object, Removed
from perdure.base.services import leave
from perdure.contract import (
    AgentMessage,
    ApplyDesired,
    CheckConnection,
    Joined,
    LeaseRequest,
    LeaseTaken,
    LeaseView,
    NodeReached,
    Ready,
    Stepping,
)

CONNECTIONS = 8


@dataclass
class Tally:
    """Counts of this process's agents and leases."""

    agents: int = 0
    held: int = 0
    lost: int = 0
    late: int = 0


class PlayedAgent:
    """The simulated agent of one incarnation."""

    def __init__(self, config: AgentConfig, tally: Tally, client: Client) -> None:
        self._config = config
        self._tally = tally
        self._control = TemporalControlPlane(config, client=client)
        self._outbox = Outbox(
            config.run_dir / "outbox.json",
            send=self._control.signal,
            not_found=lambda: None,
            spread=spread_of(config.most_nodes),
        )
        self._started_at = datetime.now(UTC)
        self._generation = 0
        self._last: tuple[str, int] = ("", 0)
        self._turn = 0

    async def run(self) -> None:
        """Runs until it is cancelled."""
        self._tally.agents += 1
        try:
            async with asyncio.TaskGroup() as tasks:
                commands = (
                    self.hold_lease,
                    self.apply_desired,
                    self.check_connection,
                )
                tasks.create_task(self._control.serve(commands))
                tasks.create_task(self._outbox.run())
                self._say(Joined, agent_started_at=self._started_at, address=self._config.address)
                self._say(Ready, store_ports=(29500, 29501, 29502, 29503))
        finally:
            self._tally.agents -= 1

    @activity.defn(name="hold_lease")
    async def hold_lease(self, request: LeaseRequest) -> None:
        info = activity.info()
        run, epoch = self._last
        if info.attempt > 1:
            self._tally.late += 1
        elif run == info.workflow_run_id and request.epoch > epoch:
            # A group that continues as new grants all its leases again, in a new run.
            self._tally.lost += 1
        self._last = (info.workflow_run_id or "", request.epoch)
        self._turn += 1
        turn = self._turn
        self._say(LeaseTaken, agent_started_at=self._started_at, epoch=request.epoch)
        self._tally.held += 1
        try:
            while turn == self._turn:
                activity.heartbeat(LeaseView(epoch=request.epoch, generation=self._generation, time=datetime.now(UTC)))
                await asyncio.sleep(request.heartbeat.total_seconds())
        finally:
            self._tally.held -= 1

    @activity.defn(name="apply_desired")
    async def apply_desired(self, command: ApplyDesired) -> NodeReached:
        world = command.desired.world
        if world is not None and world.generation > self._generation:
            self._generation = world.generation
            self._say(Stepping, generation=world.generation, entered_at=datetime.now(UTC))
        return NodeReached(
            accepted=True, version=command.version, generation=self._generation, entered=self._generation
        )

    @activity.defn(name="check_connection")
    async def check_connection(self, command: CheckConnection) -> None:
        """Succeeds: all nodes are on this machine."""

    def _say(self, kind: type[AgentMessage], **facts: Any) -> None:
        """Sends a message through a real agent's outbox, which retries, and spreads messages over time."""
        self._outbox.put(kind(**envelope(self._config.node), **facts))


async def play(kubeconfig: str, namespace: str, share: int, shares: int, folder: Path) -> None:
    """Simulates the agents of every n-th rank, and prints their counts each second."""
    tally = Tally()
    playing: dict[str, asyncio.Task[None]] = {}
    connections = itertools.cycle([await _connection() for _ in range(CONNECTIONS)])

    async def agent(config: AgentConfig) -> None:
        await PlayedAgent(config, tally, next(connections)).run()

    def seen(pod: Object) -> None:
        labels = pod["metadata"]["labels"]
        name = pod["metadata"]["name"]
        ours = int(labels[RANK]) % shares == share and name not in playing
        if ours and pod["status"].get("phase") == "Running":
            run_dir = folder / name
            run_dir.mkdir()
            playing[name] = asyncio.create_task(agent(_configuration(pod, run_dir)))

    def gone(name: str) -> None:
        if task := playing.pop(name, None):
            task.cancel()

    reporting = asyncio.create_task(_report(tally))
    api = await KubernetesApi.connect(kubeconfig)
    async with contextlib.aclosing(api.follow(f"/api/v1/namespaces/{namespace}/pods", labels=INCARNATION)) as changes:
        async for change in changes:
            match change:
                case Listed(pods):
                    for name in playing.keys() - {pod["metadata"]["name"] for pod in pods}:
                        gone(name)
                    for pod in pods:
                        seen(pod)
                case Changed(pod):
                    seen(pod)
                case Removed(pod):
                    gone(pod["metadata"]["name"])
    reporting.cancel()


async def _connection() -> Client:
    settings = ClientConfig.load_client_connect_config()
    return await Client.connect(
        **settings, data_converter=PayloadEncryption.from_environment().data_converter, runtime=shared_runtime()
    )


async def _report(tally: Tally) -> None:
    while True:
        print(json.dumps(vars(tally)), flush=True)
        await asyncio.sleep(1)


def _configuration(pod: Object, run_dir: Path) -> AgentConfig:
    """Returns the configuration that the pod's own agent would have."""
    (prepare,) = (one for one in pod["spec"]["initContainers"] if one["name"] == PREPARE)
    (text,) = (one["value"] for one in prepare["env"] if one["name"] == "PERDURE_PREPARE_AGENT_CONFIG")
    config = AgentConfig.model_validate_json(text)
    return config.model_copy(
        update={"address": pod["status"]["podIP"], "host": pod["spec"]["nodeName"], "run_dir": run_dir}
    )


if __name__ == "__main__":
    kubeconfig, namespace, share, shares, folder = sys.argv[1:]
    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(play(kubeconfig, namespace, int(share), int(shares), Path(folder)))
    leave(0)
