"""Measures one job of a thousand nodes: its creation, the loss of nodes, and the cost of its leases."""

from __future__ import annotations

import asyncio
import json
import os
import secrets
import shutil
import sys
import tempfile
import time
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from benchmarks.recovery.processes import TrialFailed
from benchmarks.recovery.steady import MEGABYTE, cpu_seconds
from perdure.activities.nodes.kubernetes.pod import RANK
from perdure.base.errors import NoWorker
from perdure.contract import JobPhase, JobStatus

from .fleet import at_once, played_machines, post_bare, post_job
from .records import Held, Relaunched, Thousand
from .site import Site, eventually

ROOT = Path(__file__).resolve().parents[2]
PLAYERS = 2
"""Number of processes that simulate agents: one for each core of a small machine."""
FORMED_SECONDS = 300.0
WHOLE_PAUSE = 1.0
"""Seconds between two queries of whether all nodes are in the world: each query costs the measured worker."""
SETTLE_SECONDS = 20.0
LAST_HEARTBEATS_SECONDS = 5.0


async def measure_thousand(
    site: Site, *, nodes: int, lost: int, lease_seconds: float, say: Callable[[str], None]
) -> Thousand:
    """Creates the same pods with a bare loop and with a job, deletes some of the job's, and holds its leases for a
    while."""
    name = f"thousand-{secrets.token_hex(3)}"
    async with played_machines(site.api, nodes):
        bare = await post_bare(site, nodes)
        say(f"bare loop: {nodes} pods requested in {bare.requested:.1f} s, running in {bare.running:.1f} s")
        try:
            job = await post_job(site, name, nodes)
            say(f"job: {nodes} pods requested in {job.requested:.1f} s, running in {job.running:.1f} s")
            thousand = Thousand(bare=bare, job=job)
            try:
                async with played_agents(site) as players:
                    began = time.monotonic()
                    await _whole(site, name, nodes)
                    say(f"all {nodes} agents are in the world, {time.monotonic() - began:.0f} s after they began")
                    relaunched = await _lose(site, name, nodes=nodes, lost=lost)
                    say(f"{lost} nodes lost, requested again in {relaunched.requested:.2f} s")
                    say(f"all {nodes} in the world again {relaunched.whole:.1f} s after that loss")
                    thousand = thousand.model_copy(update={"relaunched": relaunched})
                    held = await _hold(site, players, name, nodes=nodes, seconds=lease_seconds)
                    say(f"{nodes} leases held for {held.seconds:.0f} s: {held.lost} lost, {held.late} late")
                    return thousand.model_copy(update={"held": held})
            except TrialFailed as failed:
                say(f"stopped here: {failed}")
                return thousand
        finally:
            began = time.monotonic()
            await site.end(name)
            say(f"job: cancelled, and gone with its pods {time.monotonic() - began:.1f} s after that")
            await site.clear()


@dataclass
class Players:
    """The processes that simulate agents, with the last report of each."""

    processes: list[asyncio.subprocess.Process] = field(default_factory=list[asyncio.subprocess.Process])
    said: dict[int, dict[str, Any]] = field(default_factory=dict[int, dict[str, Any]])

    def total(self, what: str) -> int:
        """Returns the sum of a figure over all processes."""
        return sum(said[what] for said in self.said.values())


@asynccontextmanager
async def played_agents(site: Site) -> AsyncGenerator[Players]:
    """Runs agents for all current and future pods; they end without a shutdown report."""
    players = Players()
    command = [sys.executable, "-m", "benchmarks.kubernetes.agents", str(site.pods.kubeconfig), site.namespace]
    listening: list[asyncio.Task[None]] = []
    # The agents' files, each agent's in a folder named after its pod.
    folder = tempfile.mkdtemp(prefix="pb-agents-")
    try:
        for share in range(PLAYERS):
            process = await asyncio.create_subprocess_exec(
                *(*command, str(share), str(PLAYERS), folder),
                cwd=ROOT,
                env=os.environ | {"TEMPORAL_ADDRESS": site.address, "TEMPORAL_NAMESPACE": "default"},
                stdout=asyncio.subprocess.PIPE,
                limit=2**20,
            )
            players.processes.append(process)
            listening.append(asyncio.create_task(_listen(players, share, process)))
        yield players
    finally:
        for process in players.processes:
            process.kill()
            await process.wait()
        await asyncio.gather(*listening)
        shutil.rmtree(folder)


async def _listen(players: Players, share: int, process: asyncio.subprocess.Process) -> None:
    assert process.stdout
    async for line in process.stdout:
        players.said[share] = json.loads(line)


async def _whole(site: Site, name: str, nodes: int, *, after: int = 0) -> JobStatus:
    """Waits until all nodes are in one world of a later generation than `after`; returns the job's status."""

    async def whole() -> JobStatus | None:
        # A worker that receives messages of a thousand agents at once may not answer a query in time.
        with suppress(NoWorker):
            status = await site.client.status(name)
            running = status.phase is JobPhase.RUNNING and status.generation > after
            return status if running and status.nodes == nodes and not status.unreachable else None
        return None

    otherwise = f"the job does not run with {nodes} nodes"
    return await eventually(whole, seconds=FORMED_SECONDS, otherwise=otherwise, pause=WHOLE_PAUSE)


async def _lose(site: Site, name: str, *, nodes: int, lost: int) -> Relaunched:
    """Loses nodes of all groups at once: deletes their pods without grace; their agents end with them."""
    generation = (await site.client.status(name)).generation
    ranks = sorted({round(number * nodes / lost) for number in range(lost)})
    pods = f"{RANK} in ({','.join(map(str, ranks))})"
    victims = {pod["metadata"]["name"] for pod in await site.api.list(site.pods_path, labels=pods)}
    began = time.monotonic()
    losing = asyncio.create_task(at_once(site.api.delete(f"{site.pods_path}/{one}", grace=0) for one in victims))

    async def requested() -> bool:
        there = {pod["metadata"]["name"] for pod in await site.api.list(site.pods_path, labels=pods)}
        return len(there - victims) >= lost

    await eventually(requested, seconds=120, otherwise=f"{lost} lost nodes were not requested again")
    requested_after = time.monotonic() - began
    await losing
    await _whole(site, name, nodes, after=generation)
    return Relaunched(nodes=lost, of=nodes, requested=requested_after, whole=time.monotonic() - began)


async def _hold(site: Site, players: Players, name: str, *, nodes: int, seconds: float) -> Held:
    """Measures a period in which nothing happens but that leases are renewed."""
    await asyncio.sleep(SETTLE_SECONDS)
    lost, late = players.total("lost"), players.total("late")
    processes: dict[str, psutil.Process] = {"worker": site.worker, "server": site.server}
    before = {what: cpu_seconds(process) for what, process in processes.items()}
    peak = dict.fromkeys(processes, 0.0)
    began = time.monotonic()
    while (left := began + seconds - time.monotonic()) > 0:
        await asyncio.sleep(min(left, 5.0))
        for what, process in processes.items():
            peak[what] = max(peak[what], process.memory_info().rss / MEGABYTE)
    elapsed = time.monotonic() - began
    used = {what: 100 * (cpu_seconds(process) - before[what]) / elapsed for what, process in processes.items()}
    given_up = nodes - await _most_held(players, nodes)
    return Held(
        leases=nodes,
        seconds=elapsed,
        lost=players.total("lost") - lost + given_up,
        late=players.total("late") - late,
        unreachable=len((await site.client.status(name)).unreachable),
        worker_cpu_percent=used["worker"],
        worker_rss_mb=peak["worker"],
        server_cpu_percent=used["server"],
        server_rss_mb=peak["server"],
    )


async def _most_held(players: Players, nodes: int) -> int:
    """Returns the most leases held at once within a few seconds: a group that continues as new grants its leases
    again."""
    most = 0
    for _ in range(round(LAST_HEARTBEATS_SECONDS)):
        most = max(most, players.total("held"))
        if most >= nodes:
            break
        await asyncio.sleep(1)
    return min(most, nodes)
