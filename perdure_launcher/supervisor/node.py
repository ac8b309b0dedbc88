"""The node's resources, and the interface of the launcher's modes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from perdure_training.node_api.bodies import Desired
from perdure_training.node_api.layout import WARM

from ..agent_link.session import Outbox
from ..config import LauncherConfig
from ..state import StateFile
from ..system.cgroups import MemoryController
from ..warm_start.plan import Plan
from ..warm_start.supervisor import InterpreterSupervisor
from .capture import Capture
from .process_tree import Exit, ProcessTree


@dataclass(frozen=True, kw_only=True)
class NodeResources:
    """The resources of one node, which both modes use."""

    config: LauncherConfig
    environment: Mapping[str, str]
    """The environment of every process of the command."""
    processes: int
    """The number of ranks of this node."""
    tree: ProcessTree
    capture: Capture
    outbox: Outbox
    memory: MemoryController
    state: StateFile
    wake: Callable[[], None]
    """Makes the mode take its next step; callable from any thread."""

    @property
    def workdir(self) -> Path | None:
        return self.config.workdir

    @property
    def warm_folder(self) -> Path:
        return self.config.run_directory / WARM

    def interpreter_supervisor(self, python: str, plan: Plan) -> InterpreterSupervisor:
        """Creates the supervisor of a warm interpreter that runs beside the command across attempts. Use it in the
        launcher's main thread."""
        return InterpreterSupervisor(
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
    """A way to start ranks from the command. The launcher's main thread calls all methods."""

    name: str
    attempt: int
    """The newest attempt that was started; 0 for none."""

    def begin(self) -> None:
        """Does the work that does not need the agent."""

    def follow(self, desired: Desired) -> None:
        """Takes the next step towards the desired state; called after every event."""

    def observe(self, exits: list[Exit]) -> None:
        """Processes the children that ended."""

    def settle(self) -> None:
        """Reports the result; called when no process of the command is left."""

    def explain(self, text: str) -> None:
        """Adds a line to the log and to the next report."""
