"""One trial: a job whose node is killed and not replaced, and which grows again later; then the unbroken run."""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import secrets
import shutil
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from benchmarks.recovery.perdure_job import CAPACITY_FILE, ROLE, TORCHRUN, ControlPlane, node_processes
from benchmarks.recovery.processes import QUIET_NETWORK, TrialFailed, eventually, kill
from benchmarks.recovery.steps import Step, StepLog, WorldStart, find_world
from perdure.base.errors import PerdureError
from perdure.client.views import Submission
from perdure.contract import JobResult
from perdure.contract.names import uid_of
from perdure_launcher.system.memory_folder import ROOT as MEMORY

from .lacking import layers_of, shapes
from .records import Change, TrialRecord, Way, change, differing, newest_common_step, parse_losses

TRAIN = Path(__file__).with_name("train.py")
REPOSITORY = Path(__file__).resolve().parents[2]
VICTIM = 1
EVERY = 10
"""Steps between two checkpoints on disk."""


@dataclass
class Trial:
    """A job of one way, and its observation."""

    plane: ControlPlane
    folder: Path
    way: Way
    nodes: int
    megabytes: float
    pause: float
    patience: float
    """Seconds for each phase."""
    number: int = 1
    name: str = field(default_factory=lambda: f"bench-{secrets.token_hex(3)}")
    _submission: Submission | None = None
    _ended: asyncio.Task[JobResult] | None = None

    async def run(self) -> TrialRecord:
        """Makes the trial; a failure is a result."""
        record = TrialRecord(way=self.way, nodes=self.nodes, megabytes=self.megabytes, number=self.number)
        log = StepLog(self.folder)
        try:
            await self._submit()
            first = await self._world(log, self.nodes, after=0.0)
            killed_at = await self._kill(log, first)
            less = await self._world(log, self.nodes - 1, after=killed_at)
            shrunk = await self._change(log, first, less, since=killed_at)
            record = record.model_copy(update={"shrunk": shrunk})
            await self._until_between_checkpoints(log, less)
            grown_at = time.time()
            self._capacity.unlink()
            more = await self._world(log, self.nodes, after=grown_at)
            grown = await self._change(log, less, more, since=None)
            record = record.model_copy(update={"grown": grown})
            last = log.refresh()[-1].step
        except TrialFailed as failed:
            return record.model_copy(update={"error": str(failed)})
        finally:
            await self._stop()
        if self.way is not Way.MEMORY:
            return record
        assert shrunk is not None
        assert grown is not None
        worlds = [(self.nodes, shrunk.first_step - 1), (self.nodes - 1, grown.first_step - 1), (self.nodes, last)]
        wrong = await self._compare(worlds)
        return record.model_copy(update={"bitwise": not wrong, "error": f"other losses: {wrong[:4]}" if wrong else ""})

    @property
    def _capacity(self) -> Path:
        return self.plane.state / CAPACITY_FILE

    @property
    def _environment(self) -> dict[str, str]:
        return {
            **QUIET_NETWORK,
            "PYTHONPATH": str(REPOSITORY),
            "BENCH_WAY": self.way,
            "BENCH_FOLDER": str(self.folder),
            "BENCH_MEGABYTES": str(self.megabytes),
            "BENCH_EVERY": str(EVERY),
            "BENCH_PAUSE": str(self.pause),
        }

    async def _submit(self) -> None:
        command = [str(TORCHRUN), str(TRAIN)]
        spec: dict[str, Any] = {
            "name": self.name,
            "env": self._environment,
            "roles": {ROLE: {"nodes": f"{self.nodes - 1}:{self.nodes}", "nproc_per_node": 1, "command": command}},
        }
        if self.way is Way.STORAGE:
            spec["checkpoint"] = {"storage": f"file://{self.folder}/storage", "every": EVERY}
            # What the lost node had in memory is newer, and the job would wait for it to come back.
            spec["recovery"] = {"on_state_loss": "older"}
        try:
            self._submission = await self.plane.client.submit(spec)
        except PerdureError as error:
            raise TrialFailed(f"not submitted: {error}") from error
        self._ended = asyncio.create_task(self.plane.client.wait(self.name))

    async def _world(self, log: StepLog, size: int, *, after: float) -> WorldStart:
        def look() -> WorldStart | None:
            if self._ended is not None and self._ended.done():
                raise TrialFailed(f"the job ended before a world of {size} stepped")
            return find_world(log.refresh(), world_size=size, after=after)

        return await eventually(look, seconds=self.patience, otherwise=f"no world of {size} stepped")

    async def _until_between_checkpoints(self, log: StepLog, world: WorldStart) -> None:
        """Waits for the middle of a step that is in the middle between two checkpoints, with some steps before it."""
        pids = set(world.pids.values())
        begun = newest_common_step(log.refresh(), pids)

        def due() -> int | None:
            step = newest_common_step(log.refresh(), pids)
            return step if step % EVERY == EVERY // 2 and step >= begun + EVERY else None

        await eventually(due, seconds=self.patience, otherwise="the steps did not go on")
        await asyncio.sleep(_step_seconds(log.steps, pids) / 2)

    async def _kill(self, log: StepLog, world: WorldStart) -> float:
        """Kills a node, whose memory is lost with it; returns the time."""
        self._capacity.write_text(f"{self.nodes - 1}\n", encoding="utf-8")
        victims = self._processes(VICTIM)
        memory = {folder for process in victims if (folder := _memory_of(process)) is not None}
        await self._until_between_checkpoints(log, world)
        victims = self._processes(VICTIM)
        killed_at = kill(victims)
        for folder in memory:
            shutil.rmtree(folder, ignore_errors=True)
        return killed_at

    async def _change(self, log: StepLog, former: WorldStart, world: WorldStart, *, since: float | None) -> Change:
        parameters = shapes(layers_of(self.megabytes))

        def look() -> Change | None:
            steps = log.refresh()
            return change(steps, self._loads(), former=former, world=world, since=since, parameters=parameters)

        return await eventually(look, seconds=self.patience, otherwise=f"a world of {len(world.pids)} made no new step")

    def _loads(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in (self.folder / "loads.log").read_text(encoding="utf-8").splitlines()]

    def _processes(self, node: int) -> list[psutil.Process]:
        return node_processes(f"{self._uid}/{ROLE}-{node}/")

    @property
    def _uid(self) -> str:
        assert self._submission is not None
        return uid_of(self._submission.run_id)

    async def _stop(self) -> None:
        self._capacity.unlink(missing_ok=True)
        if self._submission is None:
            return
        with suppress(PerdureError):
            await self.plane.client.cancel(self.name)
        if self._ended is not None:
            with suppress(PerdureError, TimeoutError):
                await asyncio.wait_for(self._ended, 60)
        with suppress(TrialFailed):
            await eventually(
                lambda: None if node_processes(f"{self._uid}/") else True, seconds=20, otherwise="nodes stayed"
            )
        kill(node_processes(f"{self._uid}/"))

    async def _compare(self, worlds: Sequence[tuple[int, int]]) -> list[tuple[int, int, int]]:
        """Has an unbroken run change its size at the same steps by DCP; returns the losses that differ.

        Args:
            worlds: The sizes of the worlds, with the last step of each.
        """
        folder = self.folder / "unbroken"
        folder.mkdir()
        for size, last in worlds:
            environment = {
                "BENCH_WAY": Way.DCP,
                "BENCH_FOLDER": str(folder),
                # It saves nothing but its last step.
                "BENCH_EVERY": str(last),
                "BENCH_UNTIL": str(last),
                "BENCH_PAUSE": "0",
            }
            await _run_alone(size, {**os.environ, **self._environment, **environment}, log=folder / "log")
        mine, unbroken = (
            parse_losses((one / "losses.log").read_text(encoding="utf-8")) for one in (self.folder, folder)
        )
        return differing(mine, unbroken)


async def _run_alone(size: int, environment: Mapping[str, str], *, log: Path) -> None:
    with log.open("ab") as output:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={size}", str(TRAIN)),
            env=environment,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=output,
            stderr=output,
        )
        if await process.wait():
            raise RuntimeError(f"the unbroken run failed: {log}")


def _memory_of(process: psutil.Process) -> Path | None:
    """The memory folder of a process's node."""
    with suppress(psutil.Error):
        folder = Path(process.environ().get("PERDURE_MEMORY_DIR", "/"))
        return folder if folder.parent == MEMORY else None
    return None


def _step_seconds(steps: Sequence[Step], pids: set[int]) -> float:
    """The usual time from a step of a rank to its next."""
    times: dict[int, list[float]] = {}
    for step in steps:
        if step.pid in pids:
            times.setdefault(step.pid, []).append(step.time)
    gaps = [after - before for made in times.values() for before, after in itertools.pairwise(made)]
    return statistics.median(gaps)
