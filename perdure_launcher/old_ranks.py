"""Finds and ends what ranks of earlier generations have left on this node: it may hold ports, devices and files that
new ranks need.

A process is known by the variables of its rank, which it inherits, and by its rank's process group: a program that sets
its title overwrites its variables (vLLM's engine does), and keeps its group.
"""

from __future__ import annotations

import logging
import os
import signal
import time
from collections.abc import Collection, Mapping
from datetime import timedelta
from pathlib import Path

from perdure_training.node_api.layout import PROGRESS, STACKS
from perdure_training.node_api.rank_environment import GENERATION_VARIABLE

from .rank_plugins.stack_file import StackFile
from .system import processes
from .system.cleaners import Sparing, is_manager, without_cleaners
from .warm_start.names import LISTENING_VARIABLE

logger = logging.getLogger(__name__)

_LOOK_AGAIN = 0.02
"""Seconds between two searches for processes, of which no other process learns when they end."""
_LOOK_AGAIN_LATER = 0.5
"""The same for processes that survive SIGKILL for long."""
_UNKILLABLE = 5.0
"""Seconds after which a process that was killed has died, unless it is stuck in the kernel."""
_AFTER_THE_LAST_SIGN = 60.0
"""Seconds after the last report of a step within which its rank may have started a process. No kernel gives the number
of a group that has ended to another one so soon, unless thousands of processes a second begin."""


def of_generations_up_to(generation: int, *, run_directory: Path, below: int | None = None) -> list[processes.Process]:
    """Returns ranks below a process, and what they have started, that belong to this generation or an older one, but
    for torch's manager of shared memory.

    Args:
        generation: The generation.
        run_directory: The node's.
        below: The launcher's PID; by default that of this process.
    """
    marks = {mark.pid: mark for mark in _marks(run_directory) if mark.generation <= generation}
    return [
        process
        for process in processes.descendants(below)
        if not process.zombie
        and (_is_in_group_of(marks, process) or _is_of(process.pid, generation))
        and not is_manager(process.pid)
    ]


class GroupsOfRanks:
    """The process groups that ranks of a node have led, whose launcher has ended: no descent tells what is in them.

    Invariant: no process counts as theirs whose group may have got a former rank's number since, as after a reboot.
    """

    def __init__(self, run_directory: Path) -> None:
        """Reads what the ranks have left in their node's run directory."""
        self._marks = {mark.pid: mark for mark in _marks(run_directory)}
        signs = [_changed(run_directory / STACKS / mark.name) for mark in self._marks.values()]
        signs += [_changed(path) for path in (run_directory / PROGRESS).glob("*")]
        self._until = max(signs, default=0.0) + _AFTER_THE_LAST_SIGN

    def have(self, pid: int) -> bool:
        """Whether a process is in one of them."""
        process = processes.read_process(pid) if self._marks else None
        if process is None or not _is_in_group_of(self._marks, process):
            return False
        return processes.started_at(process) <= self._until


def _is_in_group_of(marks: Mapping[int, StackFile], process: processes.Process) -> bool:
    """Whether a process is in a group that one of these ranks has led, and no other process leads by the same PID."""
    mark = marks.get(process.group)
    if mark is None or process.start_ticks < mark.start_ticks:
        return False
    leader = processes.read_process(process.group)
    return leader is None or leader.start_ticks == mark.start_ticks


def _marks(run_directory: Path) -> list[StackFile]:
    try:
        names = os.listdir(run_directory / STACKS)
    except OSError:
        return []
    return [mark for name in names if (mark := StackFile.parse(name)) is not None]


def _changed(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except OSError:
        return 0.0


def end(
    generation: int, *, run_directory: Path, launcher: int, killed: Collection[int], grace: timedelta
) -> list[processes.Process]:
    """Ends what these generations have left, and returns what could not be ended since it may not be signaled.

    A process that survives SIGKILL holds its devices and ports until it ends: it is waited for. The job replaces a node
    that does not enter its world in time.

    Args:
        generation: The newest of them; none of their ranks trains any more.
        run_directory: The node's.
        launcher: The launcher's PID.
        killed: PIDs of ranks that were killed. What they have left is killed at once: it has nobody to work for.
        grace: The time that all else has after SIGTERM.
    """
    begun, terminated, told, sparing = time.monotonic(), set[int](), False, Sparing()
    while left := of_generations_up_to(generation, run_directory=run_directory, below=launcher):
        passed = time.monotonic() - begun
        stuck = passed >= grace.total_seconds() + _UNKILLABLE
        if stuck and all(processes.is_protected(process.pid) for process in left):
            break
        if stuck and not told:
            logger.warning("processes %s of earlier ranks survive SIGKILL", [process.pid for process in left])
            told = True
        over = passed >= grace.total_seconds()
        doomed = set(sparing.choose([process.pid for process in left if over or process.group in killed]))
        processes.send(doomed, signal.SIGKILL)
        warned = set(without_cleaners(process.pid for process in left)) - terminated - doomed
        processes.send(warned, signal.SIGTERM)
        terminated |= warned
        time.sleep(_LOOK_AGAIN_LATER if stuck else _LOOK_AGAIN)
    return left


def _is_of(pid: int, generation: int) -> bool:
    environment = processes.environment_of(pid)
    number = environment.get(GENERATION_VARIABLE, "").strip()
    # torchrun's helpers inherit the generation, but no rank. A warm rank shows only the generation.
    of_rank = "RANK" in environment or LISTENING_VARIABLE in environment
    return of_rank and number.isdecimal() and int(number) <= generation
