"""The environment of the programs: a control plane of their own, which faults kill and which is then restarted."""

from __future__ import annotations

import asyncio
import time
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from benchmarks.recovery.perdure_job import node_processes
from perdure.base.errors import PerdureError
from perdure.base.state_folder import StateFolder
from perdure.client.client import Client
from perdure.contract import IncidentView, JobResult, JobStatus
from perdure.contract.names import uid_of
from perdure.local.control_plane import LocalControlPlane

from .faults import Kind
from .programs import BIN, ENVIRONMENT, Program


@dataclass
class Job:
    """One program as a job, and the observations of it."""

    program: Program
    out: Path
    name: str
    uid: str
    status: JobStatus | None = None
    incidents: dict[int, IncidentView] = field(default_factory=dict[int, IncidentView])
    """Incidents by number; the job itself keeps the newest only."""
    result: JobResult | None = None
    ended_at: float | None = None

    @property
    def phase(self) -> str:
        """The phase when it was last looked at."""
        return self.status.phase.value if self.status is not None else "unknown"


class Site:
    """A server, a worker and the jobs."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.control_plane = LocalControlPlane(StateFolder(folder / "state"))
        self.client = Client()
        self.jobs: list[Job] = []
        self.all_ended = asyncio.Event()

    async def start(self) -> None:
        """Starts server and worker if they do not run."""
        endpoint = await self.control_plane.ensure()
        self.client = Client(endpoint=endpoint)
        await self.client.connect()

    async def submit(self, program: Program, *, length: int, at: float) -> Job:
        """Starts a program as a job; the program's folder will contain its results."""
        out = self.folder / program.name
        out.mkdir()
        name = f"chaos-{program.name}-{int(at) % 100_000}"
        submission = await self.client.submit(
            {
                "name": name,
                "env": {**ENVIRONMENT, "PATH": f"{BIN}:/usr/bin:/bin"},
                "limits": {"termination_grace_period": "5s"},
                # The benchmark counts faults, and a job that gives up cannot show how it would handle the next one.
                "retry": {"max_restarts": 10_000, "no_progress_limit": 10_000},
                "roles": {"worker": {"nodes": program.nodes, "command": program.command(out, length)}},
            }
        )
        job = Job(program, out, name, uid_of(submission.run_id))
        self.jobs.append(job)
        return job

    async def look(self) -> None:
        """Queries every job's state; while the control plane is away, the last known state stays."""
        for job in self.jobs:
            with suppress(PerdureError, TimeoutError):
                async with asyncio.timeout(10):
                    job.incidents |= {incident.number: incident for incident in await self.client.incidents(job.name)}
                    job.status = await self.client.status(job.name)
                    if job.result is None and job.status.finished_at is not None:
                        job.result = await self.client.wait(job.name)
                        job.ended_at = time.time()
        if not self.unfinished():
            self.all_ended.set()

    async def now(self, job: Job) -> tuple[str, tuple[int, ...] | None]:
        """A job's phase, and the nodes of its world; "unknown" and None while the control plane is away."""
        with suppress(PerdureError, TimeoutError):
            async with asyncio.timeout(2):
                nodes = await self.client.nodes(job.name)
                status = await self.client.status(job.name)
                return status.phase.value, tuple(node.rank for node in nodes if node.group_rank is not None)
        return "unknown", None

    def unfinished(self) -> list[Job]:
        return [job for job in self.jobs if job.result is None]

    async def kill_control_plane(self, kind: Kind, *, away: float) -> int:
        """Kills the worker or the server, and restarts it after a while."""
        known = self.control_plane.status()
        record = known.worker if kind is Kind.WORKER else known.server
        if record is None:
            return 0
        with suppress(psutil.NoSuchProcess):
            psutil.Process(record.pid).kill()
        await asyncio.sleep(away)
        await self.control_plane.ensure()
        return 1

    async def end(self) -> None:
        """Ends all jobs, nodes and services."""
        for job in self.unfinished():
            with suppress(PerdureError, TimeoutError):
                async with asyncio.timeout(60):
                    await self.client.cancel(job.name)
                    await self.client.wait(job.name)
        for job in self.jobs:
            for process in node_processes(f"{job.uid}/"):
                with suppress(psutil.Error):
                    process.kill()
        await self.control_plane.stop_worker()
        await self.control_plane.stop_server()
