"""Looks for ranks that no rendezvous of ours has placed: several such nodes would be several trainings over one
checkpoint folder, and each would look healthy.

What only the training process itself can know is found by `outside`.
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
"""A process shows its parent's environment until it has started its own program, so one look is not enough."""


@dataclass(frozen=True)
class Bypass:
    """Ranks that no rendezvous of ours has placed, or what is about to start such ranks."""

    processes: list[int]
    explanation: str
    """What to tell the user about them."""


class RankGuard:
    """Remembers which processes it has looked at: after a few looks an environment does not change any more."""

    def __init__(self, *, torchrun: bool, several: bool, environment: Mapping[str, str] = os.environ) -> None:
        """Creates the guard.

        Args:
            torchrun: Whether ranks are expected to come from torchrun, with our rendezvous; else from the launcher.
            several: Whether the job may have other nodes.
            environment: The launcher's own. Variables that are set there already make no process a rank.
        """
        self._torchrun = torchrun
        self._consequence = _IN_CROWD if several else _NO_RESTARTS
        self._inherited = {name: environment.get(name) for name in _PLACE}
        self._looks: dict[tuple[int, int], int] = {}

    def look(self) -> Bypass | None:
        """Looks at the processes that are new."""
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
    """Ranks below the launcher, and what they started, that belong to this generation or an older one."""
    found: list[processes.Process] = []
    for process in processes.descendants():
        if process.zombie:
            continue
        environment = processes.environment_of(process.pid)
        number = environment.get(GENERATION_VARIABLE, "").strip()
        # torchrun's own helpers inherit the generation, but no rank. A warm rank has no place but this to show it.
        of_rank = "RANK" in environment or LISTENING_VARIABLE in environment
        if of_rank and number.isdecimal() and int(number) <= generation:
            found.append(process)
    return found
