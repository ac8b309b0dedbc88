"""Many actors on a few machines with made resources: how soon they start, and are whole again after losses.

Each node is a real actor of Ray, in a bundle of its own, that the worker created. Its processes are light: one process
plays all agents, so that a machine of few cores holds them.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import socket
import struct
import time
from collections.abc import AsyncGenerator
from contextlib import aclosing, asynccontextmanager
from datetime import timedelta
from pathlib import Path

import psutil
from pydantic import BaseModel
from temporalio.client import Client as TemporalClient

from perdure.activities.nodes.ray.task import NodeTask
from perdure.client.client import Client
from perdure.contract import JobPhase
from tests.workflows.fleet import Fleet
from tests.workflows.played_node import PlayedNode

LIGHT_NODE = Path(__file__).with_name("programs") / "light_node"
CPUS = 0.01
_STARTS = 900.0
_LOOKS = timedelta(seconds=1)
_LINE = 2**24
_NICENESS = -10
"""Of everything but Ray: a cluster's actors do not run on the cores of the server and the worker."""


class Many(BaseModel):
    """What was measured."""

    actors: int
    jobs: int
    machines: int
    start_s: float
    """Until every job runs with all of its nodes."""
    lost: int
    relaunch_s: float
    """From the kill of these actors until every job runs with all of its nodes again."""
    megabytes: float
    """Of one actor's process and its node, unshared."""


def take_precedence() -> str:
    """Gives this process, and what it starts, precedence over all that it has started. Returns what came of it."""
    try:
        os.setpriority(os.PRIO_PROCESS, 0, _NICENESS)
    except PermissionError:
        return "server, worker and nodes share their cores with all actors: only root gives them precedence"
    return f"server, worker and nodes have precedence over the actors: nice {_NICENESS}"


class LightFleet:
    """Plays the agents of all nodes whose actors run."""

    def __init__(self, client: TemporalClient) -> None:
        self._fleet = Fleet(client, "unused")
        self.nodes: dict[int, PlayedNode] = {}
        """By the process of the light node, whose parent is the actor."""

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Plays one node for as long as its process is connected."""
        credentials = writer.get_extra_info("socket").getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
        pid = struct.unpack("3i", credentials)[0]
        task = NodeTask.model_validate_json(await reader.readline())
        node = self.nodes[pid] = PlayedNode(self._fleet, task.request)
        starting = asyncio.create_task(node.start())
        await reader.read()
        del self.nodes[pid]
        starting.cancel()
        await node.die()
        writer.close()

    def victims(self, number: int) -> dict[psutil.Process, str]:
        """Returns actors, of as many jobs as possible, with the job's ID."""
        order = sorted(self.nodes.items(), key=lambda item: (item[1].rank, item[1].request.job_id))
        return {_actor_of(pid): node.request.job_id for pid, node in order[:number]}


@asynccontextmanager
async def light_fleet(client: TemporalClient, path: Path) -> AsyncGenerator[LightFleet]:
    """Plays agents at a socket while the context is open."""
    fleet = LightFleet(client)
    server = await asyncio.start_unix_server(fleet.serve, path, limit=_LINE)
    try:
        yield fleet
    finally:
        server.close()


async def measure(client: Client, fleet: LightFleet, *, jobs: int, machines: int, lose: int) -> Many:
    """Starts jobs with a node on each machine, kills some actors, and waits until all jobs are whole again."""
    names = [f"many-{secrets.token_hex(3)}" for _ in range(jobs)]
    try:
        began = time.monotonic()
        await asyncio.gather(*(client.submit(_job(name, machines)) for name in names))
        await _whole(client, dict.fromkeys(names, 0), machines)
        started = time.monotonic() - began
        generations = {name: (await client.status(name)).generation for name in names}
        sizes = [_unshared(_actor_of(pid)) for pid in list(fleet.nodes)[:10]]
        victims = fleet.victims(lose)
        began = time.monotonic()
        for victim in victims:
            victim.kill()
        hit = {job.rpartition("/")[2] for job in victims.values()}
        await _whole(client, {name: generations[name] if name in hit else 0 for name in names}, machines)
        relaunched = time.monotonic() - began
    finally:
        await asyncio.gather(*(client.cancel(name) for name in names), return_exceptions=True)
        await asyncio.gather(*(client.wait(name) for name in names), return_exceptions=True)
    return Many(
        actors=jobs * machines,
        jobs=jobs,
        machines=machines,
        start_s=started,
        lost=len(victims),
        relaunch_s=relaunched,
        megabytes=sum(sizes) / len(sizes) / 1e6,
    )


def _job(name: str, nodes: int) -> dict[str, object]:
    role = {"nodes": nodes, "command": ["true"], "resources": {"cpu": f"{CPUS:g}"}}
    return {"name": name, "backend": "ray", "roles": {"worker": role}}


async def _whole(client: Client, after: dict[str, int], nodes: int) -> None:
    async def follow(name: str) -> None:
        # A worker that starts hundreds of nodes on a busy machine may not answer for a while.
        async with aclosing(client.watch(name, interval=_LOOKS)) as snapshots:
            async for snapshot in snapshots:
                status = snapshot.status
                if status is None:
                    continue
                if status.phase is JobPhase.RUNNING and status.nodes == nodes and status.generation > after[name]:
                    return
        raise AssertionError(f"{name} has ended")

    async with asyncio.timeout(_STARTS), asyncio.TaskGroup() as group:
        for name in after:
            group.create_task(follow(name))


def _actor_of(pid: int) -> psutil.Process:
    actor = psutil.Process(pid).parent()
    assert actor is not None
    return actor


def _unshared(actor: psutil.Process) -> float:
    return sum(float(one.memory_full_info().uss) for one in (actor, *actor.children()))
