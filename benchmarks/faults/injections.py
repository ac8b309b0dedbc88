"""The ways in which a fault is made: each does to a job what a machine, a user or a program does."""

from __future__ import annotations

import json
import signal
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, ClassVar

import psutil

from benchmarks.chaos.faults import Kind, find, inject, victims
from benchmarks.recovery.processes import TrialFailed, eventually

from .machines import INTERFACE, Machine, placement, set_right, skew
from .machines import run as run_command
from .site import Run

AHEAD = 15
"""Steps between writing down a fault and the fault: all ranks look before each step."""
HIT_SECONDS = 30.0


class Injection:
    """What is done to a job."""

    placed: ClassVar[bool] = False
    """It needs nodes on machines of their own."""

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
        at, hit = inject(self.kind, find(self.kind, uid=run.uid, nodes=self.nodes))
        if len(hit) < len(self.nodes):
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
class FullDisk(Injection):
    """The disk to which a program saves has no room any more, until there is a verdict. The fault is when the rank that
    saves is gone, as for faults in a rank."""

    size: str = "1m"
    node: int = 0
    """The node of that rank."""

    def prepare(self, run: Run) -> None:
        run_command("mount", "-t", "tmpfs", "-o", f"size={self.size}", "tmpfs", str(run.out))

    async def inject(self, run: Run) -> float:
        with suppress(OSError), (run.out / "filler").open("wb", buffering=0) as filler:
            while True:
                filler.write(bytes(4096))
        (rank,) = victims(Kind.RANK, f"{run.uid}/worker-{self.node}/")
        return await eventually(lambda: _ended(rank.pid), seconds=HIT_SECONDS, otherwise="the rank stayed")

    def heal(self, run: Run) -> None:
        (run.out / "filler").unlink(missing_ok=True)

    def clear(self, run: Run) -> None:
        run_command("umount", "-l", str(run.out))


@dataclass(frozen=True)
class HangingStorage(Injection):
    """The disk to which a program saves answers no write, until there is a verdict."""

    def prepare(self, run: Run) -> None:
        image = str(run.out.with_name("image"))
        run_command("truncate", "-s", "64M", image)
        run_command("mkfs.ext4", "-q", image)
        run_command("mount", "-o", "loop", image, str(run.out))

    async def inject(self, run: Run) -> float:
        run_command("fsfreeze", "--freeze", str(run.out))
        return time.time()

    def heal(self, run: Run) -> None:
        run_command("fsfreeze", "--unfreeze", str(run.out))

    def clear(self, run: Run) -> None:
        with suppress(TrialFailed):
            self.heal(run)
        run_command("umount", "-l", str(run.out))


@dataclass(frozen=True)
class Partition(Injection):
    """A machine neither receives nor sends anything, until there is a verdict."""

    node: int = 1
    placed: ClassVar = True

    async def inject(self, run: Run) -> float:
        for chain, option in _WAYS:
            self._machine.run("iptables", "--insert", chain, option, INTERFACE, "--jump", "DROP")
        return time.time()

    def heal(self, run: Run) -> None:
        self.clear(run)

    def clear(self, run: Run) -> None:
        self._machine.run("iptables", "--flush")

    @property
    def _machine(self) -> Machine:
        return placement().machines[self.node]


_WAYS = (("INPUT", "--in-interface"), ("OUTPUT", "--out-interface"))


@dataclass(frozen=True)
class SlowLink(Injection):
    """A machine sends slowly, until that was seen."""

    node: int = 1
    rate: str = "80mbit"
    placed: ClassVar = True

    async def inject(self, run: Run) -> float:
        shape = ("tbf", "rate", self.rate, "burst", "256kbit", "latency", "400ms")
        placement().machines[self.node].run("tc", "qdisc", "add", "dev", INTERFACE, "root", *shape)
        return time.time()

    def clear(self, run: Run) -> None:
        placement().machines[self.node].run("tc", "qdisc", "delete", "dev", INTERFACE, "root")


@dataclass(frozen=True)
class SkewedClock(Injection):
    """A fault on a machine whose clock is wrong."""

    fault: Injection
    node: int = 1
    seconds: int = 90
    placed: ClassVar = True

    def prepare(self, run: Run) -> None:
        skew(self.node, self.seconds)

    async def inject(self, run: Run) -> float:
        return await self.fault.inject(run)

    def clear(self, run: Run) -> None:
        set_right(self.node)


@dataclass(frozen=True)
class Both(Injection):
    """Two faults at once."""

    first: Injection
    second: Injection

    async def inject(self, run: Run) -> float:
        await self.first.inject(run)
        return await self.second.inject(run)

    def clear(self, run: Run) -> None:
        self.first.clear(run)
        self.second.clear(run)


@dataclass(frozen=True)
class InRank(Injection):
    """A fault inside of a rank: one of those that `programs/injected.py` knows."""

    kind: str
    rank: int = 1
    others: bool = False
    """The other ranks have it, and this one has not."""
    each_time: bool = False
    """It comes again in each world, once that step is reached."""
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
