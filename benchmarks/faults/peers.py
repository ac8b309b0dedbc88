"""What DLRover and NVRx do about the faults that they can be run on: each fault on a job of two nodes of one rank each.

A trial runs as a process, so that it can have its own PID namespace, and prints its outcome as JSON.
"""

from __future__ import annotations

import asyncio
import json
import re
import signal
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from signal import Signals

import psutil
from pydantic import BaseModel
from rich.table import Table

from benchmarks.chaos.programs import PROGRAMS
from benchmarks.recovery import dlrover_environment
from benchmarks.recovery.dlrover_environment import NotAvailable
from benchmarks.recovery.peers import DLRoverJob, NVRxJob, PeerJob
from benchmarks.recovery.processes import TrialFailed, eventually, in_pid_namespace
from benchmarks.recovery.records import Scenario

from . import nvrx_environment
from .rows import PACE
from .site import FOREVER, SETTLED_STEPS, STEPS_AFTER, WRAPPER

HEARTBEATS = Path(__file__).with_name("programs") / "heartbeats.py"
RANKS = (0, 1)
CULPRIT = 1
RESTARTS = "3"
"""How often ranks are restarted: the default of DLRover and of the examples of NVRx."""
START_SECONDS = 300.0
"""The longest time until all ranks have made their first steps: DLRover's master and agents start slowly."""
LOOK_SECONDS = 0.05
LEFT_SECONDS = 60.0
"""Seconds beyond those of a start and of a trial after which a trial is given up."""
_COMPLAINT = re.compile(r"fail|kill|hang|error|timeout|heartbeat|straggl|unhealthy|signal", re.IGNORECASE)


class PeerName(StrEnum):
    """The systems."""

    DLROVER = "DLRover"
    NVRX = "NVRx"


@dataclass(frozen=True)
class PeerFault:
    """A fault of one rank."""

    name: str
    """The row of Perdure's own matrix."""
    signal: Signals | None = None
    """A signal to its process, or else ..."""
    kind: str = ""
    """... what happens in the process, as `programs/injected.py` knows it."""
    each_time: bool = False
    arguments: Mapping[str, float] | None = None


FAULTS = (
    PeerFault("kill-rank", signal=signal.SIGKILL),
    PeerFault("exit-1", kind="exit_with_1"),
    PeerFault("exit-1-always", kind="exit_with_1", each_time=True),
    PeerFault("stopped-rank", signal=signal.SIGSTOP),
    PeerFault("infinite-loop", kind="loop"),
    PeerFault("mismatched-collective", kind="enter_one_more_collective"),
    PeerFault("half-speed", kind="slow", arguments={"seconds": PACE}),
    PeerFault("nan-loss", kind="spoil"),
)
_BY_NAME = {fault.name: fault for fault in FAULTS}


class PeerOutcome(BaseModel):
    """What a peer does about a fault."""

    system: PeerName
    name: str
    limit_s: float
    """How long it was looked at."""
    acted_s: float | None = None
    """Seconds from the fault until it starts a process of a rank or ends the job; None: not within the limit."""
    stepping_s: float | None = None
    """Seconds from the fault until all ranks step again; None where they do not."""
    ended_s: float | None = None
    """Seconds from the fault until the job ends; None where it does not."""
    restarts: int = 0
    """How often the rank with the fault was started again."""
    named: tuple[int, ...] = ()
    """The ranks whose processes it names in its logs in a line about a failure."""
    steps_lost: int | None = None
    """Steps that were made again; None where it does not step again."""
    problem: str = ""
    """Why it could not be tried."""


class PeerTrial(BaseModel):
    """The single argument of this program, as JSON."""

    system: PeerName
    fault: str
    folder: Path
    binaries: Path
    limit_s: float

    def job(self) -> PeerJob:
        """The job, before it starts."""
        _, *script = _DDP.command(self.folder / "out", FOREVER)
        program: list[str | Path] = [WRAPPER, *script]
        environment = {"FAULTS_FOLDER": str(self.folder / "faults")}
        if self.system is PeerName.DLROVER:
            kind, before = DLRoverJob, []
        else:
            kind, before = NVRxJob, [HEARTBEATS]
        return kind(
            Scenario.WORKER,
            self.folder,
            program=[*before, *program],
            environment=environment,
            restarts=RESTARTS,
            binaries=self.binaries,
        )


_DDP = next(program for program in PROGRAMS if program.name == "ddp")


class Followed:
    """What the ranks of a job leave in the folder of the injector."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def pid(self, rank: int) -> int | None:
        path = self.folder / f"pid-{rank}"
        return int(path.read_text() or 0) or None if path.exists() else None

    def steps(self, rank: int) -> list[tuple[float, int]]:
        path = self.folder / f"steps-{rank}"
        rows = [line.split() for line in path.read_text().splitlines()] if path.exists() else []
        return [(float(row[0]), int(row[1])) for row in rows if len(row) == 3]

    def made(self, since: float) -> int:
        """The fewest steps that any rank has made since a time."""
        return min(sum(time > since for time, _ in self.steps(rank)) for rank in RANKS)

    def hit(self) -> tuple[float, int] | None:
        path = self.folder / f"hit-{CULPRIT}"
        words = path.read_text().split() if path.exists() else []
        return (float(words[0]), int(words[1])) if len(words) == 2 else None

    def lost(self, since: float) -> int | None:
        """The steps that were made again by processes which were started after a time."""
        before = [number for rank in RANKS for at, number in self.steps(rank) if at <= since]
        after = [number for rank in RANKS for at, number in self.steps(rank) if at > since]
        return max(0, max(before) - min(after) + 1) if before and after else None


async def try_fault(trial: PeerTrial) -> PeerOutcome:
    """Tries one fault, and returns what became of it."""
    fault, job = _BY_NAME[trial.fault], trial.job()
    outcome = PeerOutcome(system=trial.system, name=trial.fault, limit_s=trial.limit_s)
    followed = Followed(trial.folder / "faults")
    for folder in (followed.folder, trial.folder / "out"):
        folder.mkdir()
    try:
        await job.start()
        await eventually(
            lambda: True if followed.made(0.0) >= 2 * SETTLED_STEPS else None,
            seconds=START_SECONDS,
            otherwise="its ranks did not step",
        )
        pids = {rank: followed.pid(rank) for rank in RANKS}
        logs = {path: path.stat().st_size for path in trial.folder.glob("*.log")}
        fault_at = await _inject(fault, followed, pids[CULPRIT])
        found = await _follow(fault, job, followed, pids, fault_at, trial.limit_s)
        return outcome.model_copy(update={**found, "named": _named(logs, pids)})
    except TrialFailed as failed:
        return outcome.model_copy(update={"problem": f"not tried: {failed}"})
    finally:
        await job.stop()


async def _inject(fault: PeerFault, followed: Followed, pid: int | None) -> float:
    if fault.signal is not None:
        assert pid is not None
        psutil.Process(pid).send_signal(fault.signal)
        return time.time()
    step = max(number for _, number in followed.steps(CULPRIT)) + 15
    told = {"kind": fault.kind, "rank": CULPRIT, "step": step, "each_time": fault.each_time, **(fault.arguments or {})}
    partial = followed.folder / "fault.partial"
    partial.write_text(json.dumps(told))
    partial.rename(followed.folder / "fault")
    at, _ = await eventually(followed.hit, seconds=LEFT_SECONDS, otherwise=f"no {fault.kind}")
    return at


async def _follow(
    fault: PeerFault,
    job: PeerJob,
    followed: Followed,
    pids: Mapping[int, int | None],
    fault_at: float,
    limit: float,
) -> dict[str, float | int | None]:
    """Looks at a job until it steps again, has ended, or the time is over."""
    known, acted_at, restarts, stepping_at, ended_at = dict(pids), None, 0, None, None
    while time.time() < fault_at + limit:
        await asyncio.sleep(LOOK_SECONDS)
        for rank in RANKS:
            if (new := followed.pid(rank)) != known[rank]:
                known[rank] = new
                acted_at = acted_at or time.time()
                restarts += rank == CULPRIT
        if not job.alive():
            ended_at = time.time()
            acted_at = acted_at or ended_at
            break
        if acted_at is not None and not fault.each_time and followed.made(acted_at) >= STEPS_AFTER:
            stepping_at = max(min(at for at, _ in followed.steps(rank) if at > acted_at) for rank in RANKS)
            break
    return {
        "acted_s": None if acted_at is None else round(acted_at - fault_at, 2),
        "stepping_s": None if stepping_at is None else round(stepping_at - fault_at, 2),
        "ended_s": None if ended_at is None else round(ended_at - fault_at, 2),
        "restarts": restarts,
        "steps_lost": None if acted_at is None or stepping_at is None else followed.lost(acted_at),
    }


def _named(logs: Mapping[Path, int], pids: Mapping[int, int | None]) -> tuple[int, ...]:
    """The ranks whose process IDs stand in a line about a failure that was written since."""
    told: list[str] = []
    for path, known in logs.items():
        with path.open("rb") as file:
            file.seek(known)
            text = file.read().decode(errors="replace")
        told += [line for line in text.splitlines() if _COMPLAINT.search(line)]
    # Process IDs of a namespace are small numbers.
    named = {rank: re.compile(rf"pid\W{{0,3}}{pid}\b", re.IGNORECASE) for rank, pid in pids.items()}
    return tuple(rank for rank, pattern in named.items() if any(map(pattern.search, told)))


async def _run_isolated(trial: PeerTrial) -> PeerOutcome:
    """Runs a trial in a PID namespace of its own, so that no process of the peer remains."""
    command = [sys.executable, "-m", __spec__.name, trial.model_dump_json()]
    failed = PeerOutcome(system=trial.system, name=trial.fault, limit_s=trial.limit_s)
    with (trial.folder / "harness.log").open("w+b") as errors:
        process = await asyncio.create_subprocess_exec(
            *in_pid_namespace(command), stdout=asyncio.subprocess.PIPE, stderr=errors
        )
        try:
            output, _ = await asyncio.wait_for(process.communicate(), START_SECONDS + trial.limit_s + 3 * LEFT_SECONDS)
        except TimeoutError:
            return failed.model_copy(update={"problem": "not tried: the trial itself hung"})
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()
        errors.seek(0)
        last = errors.read().decode(errors="replace").strip().splitlines()[-1:]
    lines = output.decode().strip().splitlines()
    if process.returncode != 0 or not lines:
        return failed.model_copy(update={"problem": f"not tried: {' '.join(last)}"})
    return PeerOutcome.model_validate_json(lines[-1])


async def try_peers(names: Sequence[str], *, limit: float, kept: Path) -> list[PeerOutcome]:
    """Tries the faults one after another on each peer that can be installed.

    Args:
        names: The names of the faults; empty for all.
        limit: Seconds for which a peer is looked at after each fault.
        kept: The folder for the logs of the peers.
    """
    environments = {PeerName.DLROVER: dlrover_environment.ensure, PeerName.NVRX: nvrx_environment.ensure}
    outcomes: list[PeerOutcome] = []
    for system, ensure in environments.items():
        due = [fault.name for fault in FAULTS if not names or fault.name in names]
        try:
            binaries = await ensure()
        except NotAvailable as why:
            outcomes += [PeerOutcome(system=system, name=name, limit_s=limit, problem=f"{why}") for name in due]
            continue
        for name in due:
            with tempfile.TemporaryDirectory(prefix="pp-", ignore_cleanup_errors=True) as folder:
                trial = PeerTrial(system=system, fault=name, folder=Path(folder), binaries=binaries, limit_s=limit)
                outcomes.append(await _run_isolated(trial))
                for log in trial.folder.glob("*.log"):
                    (kept / f"{system}-{name}-{log.name}").write_bytes(log.read_bytes())
            print(outcomes[-1].model_dump_json(), file=sys.stderr)
    return outcomes


def table(outcomes: Sequence[PeerOutcome]) -> Table:
    """What the peers did."""
    times = ("acts after (s)", "steps again (s)", "ends (s)")
    shown = Table("peer", "fault", *times, "restarts", "names ranks", "steps lost")
    for one in outcomes:
        if one.problem:
            shown.add_row(one.system, one.name, one.problem)
            continue
        acted = f"not within {one.limit_s:g} s" if one.acted_s is None else f"{one.acted_s:g}"
        others = ["-" if value is None else f"{value:g}" for value in (one.stepping_s, one.ended_s)]
        named = ", ".join(map(str, one.named)) or "none"
        lost = "-" if one.steps_lost is None else f"{one.steps_lost}"
        shown.add_row(one.system, one.name, acted, *others, f"{one.restarts}", named, lost)
    return shown


if __name__ == "__main__":
    print(asyncio.run(try_fault(PeerTrial.model_validate_json(sys.argv[1]))).model_dump_json())
