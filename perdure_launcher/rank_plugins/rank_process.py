"""Finds out whether a process that imports torch is a rank, or only has a rank's variables since a rank started it: a
compile worker, a worker of a loader, an evaluation.

The first process below the launcher, or below torchrun, that imports torch is the rank. Shells and other programs may
stand between. It is known by descent: a rank's children inherit its claim, and those that do not, because they were
given variables that were saved before, find it among their ancestors.
"""

from __future__ import annotations

import os
import sys
from collections.abc import MutableMapping

from perdure_training.node_api.layout import STACKS
from perdure_training.node_api.rank_environment import (
    PROCESS_VARIABLE,
    TRAINS,
    generation_of,
    is_rank_itself,
    own_pid_namespace,
    run_directory_of,
)

from ..environment import PARENT_VARIABLE
from ..system.processes import read_process
from .stack_file import StackFile

_MOST_ANCESTORS = 32


def claim_rank(environment: MutableMapping[str, str]) -> bool:
    """Makes this process the rank that its variables name, unless another one is. Returns whether it is.

    Args:
        environment: Its variables, which its children will inherit.
    """
    if not environment.get(PROCESS_VARIABLE):
        pid = _rank_above(environment) or os.getpid()
        environment[PROCESS_VARIABLE] = f"{pid} {own_pid_namespace()}"
    return is_rank_itself(environment)


def mark_training(environment: MutableMapping[str, str]) -> None:
    """Lets the processes that the rank will start know that it trains, so that none of them stands in for it."""
    claim = environment.get(PROCESS_VARIABLE, "")
    if is_rank_itself(environment) and claim and not claim.endswith(TRAINS):
        environment[PROCESS_VARIABLE] = f"{claim} {TRAINS}"


def _rank_above(environment: MutableMapping[str, str]) -> int | None:
    """Returns the rank among this process's ancestors; None if there is none."""
    ranks_parent = environment.get(PARENT_VARIABLE, "").partition(" ")[0]
    started_by = _parent_in_multiprocessing()
    if started_by is not None and str(started_by) != ranks_parent:
        return started_by
    run_directory, rank = run_directory_of(environment), environment.get("RANK", "")
    if run_directory is None or not rank.isdecimal():
        return None
    pid = os.getppid()
    for _ in range(_MOST_ANCESTORS):
        process = read_process(pid) if pid > 1 and str(pid) != ranks_parent else None
        if process is None:
            return None
        mark = StackFile(generation_of(environment), int(rank), process.pid, process.start_ticks)
        if (run_directory / STACKS / mark.name).exists():
            return process.pid
        pid = process.parent
    return None


def _parent_in_multiprocessing() -> int | None:
    """Returns the Python program that started this process as a part of itself, and that need not have imported torch
    before."""
    module = sys.modules.get("multiprocessing.process")
    parent = module.parent_process() if module is not None else None
    return None if parent is None else parent.pid
