"""A complete Perdure on one machine, as `perdure run` starts it: server, worker and nodes."""

from __future__ import annotations

import asyncio
import os
import sys
import time
from collections.abc import Callable
from contextlib import aclosing
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from signal import Signals
from typing import Any
from uuid import uuid4

import psutil

from perdure.base.state_folder import StateFolder
from perdure.client.client import Client
from perdure.contract import IncidentView, JobPhase, JobStatus
from perdure.contract.names import group_workflow_id, job_workflow_id
from perdure.local.control_plane import LocalControlPlane
from tests.support.command_line import PERDURE
from tests.support.temporal_server import temporal_binary
from tests.support.waiting import eventually

SCRIPT = Path(__file__).with_name("train.py")
WALK = Path(__file__).with_name("walk.py")
PATIENCE = 120.0
"""Seconds within which anything happens on a loaded machine of two cores."""


LOOK = timedelta(milliseconds=250)
"""Between two looks at what announces nothing by itself."""


@dataclass(frozen=True)
class Step:
    time: float
    number: int
    rank: int
    world_size: int
    generation: int
    pid: int


class Job:
    """One submitted job and the traces of its training."""

    def __init__(self, client: Client, name: str, uid: str, out: Path) -> None:
        self.client = client
        self.name = name
        self.uid = uid
        self.out = out

    @property
    def workflow_id(self) -> str:
        return job_workflow_id(self.client.namespace, self.name)

    async def status(self) -> JobStatus:
        return await self.client.status(self.name)

    async def incidents(self) -> list[IncidentView]:
        return await self.client.incidents(self.name)

    async def until(self, condition: Callable[[JobStatus], bool], *, within: float = PATIENCE) -> JobStatus:
        known: JobStatus | None = None
        try:
            async with asyncio.timeout(within), aclosing(self.client.watch(self.name, interval=LOOK)) as snapshots:
                async for snapshot in snapshots:
                    known = snapshot.status
                    if known is not None and condition(known):
                        return known
        except TimeoutError:
            raise AssertionError(f"not within {within} s: {known}") from None
        raise AssertionError(f"it ended before: {known}")

    async def running(self, *, nodes: int, after: int = 0) -> JobStatus:
        """Steps with this many nodes, in a generation later than the given one."""
        return await self.until(lambda s: s.phase is JobPhase.RUNNING and s.nodes == nodes and s.generation > after)

    def steps(self) -> list[Step]:
        try:
            lines = (self.out / "steps").read_text().splitlines()
        except FileNotFoundError:
            return []
        rows = (line.split() for line in lines)
        return [Step(float(r[0]), *(int(part) for part in r[1:])) for r in rows if len(r) == 6]

    async def stepping(self, *, generation: int, ranks: int, since: float = 0.0, count: int = 3) -> None:
        """Every rank of a generation has made some steps."""

        def enough(steps: list[Step]) -> bool:
            made = [step.rank for step in steps if step.generation == generation and step.time > since]
            return all(made.count(rank) >= count for rank in range(ranks))

        await self._until_steps(enough, what=f"{count} steps of generation {generation}")

    async def reaching(self, step: int) -> None:
        """Some rank has made this step."""
        await self._until_steps(lambda steps: any(made.number >= step for made in steps), what=f"step {step}")

    async def undisturbed(self, *, ranks: int, seconds: float) -> None:
        """The very same processes step for this long from now."""
        started = time.time()
        pids = {step.pid for step in self.steps()[-ranks * 5 :]}
        await self._until_steps(
            lambda steps: bool(steps) and steps[-1].time >= started + seconds, what=f"{seconds} s of steps"
        )
        assert {step.pid for step in self.steps() if step.time > started} == pids

    async def _until_steps(self, condition: Callable[[list[Step]], bool], *, what: str) -> None:
        await eventually(lambda: condition(self.steps()), what=lambda: f"{what}, but {self.steps()[-3:]}")

    def finish(self) -> None:
        """Has its script end by itself."""
        (self.out / "finish").touch()

    async def ended(self) -> None:
        """None of its processes is left."""
        _, left = await asyncio.to_thread(psutil.wait_procs, self.processes(), PATIENCE)
        assert not left
        assert not self.processes()

    async def wound_down(self) -> None:
        """Its node group has closed, which is the last that a job leaves; no process is left."""
        temporal = await self.client.connect()
        group = group_workflow_id(self.workflow_id, self.uid, "worker", 0)
        async with asyncio.timeout(PATIENCE):
            await temporal.get_workflow_handle(group).result()
        assert not self.processes()

    # Its processes

    def processes(self, node: int | None = None, *, kind: str | None = None) -> list[psutil.Process]:
        """Processes of a node's incarnations, or of all nodes: all, or agent, launcher, torchrun, rank."""
        mark = f"{self.uid}/" if node is None else f"{self.uid}/worker-{node}/"
        found: list[psutil.Process] = []
        for process in psutil.process_iter():
            try:
                environment = process.environ()
                if not environment.get("PERDURE_NODE", "").startswith(mark):
                    continue
                if kind in (None, _kind_of(process, environment)):
                    found.append(process)
            except psutil.Error:
                continue
        return found

    def signal(self, node: int, kind: str | None, number: Signals = Signals.SIGKILL) -> int:
        """Signals the processes of a kind at once; returns how many there were."""
        victims = self.processes(node, kind=kind)
        assert victims, f"node {node} has no {kind or 'process'}"
        for process in victims:
            process.send_signal(number)
        return len(victims)


def _kind_of(process: psutil.Process, environment: dict[str, str]) -> str:
    if "LOCAL_RANK" in environment:
        return "rank"
    command = " ".join(process.cmdline())
    for kind, sign in (("agent", "-m perdure.agent"), ("launcher", "-m perdure_launcher"), ("torchrun", "torchrun")):
        if sign in command:
            return kind
    return "other"


class Site:
    """Server and worker, and the jobs of a test."""

    def __init__(self, folder: Path, control_plane: LocalControlPlane) -> None:
        self.folder = folder
        self.control_plane = control_plane
        self.client = Client()
        self.jobs: list[Job] = []

    @property
    def state(self) -> StateFolder:
        return self.control_plane.state

    async def start(self) -> None:
        """Starts server and worker where they do not run."""
        endpoint = await self.control_plane.ensure()
        self.client = Client(endpoint=endpoint)
        await self.client.connect()

    async def submit(
        self,
        *arguments: str,
        name: str = "",
        nodes: str = "2",
        script: Path = SCRIPT,
        command: list[str] | None = None,
        out: Path | None = None,
        **spec: Any,
    ) -> Job:
        """Starts a training; each submission writes into a folder of its own, also where it takes a name again.

        Args:
            arguments: of the script, after the folder that it writes into.
            name: of the job; by default one of its own.
            nodes: how many, as a job says it.
            script: `SCRIPT` under torchrun, or `WALK` without it, which starts in a tenth of the time.
            command: another one.
            out: the folder, where other roles write into it, too.
            spec: other fields.
        """
        name = name or f"s-{uuid4().hex[:8]}"
        out = out or self.folder / f"out-{uuid4().hex[:8]}"
        out.mkdir(exist_ok=True)
        if script == WALK:
            # What is prepared for a second start is an interpreter with torch.
            spec = {"recovery": {"warm_starts": False}} | spec
        launcher = "torchrun" if script == SCRIPT else sys.executable
        command = command or [launcher, str(script), str(out), *arguments]
        await self.client.submit(
            {
                "name": name,
                "workdir": {"path": str(self.folder)},
                "env": {"OMP_NUM_THREADS": "1"},
                "limits": {"termination_grace_period": "5s"},
                "roles": {"worker": {"nodes": nodes, "command": command}},
                "timing": {"rendezvous": {"last_call": "2s"}},
            }
            | spec
        )
        job = Job(self.client, name, (await self.client.status(name)).uid, out)
        self.jobs.append(job)
        return job

    async def temporal(self, *arguments: str) -> str:
        """Runs Temporal's own command line against this site's server, with the codec server that it needs there.

        Returns:
            Its output.
        """
        process = await asyncio.create_subprocess_exec(
            *(*PERDURE, "codec-server", "--", str(temporal_binary()), *arguments),
            env={**os.environ, "PERDURE_STATE": str(self.state.path), "TEMPORAL_ADDRESS": ""},
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
        )
        printed, _ = await process.communicate()
        assert process.returncode == 0, printed.decode()
        return printed.decode()

    async def end_jobs(self) -> None:
        for job in self.jobs:
            try:
                await self.client.cancel(job.name)
                await self.client.wait(job.name)
            except Exception as error:
                print(f"ending {job.name}: {error}", file=sys.stderr)
            for process in job.processes():
                process.kill()
        self.jobs.clear()
