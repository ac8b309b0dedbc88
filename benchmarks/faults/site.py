"""One job with a fault: starts it, follows its steps, and reads what the job says of it."""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import Callable, Mapping
from contextlib import aclosing, suppress
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import psutil

from benchmarks.chaos.faults import Kind, victims
from benchmarks.chaos.programs import BIN, ENVIRONMENT, Program
from benchmarks.recovery.perdure_job import ControlPlane, node_processes
from benchmarks.recovery.processes import TrialFailed
from perdure.base.errors import NoWorker, PerdureError
from perdure.contract import IncidentView, JobPhase, JobStatus
from perdure.contract.names import uid_of

from . import judgement
from .judgement import SHOWN_ONCE, Expected, Story, steps_per_second

WRAPPER = Path(__file__).with_name("programs") / "injected.py"
FOREVER = 1_000_000
"""The length of a program that the benchmark ends."""
START_SECONDS = 120.0
"""The longest time until all ranks have made their first steps."""
SETTLED_STEPS = 40
"""Steps of each rank before the fault: by then the agents know how long one takes."""
STEPS_AFTER = 10
"""Steps of each rank that show that a job trains again."""
REPAIR_SECONDS = 60.0
"""The longest time from the verdict until all ranks step again, with a replacement that imports torch."""
PLACING_SECONDS = 75.0
"""What a cluster takes in addition: Ray counts a lost machine as one of its own for 15 s, and gives the process of a
new actor 60 s to register."""
LOOK_SECONDS = 0.2
LOOK = timedelta(seconds=LOOK_SECONDS)
KEPT_PAUSE = 2.0
"""Seconds for which what the status shows is left as it is."""


@dataclass(frozen=True)
class Step:
    """One step of one rank."""

    time: float
    number: int
    generation: int


class Run:
    """A program as a job, while something happens to it."""

    def __init__(
        self, plane: ControlPlane, name: str, out: Path, nodes: int, processes: int = 1, site: object = None
    ) -> None:
        self.plane = plane
        self.name = name
        self.out = out
        self.nodes = nodes
        self.processes = processes
        """Ranks of each node."""
        self.site = site
        """What else injections need: of the backend."""
        self.uid = ""
        self._first_agents: dict[int, int] = {}

    async def start(self, program: Program, spec: Mapping[str, Any], environment: Mapping[str, str]) -> None:
        """Starts the program, and waits until all of its ranks step.

        Raises:
            TrialFailed: if they do not.
        """
        torchrun, *command = program.command(self.out, FOREVER)
        submission = await self.plane.client.submit(
            {
                "name": self.name,
                "env": {
                    **ENVIRONMENT,
                    "PATH": f"{BIN}:/usr/bin:/bin:/usr/sbin:/sbin",
                    "FAULTS_FOLDER": str(self.folder),
                    **environment,
                },
                "limits": {"termination_grace_period": "5s"},
                "roles": {
                    "worker": {
                        "nodes": self.nodes,
                        "command": [torchrun, f"--nproc-per-node={self.processes}", str(WRAPPER), *command],
                    }
                },
                **spec,
            }
        )
        self.uid = uid_of(submission.run_id)
        await self.until(
            lambda: self._made(generation=1) >= SETTLED_STEPS, seconds=START_SECONDS, what=f"{SETTLED_STEPS} steps"
        )
        # Steps are made before the job has heard of them.
        async with aclosing(self.plane.client.watch(self.name, interval=LOOK)) as snapshots:
            async for snapshot in snapshots:
                if snapshot.status is not None and snapshot.status.phase is JobPhase.RUNNING:
                    break
        self._first_agents = self._agents()

    @property
    def ranks(self) -> int:
        return self.nodes * self.processes

    @property
    def repair_seconds(self) -> float:
        """The longest time from a verdict until all ranks step again."""
        return REPAIR_SECONDS + (PLACING_SECONDS if self.site is not None else 0)

    @property
    def folder(self) -> Path:
        """The folder of the injector in the ranks."""
        return self.out.with_name("faults")

    async def status(self) -> JobStatus:
        return await self.plane.client.status(self.name)

    async def incidents(self) -> list[IncidentView]:
        return await self.plane.client.incidents(self.name)

    async def until(self, condition: Callable[[], bool], *, seconds: float, what: str) -> None:
        """Polls until a condition holds.

        Raises:
            TrialFailed: if it does not within the limit, or the job ends.
        """
        deadline = time.monotonic() + seconds
        while not condition():
            try:
                status = await self.status()
            except NoWorker:
                # It was started just before.
                if time.monotonic() > deadline:
                    raise
                continue
            if status.finished_at is not None:
                raise TrialFailed(f"the job ended before {what}: {status.reason}")
            if time.monotonic() > deadline:
                raise TrialFailed(f"no {what} within {seconds:.0f} s: {status.phase}, {status.reason}")
            await asyncio.sleep(LOOK_SECONDS)

    def steps(self, rank: int) -> list[Step]:
        try:
            lines = (self.folder / f"steps-{rank}").read_text().splitlines()
        except FileNotFoundError:
            return []
        rows = (line.split() for line in lines)
        return [Step(float(row[0]), int(row[1]), int(row[2])) for row in rows if len(row) == 3]

    def pace(self, since: float, until: float) -> float:
        """Steps a second of the first rank, between two times."""
        return steps_per_second([step.time for step in self.steps(0)], since, until)

    def furthest(self) -> int:
        """The furthest step of any rank."""
        return max((step.number for rank in range(self.ranks) for step in self.steps(rank)), default=0)

    def _made(self, *, generation: int, since: float = 0.0, ranks: int | None = None) -> int:
        """The fewest steps that any rank has made in a generation."""
        return min(
            sum(step.generation == generation and step.time > since for step in self.steps(rank))
            for rank in range(ranks or self.ranks)
        )

    async def follow(self, expected: Expected, fault_at: float, heal: Callable[[], None], *, patience: float) -> Story:
        """Waits for the verdict, heals what the fault broke, waits for the repair, and returns what was seen.

        Args:
            expected: what must come out.
            fault_at: when the fault happened.
            heal: undoes what no repair can undo.
            patience: seconds to wait for the verdict.
        """
        if expected.shown:
            return await self._observe(expected, fault_at, heal, patience=patience)
        story = Story(fault_at, await self.incidents(), trains=False)
        deadline = time.time() + patience
        while time.time() < deadline and not any(one.decided_at for one in story.interruptions):
            await asyncio.sleep(LOOK_SECONDS)
            story = replace(story, incidents=await self.incidents())
        heal()
        deadline = time.time() + self.repair_seconds * expected.interruptions
        while story.interruptions and time.time() < deadline and not story.trains:
            status = await self.status()
            if status.finished_at is not None:
                break
            trains = (
                not expected.stops
                and status.phase is JobPhase.RUNNING
                and self._made(generation=status.generation, since=fault_at, ranks=status.world_size) >= STEPS_AFTER
            )
            await asyncio.sleep(LOOK_SECONDS)
            story = replace(story, incidents=await self.incidents(), trains=trains)
        return replace(story, steps_lost=self._lost(fault_at))

    async def _observe(
        self, expected: Expected, fault_at: float, heal: Callable[[], None], *, patience: float
    ) -> Story:
        """Looks at what must interrupt nothing until it is over, and until all ranks have stepped afterwards."""
        story = Story(fault_at, await self.incidents(), trains=False)
        deadline = time.time() + patience
        shown: tuple[int, ...] = ()
        while time.time() < deadline and (shown or not (story.shown_at or story.observations)):
            await asyncio.sleep(LOOK_SECONDS)
            shown = () if story.shown_at and expected.shown in SHOWN_ONCE else await self._shown(expected.shown)
            story = replace(story, incidents=await self.incidents(), shown=story.shown | set(shown))
            if shown and story.shown_at is None:
                story = replace(story, shown_at=time.time())
            if time.time() > (story.shown_at or deadline) + KEPT_PAUSE:
                heal()
        since = time.time()
        generation = (await self.status()).generation
        with suppress(TrialFailed):
            await self.until(
                lambda: self._made(generation=generation, since=since) >= STEPS_AFTER,
                seconds=self.repair_seconds,
                what="steps afterwards",
            )
        trains = self._made(generation=generation, since=since) >= STEPS_AFTER
        return replace(story, incidents=await self.incidents(), trains=trains, steps_lost=self._lost(fault_at))

    async def _shown(self, what: str) -> tuple[int, ...]:
        """The nodes that are shown in this way at present."""
        match what:
            case judgement.AGENTS:
                return tuple(node for _, node in self._agents().items() - self._first_agents.items())
            case judgement.LINKS:
                found = await self.plane.client.check(self.name, full=True)
                return tuple(one.node for one in found if any(check.name == "link" for check in one.failed))
            case field:
                return getattr(await self.status(), field, ())

    def _agents(self) -> dict[int, int]:
        """The process IDs of the agents, and the nodes (slots) of each."""
        return {
            agent.pid: node for node in range(self.nodes) for agent in victims(Kind.AGENT, f"{self.uid}/worker-{node}/")
        }

    def _lost(self, fault_at: float) -> int | None:
        """Steps that the furthest rank had made before the fault's repair, and that were made again."""
        steps = [step for rank in range(self.ranks) for step in self.steps(rank)]
        if not steps:
            return None
        first = max((step.generation for step in steps if step.time <= fault_at), default=1)
        later = [step.number for step in steps if step.generation > first]
        if not later:
            return 0
        return max(0, max(step.number for step in steps if step.generation == first) - min(later) + 1)

    async def end(self) -> None:
        """Ends the job and everything that it has started."""
        with suppress(PerdureError, TimeoutError):
            async with asyncio.timeout(30):
                await self.plane.client.cancel(self.name)
                await self.plane.client.wait(self.name)
        for process in node_processes(f"{self.uid}/") if self.uid else ():
            with suppress(psutil.Error):
                process.send_signal(signal.SIGKILL)
