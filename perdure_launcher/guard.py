"""Looks for ranks that no rendezvous of ours has placed: several such nodes would be several trainings over one
checkpoint folder, and each would look healthy.
"""

from __future__ import annotations

import os
from collections.abc import Mapping

from . import processes
from .environment import GENERATION_VARIABLE

_PLACE = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "TORCHELASTIC_RUN_ID")

_ALONE = (
    "the command starts torchrun by itself, so this node would train alone beside the others, over the same "
    "checkpoints. Set the role's `rendezvous` to `torchrun`"
)
_BYPASSED = (
    "ranks were started without Perdure's rendezvous, so this node would train alone beside the others, over the same "
    "checkpoints. Usual causes: --rdzv-backend of another kind in the command, a launcher that brings its own "
    "rendezvous, or a script that overwrites PYTHONPATH. Start the ranks with plain torchrun, and add to PYTHONPATH "
    "instead of replacing it"
)


_LOOKS = 4
"""A process shows its parent's environment until it has started its own program, so one look is not enough."""


class RankGuard:
    """Remembers which processes it has looked at: after a few looks an environment does not change any more."""

    def __init__(self, *, torchrun: bool, environment: Mapping[str, str] = os.environ) -> None:
        """Creates the guard.

        Args:
            torchrun: Whether ranks are expected to come from torchrun, with our rendezvous; else from the launcher.
            environment: The launcher's own. Variables that stand there already make nobody a rank.
        """
        self._torchrun = torchrun
        self.explanation = _BYPASSED if torchrun else _ALONE
        """What to tell the user about such ranks."""
        self._inherited = {name: environment.get(name) for name in _PLACE}
        self._looks: dict[tuple[int, int], int] = {}

    def unprotected_ranks(self) -> list[int]:
        """Processes whose place was given to them by nobody of ours, among those that are new."""
        alive = {(process.pid, process.start_ticks) for process in processes.descendants() if not process.zombie}
        self._looks = {key: self._looks.get(key, 0) + 1 for key in alive}
        return sorted(
            pid
            for (pid, _), looks in self._looks.items()
            if looks <= _LOOKS and self._is_unprotected(processes.environment_of(pid))
        )

    def _is_unprotected(self, environment: Mapping[str, str]) -> bool:
        place = {name: environment.get(name) for name in _PLACE}
        if place == self._inherited or None in (place["RANK"], place["WORLD_SIZE"], place["LOCAL_RANK"]):
            return False
        if self._torchrun:
            return GENERATION_VARIABLE not in environment
        return place["TORCHELASTIC_RUN_ID"] is not None and environment.get("GROUP_WORLD_SIZE") == "1"


def ranks_up_to(generation: int) -> list[int]:
    """Ranks below the launcher, and what they started, that belong to this generation or an older one."""
    found: list[int] = []
    for process in processes.descendants():
        if process.zombie:
            continue
        environment = processes.environment_of(process.pid)
        number = environment.get(GENERATION_VARIABLE, "")
        # torchrun's own helpers inherit the generation, but no rank.
        if "RANK" in environment and number.isdecimal() and int(number) <= generation:
            found.append(process.pid)
    return found
