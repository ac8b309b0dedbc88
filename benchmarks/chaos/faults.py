"""The faults of a local site: each sends SIGKILL to the processes that it names, without warning."""

from __future__ import annotations

import random
import signal
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from enum import StrEnum
from pathlib import Path

import psutil
from pydantic import BaseModel, ConfigDict

import perdure_launcher
from benchmarks.recovery.perdure_job import node_processes
from perdure import agent
from perdure_launcher.system.memory_folder import ROOT as MEMORY
from perdure_launcher.warm_start.names import LISTENING_VARIABLE


class Kind(StrEnum):
    """The kind of process that a fault kills."""

    RANK = "rank"
    RANKS_OF_TWO_NODES = "ranks of two nodes"
    TORCHRUN = "torchrun"
    COMMAND = "command"
    STAND_IN = "shim of a warm rank"
    WARM_INTERPRETER = "warm interpreter"
    LAUNCHER = "launcher"
    AGENT = "agent"
    NODE = "node"
    FROZEN_AGENT = "agent frozen for a while"
    WORKER = "worker"
    SERVER = "server"


WEIGHTS = {
    Kind.RANK: 10,
    Kind.RANKS_OF_TWO_NODES: 3,
    Kind.TORCHRUN: 4,
    Kind.COMMAND: 3,
    Kind.STAND_IN: 2,
    Kind.WARM_INTERPRETER: 3,
    Kind.LAUNCHER: 3,
    Kind.AGENT: 5,
    Kind.NODE: 5,
    Kind.FROZEN_AGENT: 2,
    Kind.WORKER: 3,
    Kind.SERVER: 3,
}

INTERRUPTING = frozenset(
    {Kind.RANK, Kind.RANKS_OF_TWO_NODES, Kind.STAND_IN, Kind.TORCHRUN, Kind.COMMAND, Kind.LAUNCHER, Kind.NODE}
)
"""The faults that interrupt a job that trains."""


class Fault(BaseModel):
    """A fault that was injected."""

    model_config = ConfigDict(frozen=True)

    kind: Kind
    job: str
    """Empty for a fault of the control plane, which concerns every job."""
    nodes: tuple[int, ...] = ()
    """The nodes of which a process was signalled; those that were drawn, if none was."""
    time: float
    """Seconds since the epoch."""
    processes: int
    """The number of signalled processes; 0 if none of this kind ran."""
    phase: str = ""
    """The job's phase just before the fault."""
    members: tuple[int, ...] | None = None
    """The nodes of the job's world just before it; None where that is not known."""


def draw(chance: random.Random) -> Kind:
    return chance.choices(list(WEIGHTS), weights=list(WEIGHTS.values()))[0]


def find(kind: Kind, *, uid: str, nodes: Iterable[int]) -> dict[int, list[psutil.Process]]:
    """Finds the processes of a kind on these nodes of a job, by node."""
    return {node: list(victims(kind, f"{uid}/worker-{node}/")) for node in nodes}


def inject(kind: Kind, found: Mapping[int, Sequence[psutil.Process]]) -> tuple[float, dict[int, list[psutil.Process]]]:
    """Signals processes of a kind.

    Args:
        kind: The kind of fault.
        found: The processes by node.

    Returns:
        The time in seconds since the epoch, and the processes that were signalled, by node, without nodes of which
        none was.
    """
    number = signal.SIGSTOP if kind is Kind.FROZEN_AGENT else signal.SIGKILL
    if kind is Kind.NODE:
        # At once, like a power loss: no process of the node may report the end of the others.
        for processes in found.values():
            for process in processes:
                _signal(process, signal.SIGSTOP)
    when = time.time()
    hit = {node: [one for one in processes if _signal(one, number)] for node, processes in found.items()}
    return when, {node: processes for node, processes in hit.items() if processes}


def memory_of(uid: str, node: int) -> set[Path]:
    """The memory folders of a node's processes."""
    found: set[Path] = set()
    for process in node_processes(f"{uid}/worker-{node}/"):
        with suppress(psutil.Error):
            folder = Path(process.environ().get("PERDURE_MEMORY_DIR", "/"))
            if folder.parent == MEMORY:
                found.add(folder)
    return found


def thaw(processes: list[psutil.Process]) -> None:
    for process in processes:
        _signal(process, signal.SIGCONT)


def _signal(process: psutil.Process, number: signal.Signals) -> bool:
    with suppress(psutil.Error):
        process.send_signal(number)
        return True
    return False


def victims(kind: Kind, node: str) -> Iterator[psutil.Process]:
    """Finds the processes of a kind on a node, whose `PERDURE_NODE` begins so."""
    wanted = _TESTS.get(kind)
    for process in node_processes(node):
        with suppress(psutil.Error):
            if wanted is None or wanted(process, process.environ(), process.cmdline()):
                yield process


def _is_rank(process: psutil.Process, environment: dict[str, str], command: list[str]) -> bool:
    """Returns whether this is a rank. A forked rank shows the environment of the interpreter that it was forked
    from."""
    if LISTENING_VARIABLE in environment:
        parent = process.parent()
        return parent is not None and LISTENING_VARIABLE in parent.environ()
    return "GROUP_RANK" in environment and not _is_stand_in(process, environment, command)


def _is_stand_in(process: psutil.Process, environment: dict[str, str], command: list[str]) -> bool:
    del process
    return "GROUP_RANK" in environment and command[1:2] == ["-IS"]


def _is_torchrun(process: psutil.Process, environment: dict[str, str], command: list[str]) -> bool:
    del process
    return "GROUP_RANK" not in environment and any(word.endswith("torchrun") for word in command[:3])


def _is_command(process: psutil.Process, environment: dict[str, str], command: list[str]) -> bool:
    """Returns whether this is the launcher's child: a wrapper, or torchrun itself."""
    parent = process.parent()
    return (
        parent is not None
        and _is_launcher(parent, parent.environ(), parent.cmdline())
        and LISTENING_VARIABLE not in environment
        and bool(command)
    )


def _is_warm_interpreter(process: psutil.Process, environment: dict[str, str], command: list[str]) -> bool:
    return LISTENING_VARIABLE in environment and not _is_rank(process, environment, command)


def _is_launcher(process: psutil.Process, environment: dict[str, str], command: list[str]) -> bool:
    del process, environment
    return command[2:4] == ["-m", perdure_launcher.__name__]


def _is_agent(process: psutil.Process, environment: dict[str, str], command: list[str]) -> bool:
    del process, environment
    return command[2:4] == ["-m", agent.__name__]


_TESTS: dict[Kind, Callable[[psutil.Process, dict[str, str], list[str]], bool]] = {
    Kind.RANK: _is_rank,
    Kind.RANKS_OF_TWO_NODES: _is_rank,
    Kind.TORCHRUN: _is_torchrun,
    Kind.COMMAND: _is_command,
    Kind.STAND_IN: _is_stand_in,
    Kind.WARM_INTERPRETER: _is_warm_interpreter,
    Kind.LAUNCHER: _is_launcher,
    Kind.AGENT: _is_agent,
    Kind.FROZEN_AGENT: _is_agent,
}
