"""Kinds of training scripts, each in a job of two nodes: a rank is killed, and all must continue, from warm starts."""

from __future__ import annotations

import asyncio
import secrets
import time
from contextlib import suppress
from pathlib import Path

import psutil
from pydantic import BaseModel, ConfigDict, Field

from benchmarks.recovery.perdure_job import ROLE, TORCHRUN, ControlPlane, node_processes
from benchmarks.recovery.processes import QUIET_NETWORK, TrialFailed, eventually, kill
from perdure.base.errors import PerdureError
from perdure.contract.names import uid_of
from perdure_launcher.warm_start.names import LEARNED
from perdure_launcher.warm_start.starts import Start, lacks_standbys, read_start
from perdure_training.node_api.progress_file import RankProgress, read_progress

SCRIPTS = Path(__file__).parents[2] / "tests" / "launcher" / "scripts" / "kinds"

NODES = 2
START_SECONDS = 180.0
RECOVER_SECONDS = 120.0
STEPS = 3
"""Number of steps after which a world counts as recovered."""


class ScriptTrial(BaseModel):
    """One kill of a rank and its consequences."""

    model_config = ConfigDict(frozen=True)

    script: str
    number: int = Field(ge=1)
    recovered: bool
    warm: bool = False
    """Whether all ranks of the new world were forks or standbys."""
    learned: bool = False
    """Whether the warm interpreter had imported the script's modules before the kill."""
    seconds: float | None = None
    """From the kill to the first step of all ranks."""
    start_seconds: float | None = None
    error: str = ""


def scripts() -> list[str]:
    """Returns the kinds of scripts."""
    return sorted(path.stem for path in SCRIPTS.glob("*.py"))


class ScriptJob:
    """One job, observed through the progress files that its ranks write for the agent."""

    def __init__(self, script: str, folder: Path, plane: ControlPlane, *, warm_starts: bool = True) -> None:
        self._script = script
        self._folder = folder
        self._plane = plane
        self._warm_starts = warm_starts
        self._name = f"bench-{secrets.token_hex(3)}"
        self._uid = ""
        self._run_directories: dict[int, Path] = {}

    async def start(self) -> None:
        spec = {
            "name": self._name,
            "recovery": {"warm_starts": self._warm_starts},
            "env": {**QUIET_NETWORK, "TEST_STEPS_DIR": str(self._folder), "HF_HUB_OFFLINE": "1"},
            "roles": {
                ROLE: {
                    "nodes": NODES,
                    "nproc_per_node": 1,
                    "command": [str(TORCHRUN), str(SCRIPTS / f"{self._script}.py")],
                }
            },
        }
        try:
            submission = await self._plane.client.submit(spec)
        except PerdureError as error:
            raise TrialFailed(f"not submitted: {error}") from error
        self._uid = uid_of(submission.run_id)

    def world(self, *, after: int, steps: int) -> dict[int, RankProgress] | None:
        """Returns the progress by rank if all ranks have made this many steps in one generation after `after`."""
        found: dict[int, RankProgress] = {}
        for rank in range(NODES):
            progress = self._progress(rank)
            if progress is None or progress.generation <= after or progress.step < steps:
                return None
            found[rank] = progress
        return found if len({progress.generation for progress in found.values()}) == 1 else None

    def starts(self) -> list[Start | None]:
        return [read_start(folder / "warm", 0) for _, folder in sorted(self._run_directories.items())]

    def has_learned(self) -> bool:
        """Returns whether all nodes have imported in advance the modules that their ranks reported."""
        folders = [folder / "warm" for folder in self._run_directories.values()]
        return all((folder / LEARNED).exists() and not lacks_standbys(folder, processes=1) for folder in folders)

    async def stop(self) -> None:
        if not self._uid:
            return
        with suppress(PerdureError):
            await self._plane.client.cancel(self._name)
        with suppress(PerdureError, TimeoutError):
            await asyncio.wait_for(self._plane.client.wait(self._name), 60)
        kill(node_processes(f"{self._uid}/"))

    def _progress(self, rank: int) -> RankProgress | None:
        folder = self._run_directories.get(rank) or self._find_run_directory(rank)
        return read_progress(folder / "progress" / f"rank-{rank}") if folder else None

    def _find_run_directory(self, node: int) -> Path | None:
        for process in node_processes(f"{self._uid}/{ROLE}-{node}/"):
            with suppress(psutil.NoSuchProcess, psutil.AccessDenied):
                if found := process.environ().get("PERDURE_RUN_DIR"):
                    self._run_directories[node] = Path(found)
                    return self._run_directories[node]
        return None


async def run_script_trial(script: str, *, number: int, folder: Path, plane: ControlPlane) -> ScriptTrial:
    """Runs one trial; a failure is a result, not an exception."""
    record = ScriptTrial(script=script, number=number, recovered=False)
    job = ScriptJob(script, folder, plane)
    began = time.time()
    try:
        await job.start()
        first = await eventually(
            lambda: job.world(after=0, steps=STEPS), seconds=START_SECONDS, otherwise="the job did not start stepping"
        )
        record = record.model_copy(update={"start_seconds": time.time() - began})
        with suppress(TrialFailed):
            # A real node fails after hours, not in its first seconds, so the reported modules are imported by then.
            await eventually(lambda: job.has_learned() or None, seconds=30, otherwise="nothing was learned")
        learned = job.has_learned()
        victim, generation = first[NODES - 1], first[0].generation
        killed_at = kill([psutil.Process(victim.pid)])
        await eventually(
            lambda: job.world(after=generation, steps=1), seconds=RECOVER_SECONDS, otherwise="not stepping again"
        )
        seconds = time.time() - killed_at
        await eventually(
            lambda: job.world(after=generation, steps=STEPS),
            seconds=RECOVER_SECONDS,
            otherwise="did not continue to step",
        )
        warm = all(start is not None and start.warm for start in job.starts())
        return record.model_copy(update={"recovered": True, "seconds": seconds, "warm": warm, "learned": learned})
    except (TrialFailed, psutil.NoSuchProcess) as failed:
        return record.model_copy(update={"error": str(failed)})
    finally:
        await job.stop()
