"""Detects ranks that were not started through Perdure's rendezvous. On several nodes they would be separate trainings
over one checkpoint folder, and each would look healthy.

`in_rank` detects cases that only the training process itself can know.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

from ..environment import GENERATION_VARIABLE
from ..supervisor.commands import instead_of_deepspeed
from ..system import processes
from ..warm_start.names import LISTENING_VARIABLE

_PLACE = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "TORCHELASTIC_RUN_ID")

_IN_CROWD = "this node would train alone beside the others, over the same checkpoints"
_ALONE = f"the command starts torchrun by itself, so {_IN_CROWD}. Set the role's `rendezvous` to `torchrun`"
_BYPASSED = (
    "ranks were started without Perdure's rendezvous, so {consequence}. Usual causes: a launcher that brings its own "
    "rendezvous, or a script that overwrites PYTHONPATH. Start the ranks with plain torchrun, and add to PYTHONPATH "
    "instead of replacing it"
)
_DEEPSPEED = (
    "the deepspeed launcher starts ranks by itself, so {consequence}. DeepSpeed needs no launcher of its own; write "
    "instead: {instead}"
)
_NO_RESTARTS = "nothing would start them again after a failure"

_LOOKS = 4
"""Number of checks per process: it shows its parent's environment until it has executed its own program."""


@dataclass(frozen=True)
class Bypass:
    """Ranks that bypass Perdure's rendezvous, or a process that is about to start such ranks."""

    processes: list[int]
    explanation: str
    """The message for the user."""


class RankGuard:
    """Checks new processes. It checks each only a few times, since an environment does not change after that."""

    def __init__(self, *, torchrun: bool, several: bool, environment: Mapping[str, str] = os.environ) -> None:
        """Creates the guard.

        Args:
            torchrun: Whether ranks are expected to come from torchrun with Perdure's rendezvous, and not from the
                launcher.
            several: Whether the job may have other nodes.
            environment: The launcher's own environment. Its rank variables do not make a process a rank.
        """
        self._torchrun = torchrun
        self._consequence = _IN_CROWD if several else _NO_RESTARTS
        self._inherited = {name: environment.get(name) for name in _PLACE}
        self._looks: dict[tuple[int, int], int] = {}

    def look(self) -> Bypass | None:
        """Checks the new processes."""
        alive = {(process.pid, process.start_ticks) for process in processes.descendants() if not process.zombie}
        self._looks = {key: self._looks.get(key, 0) + 1 for key in alive}
        new = sorted(pid for (pid, _), looks in self._looks.items() if looks <= _LOOKS)
        for pid in new:
            if instead := instead_of_deepspeed(processes.command_of(pid)):
                return Bypass([pid], _DEEPSPEED.format(consequence=self._consequence, instead=instead))
        if ranks := [pid for pid in new if self._is_unprotected(processes.environment_of(pid))]:
            explanation = _BYPASSED.format(consequence=self._consequence) if self._torchrun else _ALONE
            return Bypass(ranks, explanation)
        return None

    def _is_unprotected(self, environment: Mapping[str, str]) -> bool:
        place = {name: environment.get(name) for name in _PLACE}
        if place == self._inherited or None in (place["RANK"], place["WORLD_SIZE"], place["LOCAL_RANK"]):
            return False
        if self._torchrun:
            return GENERATION_VARIABLE not in environment
        return place["TORCHELASTIC_RUN_ID"] is not None and environment.get("GROUP_WORLD_SIZE") == "1"


def ranks_up_to(generation: int) -> list[processes.Process]:
    """Returns ranks below the launcher, and their descendants, that belong to this generation or an older one."""
    found: list[processes.Process] = []
    for process in processes.descendants():
        if process.zombie:
            continue
        environment = processes.environment_of(process.pid)
        number = environment.get(GENERATION_VARIABLE, "").strip()
        # torchrun's helpers inherit the generation, but no rank. A warm rank shows only the generation.
        of_rank = "RANK" in environment or LISTENING_VARIABLE in environment
        if of_rank and number.isdecimal() and int(number) <= generation:
            found.append(process)
    return found
