"""What both modes of the launcher work with."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from ..agent_link.client import Outbox
from ..config import LauncherConfig
from ..layout import WARM
from ..protocol import Desired
from ..state import StateFile
from ..system.cgroups import MemoryController
from ..warm_start.plan import Plan
from ..warm_start.supervisor import WarmKeeper
from .capture import Capture
from .process_tree import Exit, ProcessTree


@dataclass(frozen=True, kw_only=True)
class Node:
    """One node's means."""

    config: LauncherConfig
    environment: Mapping[str, str]
    """For every process of the command."""
    processes: int
    """Ranks of this node."""
    tree: ProcessTree
    capture: Capture
    outbox: Outbox
    memory: MemoryController
    state: StateFile
    wake: Callable[[], None]
    """Has the mode take its next step; called by any thread."""

    @property
    def workdir(self) -> Path | None:
        return self.config.workdir

    @property
    def warm_folder(self) -> Path:
        return self.config.run_directory / WARM

    def warm_keeper(self, python: str, plan: Plan) -> WarmKeeper:
        """Keeps a warm interpreter beside the command, from one attempt to the next; for the launcher's main thread."""
        return WarmKeeper(
            folder=self.warm_folder,
            python=python,
            plan=plan,
            spawn=lambda start: self.tree.spawn(
                start.command,
                env=start.environment,
                workdir=self.workdir,
                output=start.log,
                pass_fds=[start.listening],
                companion=True,
            ),
        )


class Mode(Protocol):
    """How the command becomes ranks. Everything is called by the launcher's main thread."""

    name: str
    attempt: int
    """The newest one started; 0 for none."""

    def begin(self) -> None:
        """Does what needs no agent."""

    def follow(self, desired: Desired) -> None:
        """Takes the next step towards what is desired; called after everything that happens."""

    def observe(self, exits: list[Exit]) -> None:
        """Receives the children that ended."""

    def settle(self) -> None:
        """Draws the conclusion; called when nothing of the command is left."""

    def explain(self, text: str) -> None:
        """Adds a line to the log and to the next report."""
