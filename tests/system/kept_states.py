"""A real job of `keeps_states.py`, and what its states have lost after each fault."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from tests.support.waiting import eventually
from tests.system.site import PATIENCE, Job, Site

SCRIPT = Path(__file__).with_name("keeps_states.py")
STEPS = 6
"""Steps that a world makes before the next fault."""


@dataclass(frozen=True)
class Line:
    """One line that rank 0 has written."""

    kind: str
    """Whether the states were restored, or made a step."""
    generation: int
    world_size: int
    steps: Mapping[str, int]


class KeptStates:
    """A training, and its faults."""

    def __init__(self, site: Site, job: Job) -> None:
        self.site = site
        self.job = job
        self.generation = 0
        """The newest one that a test has seen."""

    @property
    def lines(self) -> list[Line]:
        path = self.job.out / "made"
        rows = [row.split() for row in path.read_text().splitlines()] if path.exists() else []
        return [
            Line(
                row[0],
                int(row[1]),
                int(row[2]),
                {name: int(step) for name, _, step in (one.partition("=") for one in row[3:])},
            )
            for row in rows
            if len(row) > 3
        ]

    async def stepping(self, *, after: int | None = None, world_size: int | None = None) -> None:
        """Waits until a generation later than the last one that was seen has made some steps."""
        before = self.generation if after is None else after

        def enough() -> bool:
            lines = [line for line in self.lines if line.kind == "made" and line.generation > before]
            found = [line for line in lines if world_size in (None, line.world_size)]
            return sum(line.generation == found[-1].generation for line in found) >= STEPS if found else False

        await eventually(enough, within=2 * PATIENCE, what=lambda: f"steps after {before}: {self.lines[-3:]}")
        self.generation = self.lines[-1].generation

    async def trains_on(self, *, steps: int = STEPS) -> None:
        """Waits for some more steps of the present world."""
        made = len(self.lines)
        await eventually(lambda: len(self.lines) >= made + steps, within=PATIENCE)

    def lost(self, *, since: int) -> dict[str, int]:
        """The steps that each state has lost in all worlds after this generation."""
        lost: dict[str, int] = {}
        made: dict[str, int] = {}
        for line in self.lines:
            for name, step in line.steps.items():
                if line.kind == "restored" and line.generation > since:
                    lost[name] = lost.get(name, 0) + made.get(name, 0) - step
                made[name] = step
        return lost

    def restored(self) -> Mapping[str, int]:
        """The steps from which the newest world has continued."""
        return next(line.steps for line in reversed(self.lines) if line.kind == "restored")

    def set_capacity(self, nodes: int) -> None:
        """Sets the number of nodes that this machine has room for."""
        (self.site.state.path / "capacity").write_text(str(nodes))

    def end(self, *nodes: int) -> None:
        """Ends machines at once, with all that they have in memory."""
        processes = [process for node in nodes for process in self.job.processes(node)]
        for process in processes:
            process.suspend()
        for folder in {folder for process in processes if (folder := _memory_of(process)) is not None}:
            shutil.rmtree(folder)
        for process in processes:
            process.kill()

    async def store(self) -> Mapping[str, int]:
        """Has a checkpoint stored; returns the steps that each state had made by then."""
        before = (await self.job.status()).checkpoint.answered
        made = self.lines[-1].steps
        await self.job.client.save_checkpoint(self.job.name)
        await self.job.until(lambda status: status.checkpoint.answered > before)
        return made


def _memory_of(process: psutil.Process) -> Path | None:
    folder = process.environ().get("PERDURE_MEMORY_DIR")
    return Path(folder) if folder else None


async def keep_states(
    site: Site,
    *kinds: str,
    nodes: str = "2:3",
    waits: bool = False,
    others: Mapping[str, Any] | None = None,
    **spec: Any,
) -> KeptStates:
    """Starts a training of these states.

    Args:
        site: The site.
        kinds: The states.
        nodes: As a job says it.
        waits: Whether its ranks wait for the file `go` before they restore.
        others: Further roles.
        spec: Other fields of the job.
    """
    out = site.folder / "out"
    out.mkdir()
    if not waits:
        (out / "go").touch()
    command = ["torchrun", str(SCRIPT), str(out), *kinds]
    roles = {"worker": {"nodes": nodes, "command": command}} | dict(others or {})
    return KeptStates(site, await site.submit(out=out, roles=roles, **spec))
