"""Detects ranks that were not started through Perdure's rendezvous. On several nodes they would be separate trainings
over one checkpoint folder, and each would look healthy.

`in_rank` detects cases that only the training process itself can know.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

from perdure_training.node_api.rank_environment import GENERATION_VARIABLE, PROCESS_VARIABLE, TRAINS

from ..supervisor.commands import instead_of_deepspeed, launches_elsewhere
from ..system import processes
from .cases import Case

_PLACE = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "TORCHELASTIC_RUN_ID")

_SCANS = 4
"""Number of checks per process: it shows its parent's environment until it has executed its own program."""


@dataclass(frozen=True)
class UnmanagedRanks:
    """Ranks that bypass Perdure's rendezvous, or a process that is about to start such ranks."""

    processes: list[int]
    explanation: str
    """The message for the user."""
    gently: bool = False
    """What they have started elsewhere ends only if they pass SIGTERM on to it."""


class ProcessScanner:
    """Checks new processes. It checks each only a few times, since an environment does not change after that."""

    def __init__(self, *, torchrun: bool, several: bool, environment: Mapping[str, str] = os.environ) -> None:
        """Creates the scanner.

        Args:
            torchrun: Whether ranks are expected to come from torchrun with Perdure's rendezvous, and not from the
                launcher.
            several: Whether the job may have other nodes.
            environment: The launcher's own environment. Its rank variables do not make a process a rank.
        """
        self._torchrun = torchrun
        self._several = several
        self._inherited = {name: environment.get(name) for name in _PLACE}
        self._scans: dict[tuple[int, int], int] = {}

    def scan(self) -> UnmanagedRanks | None:
        """Checks the new processes."""
        alive = {(process.pid, process.start_ticks) for process in processes.descendants() if not process.zombie}
        self._scans = {key: self._scans.get(key, 0) + 1 for key in alive}
        new = sorted(pid for (pid, _), scans in self._scans.items() if scans <= _SCANS)
        for pid in new:
            command = processes.command_of(pid)
            if instead := instead_of_deepspeed(command):
                explanation = Case.DEEPSPEED_LAUNCHER.explain(several_nodes=self._several, instead=instead)
                return UnmanagedRanks([pid], explanation)
            if program := launches_elsewhere(command):
                explanation = Case.LAUNCHED_ELSEWHERE.explain(several_nodes=self._several, program=program)
                return UnmanagedRanks([pid], explanation, gently=True)
        if ranks := [pid for pid in new if self._is_unmanaged(processes.environment_of(pid))]:
            in_command = Case.TORCHRUN_IN_COMMAND if self._several else Case.TORCHRUN_IN_PROCESSES
            case = Case.RENDEZVOUS_BYPASSED if self._torchrun else in_command
            return UnmanagedRanks(ranks, case.explain(several_nodes=self._several))
        return None

    def _is_unmanaged(self, environment: Mapping[str, str]) -> bool:
        place = {name: environment.get(name) for name in _PLACE}
        if place == self._inherited or None in (place["RANK"], place["WORLD_SIZE"], place["LOCAL_RANK"]):
            return False
        if self._torchrun:
            return GENERATION_VARIABLE not in environment
        if environment.get(PROCESS_VARIABLE, "").endswith(TRAINS):
            # A rank that trains has started a torchrun for purposes of its own.
            return False
        return place["TORCHELASTIC_RUN_ID"] is not None and environment.get("GROUP_WORLD_SIZE") == "1"
