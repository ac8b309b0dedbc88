"""The ways in which a fault is made: each does to a job what a machine, a user or a program does."""

from __future__ import annotations

import json
import signal
import subprocess
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import psutil

from benchmarks.chaos.faults import Kind, inject, victims
from benchmarks.recovery.processes import TrialFailed, eventually

from .site import Run

AHEAD = 15
"""Steps between writing down a fault and the fault: all ranks look before each step."""
HIT_SECONDS = 30.0


class Injection:
    """What is done to a job."""

    lacks: str = ""
    """What is missing to make it here."""

    def prepare(self, run: Run) -> None:
        """Prepares the machine, before the job starts.

        Raises:
            TrialFailed: if it does not allow that.
        """

    async def inject(self, run: Run) -> float:
        """Makes the fault, and returns its time in seconds since the epoch.

        Raises:
            TrialFailed: if it could not be made.
        """
        raise NotImplementedError

    def heal(self, run: Run) -> None:
        """Undoes what a repair cannot undo, once there is a verdict."""

    def clear(self, run: Run) -> None:
        """Leaves nothing behind, whatever happened."""


@dataclass(frozen=True)
class Kill(Injection):
    """SIGKILL of the processes of a kind, on one node or on several at once."""

    kind: Kind
    nodes: Sequence[int] = (1,)

    async def inject(self, run: Run) -> float:
        at, killed = inject(self.kind, uid=run.uid, nodes=tuple(self.nodes))
        if len(killed) < len(self.nodes):
            raise TrialFailed(f"no {self.kind} to kill")
        return at


@dataclass(frozen=True)
class Freeze(Injection):
    """SIGSTOP of the processes of a kind on one node."""

    kind: Kind
    node: int = 1

    async def inject(self, run: Run) -> float:
        frozen = list(victims(self.kind, f"{run.uid}/worker-{self.node}/"))
        if not frozen:
            raise TrialFailed(f"no {self.kind} to stop")
        for process in frozen:
            process.send_signal(signal.SIGSTOP)
        return time.time()

    def heal(self, run: Run) -> None:
        if self.kind is Kind.FROZEN_AGENT:
            self.clear(run)

    def clear(self, run: Run) -> None:
        for process in victims(self.kind, f"{run.uid}/worker-{self.node}/"):
            if process.status() == psutil.STATUS_STOPPED:
                process.send_signal(signal.SIGCONT)


@dataclass(frozen=True)
class Missing(Injection):
    """A fault that cannot be made here."""

    lacks: str = ""


@dataclass(frozen=True)
class FullDisk(Injection):
    """The disk to which a program saves has no room any more, until there is a verdict."""

    size: str = "1m"

    def prepare(self, run: Run) -> None:
        _run("mount", "-t", "tmpfs", "-o", f"size={self.size}", "tmpfs", str(run.out))

    async def inject(self, run: Run) -> float:
        with suppress(OSError), (run.out / "filler").open("wb", buffering=0) as filler:
            while True:
                filler.write(bytes(4096))
        return time.time()

    def heal(self, run: Run) -> None:
        (run.out / "filler").unlink(missing_ok=True)

    def clear(self, run: Run) -> None:
        _run("umount", "-l", str(run.out))


@dataclass(frozen=True)
class HangingStorage(Injection):
    """The disk to which a program saves answers no write, until there is a verdict."""

    def prepare(self, run: Run) -> None:
        image = str(run.out.with_name("image"))
        _run("truncate", "-s", "64M", image)
        _run("mkfs.ext4", "-q", image)
        _run("mount", "-o", "loop", image, str(run.out))

    async def inject(self, run: Run) -> float:
        _run("fsfreeze", "--freeze", str(run.out))
        return time.time()

    def heal(self, run: Run) -> None:
        _run("fsfreeze", "--unfreeze", str(run.out))

    def clear(self, run: Run) -> None:
        with suppress(TrialFailed):
            self.heal(run)
        _run("umount", "-l", str(run.out))


def _run(*command: str) -> None:
    try:
        subprocess.run(command, check=True, capture_output=True, text=True)
    except (OSError, subprocess.CalledProcessError) as error:
        raise TrialFailed(f"{' '.join(command)}: {getattr(error, 'stderr', '') or error}") from error


@dataclass(frozen=True)
class InRank(Injection):
    """A fault inside of a rank: one of those that `programs/injected.py` knows."""

    kind: str
    rank: int = 1
    others: bool = False
    """The other ranks have it, and this one has not."""
    each_time: bool = False
    """It comes again whenever that step is made."""
    ends: bool = False
    """It ends the process: the fault is when that is gone, since Python and torch take a second or more to leave."""
    arguments: dict[str, Any] = field(default_factory=dict[str, Any])

    async def inject(self, run: Run) -> float:
        fault = {
            "kind": self.kind,
            "rank": self.rank,
            "others": self.others,
            "each_time": self.each_time,
            "step": run.furthest() + AHEAD,
            **self.arguments,
        }
        partial = run.folder / "fault.partial"
        partial.write_text(json.dumps(fault), encoding="utf-8")
        partial.rename(run.folder / "fault")
        hit = run.folder / f"hit-{1 - min(self.rank, 1) if self.others else self.rank}"
        time_and_pid = await eventually(
            lambda: (hit.read_text().split() or None) if hit.exists() else None,
            seconds=HIT_SECONDS,
            otherwise=f"no {self.kind}",
        )
        if not self.ends:
            return float(time_and_pid[0])
        pid = int(time_and_pid[1])
        return await eventually(lambda: _ended(pid), seconds=HIT_SECONDS, otherwise="the rank stayed")


def _ended(pid: int) -> float | None:
    """The present time, if a process is gone."""
    with suppress(psutil.NoSuchProcess):
        if psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
            return None
    return time.time()
