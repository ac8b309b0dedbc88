"""`make bench-chaos`: injects faults for a while, lets the programs end, and checks results and explanations."""

from __future__ import annotations

import asyncio
import json
import random
import shutil
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from perdure.cli.explain import explanation

from .faults import Fault, Kind, draw, find, inject, memory_of, thaw
from .judgement import doubts, never_hit
from .programs import PROGRAMS, Program, undisturbed
from .sharded import read
from .site import Job, Site

OUT = Path(__file__).with_name("out")
SHORTEST_PAUSE, LONGEST_PAUSE = 3.0, 20.0
"""Range of the pause between two faults, in seconds."""
SAME_JOB = 0.4
"""Probability that the next fault hits the same job as the last one, which is probably being repaired."""
LOOK = 2.0
"""Seconds between two queries of the jobs."""
AWAY = (0.5, 12.0)
"""Range of the time until a killed worker or server is restarted, in seconds."""
FROZEN = (1.0, 15.0)
"""Range of the time for which an agent is frozen, in seconds."""


class Chaos:
    """One run of the benchmark."""

    def __init__(self, site: Site, *, chance: random.Random, console: Console) -> None:
        self.site = site
        self.chance = chance
        self.console = console
        self.faults: list[Fault] = []
        self._began = time.monotonic()
        self._last: Job | None = None
        self._control_plane: asyncio.Task[int] | None = None

    async def run(self, *, seconds: float, patience: float) -> None:
        """Injects faults for `seconds` or until all programs have ended, then waits for the remaining programs."""
        looking = asyncio.create_task(self._look())
        deadline = time.monotonic() + seconds
        try:
            while time.monotonic() < deadline and self.site.unfinished():
                await asyncio.sleep(self.chance.uniform(SHORTEST_PAUSE, LONGEST_PAUSE))
                await self._inject()
            if self._control_plane is not None:
                await self._control_plane
            self.say(f"no more faults; waiting for {len(self.site.unfinished())} programs")
            with suppress(TimeoutError):
                async with asyncio.timeout(patience):
                    await self.site.all_ended.wait()
        finally:
            looking.cancel()
        await self.site.look()

    async def _look(self) -> None:
        while True:
            await self.site.look()
            await asyncio.sleep(LOOK)

    async def _inject(self) -> None:
        jobs = self.site.unfinished()
        if not jobs:
            return
        kind = draw(self.chance)
        if kind in (Kind.WORKER, Kind.SERVER):
            if self._control_plane is None or self._control_plane.done():
                away = self.chance.uniform(*AWAY)
                self._note(Fault(kind=kind, job="", time=time.time(), processes=1), f"for {away:.1f} s")
                self._control_plane = asyncio.create_task(self.site.kill_control_plane(kind, away=away))
            return
        same = self._last if self._last in jobs and self.chance.random() < SAME_JOB else None
        job = same or self.chance.choice(jobs)
        self._last = job
        count = 2 if kind is Kind.RANKS_OF_TWO_NODES else 1
        nodes = tuple(sorted(self.chance.sample(range(job.program.most_nodes), count)))
        # The search takes seconds on a busy machine, in which the job may have begun another world.
        found = find(kind, uid=job.uid, nodes=nodes)
        memory = [folder for node in nodes for folder in memory_of(job.uid, node)] if kind is Kind.NODE else []
        phase, members = await self.site.now(job)
        when, hit = inject(kind, found)
        for folder in memory:
            # It is lost with its machine.
            shutil.rmtree(folder, ignore_errors=True)
        killed = [process for processes in hit.values() for process in processes]
        fault = Fault(kind=kind, job=job.name, nodes=tuple(hit) or nodes, time=when, processes=len(killed), phase=phase)
        self._note(fault.model_copy(update={"members": members}))
        if kind is Kind.FROZEN_AGENT:
            asyncio.get_running_loop().call_later(self.chance.uniform(*FROZEN), thaw, killed)

    def _note(self, fault: Fault, more: str = "") -> None:
        self.faults.append(fault)
        where = f"{fault.job} node {'+'.join(map(str, fault.nodes))} ({fault.phase})" if fault.job else more
        self.say(f"{fault.kind}: {where}, {fault.processes} processes")

    def say(self, line: str) -> None:
        self.console.print(f"{time.monotonic() - self._began:7.1f}s  {line}", markup=False, highlight=False)

    def report(self, folder: Path, expected: dict[str, str]) -> dict[str, object]:
        """Writes the observations, prints a table, and returns the values of the closing line."""
        folder.mkdir(parents=True, exist_ok=True)
        lines = (fault.model_dump_json() for fault in self.faults)
        (folder / "faults.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
        table = Table("program", "faults", "incidents", "generations", "ended as", "result", "doubts")
        right: list[bool] = []
        doubtful = 0
        steps_lost = 0
        for job in self.site.jobs:
            incidents = [job.incidents[number] for number in sorted(job.incidents)]
            stories = (explanation(incident, job=job.name, flag="").plain for incident in incidents)
            (folder / f"{job.program.name}.explain").write_text("\n\n".join(stories) + "\n", encoding="utf-8")
            wrong = doubts(job.name, incidents, self.faults)
            (folder / f"{job.program.name}.doubts").write_text("\n".join(wrong) + "\n", encoding="utf-8")
            doubtful += len(wrong)
            made = _result(job)
            right.append(made == expected[job.program.name])
            if job.program.sharded:
                course = read(job.out, [fault for fault in self.faults if fault.job == job.name])
                steps_lost += course.steps_lost_with_copy
                right[-1] &= not course.other_bits
                self.say(f"{job.program.name}: worlds of {course.worlds}, lost {course.lost}, {course.other_bits=}")
            ended = job.result.phase.value if job.result is not None else f"hangs in {job.phase}"
            hit = sum(fault.job in ("", job.name) and fault.processes > 0 for fault in self.faults)
            generations = str(job.status.generation) if job.status else ""
            same = "right" if right[-1] else "WRONG"
            table.add_row(job.program.name, str(hit), str(len(incidents)), generations, ended, same, str(len(wrong)))
            if not right[-1]:
                self.say(f"{job.program.name} made: {made}; expected: {expected[job.program.name]}")
            for doubt in wrong:
                self.say(f"{job.program.name} doubted: {doubt}")
        self.console.print(table)
        if unhit := never_hit(self.faults):
            self.say(f"no process was ever found for: {', '.join(unhit)}")
        self.say(f"faults, explanations and doubts: {folder}")
        return {
            "faults": sum(fault.processes > 0 for fault in self.faults),
            "incidents": sum(len(job.incidents) for job in self.site.jobs),
            "ended": [job.result.phase.value if job.result is not None else None for job in self.site.jobs],
            "right": right,
            "doubts": doubtful,
            "steps_lost": steps_lost,
            "never_hit": unhit,
        }


def _result(job: Job) -> str:
    try:
        return job.program.result(job.out)
    except (OSError, ValueError, KeyError) as error:
        return f"none ({error})"


def main(
    minutes: Annotated[float, typer.Option(help="Minutes for which faults are injected.")] = 30,
    patience: Annotated[float, typer.Option(help="Minutes for the programs to end afterwards.")] = 15,
    program: Annotated[list[str] | None, typer.Option(help="Run only these programs.")] = None,
    length: Annotated[float, typer.Option(help="Factor for the length of the programs.")] = 1.0,
    seed: Annotated[int | None, typer.Option(help="Seed of the faults; by default another one each time.")] = None,
    out: Annotated[Path | None, typer.Option(help="Folder for the observations.")] = None,
) -> None:
    """Trains programs that know nothing of Perdure, while its processes and theirs are killed at random."""
    chosen = [known for known in PROGRAMS if not program or known.name in program]
    seed = seed if seed is not None else int(time.time())
    console = Console(highlight=False, soft_wrap=True)
    # The folder contains sockets, whose paths are limited to 108 bytes.
    folder = Path(tempfile.mkdtemp(prefix="pc-"))
    lengths = {known.name: max(1, round(known.length * length)) for known in chosen}
    closing: dict[str, object] = {}

    async def run() -> None:
        chaos = Chaos(Site(folder), chance=random.Random(seed), console=console)
        chaos.say(f"seed {seed}; running the programs alone for their expected results")
        expected = {known.name: await _expected(known, folder, lengths[known.name]) for known in chosen}
        chaos.say(f"{expected}")
        try:
            await chaos.site.start()
            for known in chosen:
                await chaos.site.submit(known, length=lengths[known.name], at=time.time())
            await chaos.run(seconds=minutes * 60, patience=patience * 60)
            closing.update(chaos.report(out or OUT / time.strftime("%Y%m%d-%H%M%S"), expected))
        finally:
            await chaos.site.end()

    asyncio.run(run())
    if all(closing["right"] or [False]):  # pyrefly: ignore[bad-argument-type]
        shutil.rmtree(folder, ignore_errors=True)
    else:
        console.print(f"files of the programs and nodes are kept in {folder}")
    print(json.dumps(closing, separators=(",", ":")))


async def _expected(program: Program, folder: Path, length: int) -> str:
    if program.expected is not None:
        return program.expected(length)
    return await undisturbed(program, folder / "undisturbed" / program.name, length=length)


if __name__ == "__main__":
    typer.run(main)
