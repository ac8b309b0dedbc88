"""Reads the files of ranks that do not compute what the others compute, and reports each node's first one."""

from __future__ import annotations

from pathlib import Path

from perdure.agent.outbox import envelope
from perdure.agent.protocol import time_of
from perdure.agent.state import AgentState
from perdure.contract import Corruption, CorruptionKind, FoundCorruption, NodeCredentials, Progress
from perdure_training.node_api import layout
from perdure_training.node_api.corruption_file import (
    GRADIENTS,
    NOT_DETERMINISTIC,
    PARAMETERS,
    corruption_path,
    read_corruption,
)

_KINDS = {
    GRADIENTS: CorruptionKind.GRADIENTS,
    PARAMETERS: CorruptionKind.PARAMETERS,
    NOT_DETERMINISTIC: CorruptionKind.NOT_DETERMINISTIC,
}


class Corruptions:
    """The findings of one node's ranks."""

    def __init__(self, node: NodeCredentials, run_dir: Path) -> None:
        self._node = node
        self._run_dir = run_dir
        self._reported: set[tuple[int, str]] = set()
        """The generations, and the kinds."""

    def find(self, state: AgentState, progress: Progress | None) -> Corruption | None:
        """Returns the report of the world that the node is in; None if there is nothing new to report. An agent that
        was started again reports once more."""
        world = state.world
        if world is None or world.generation != state.entered:
            return None
        folder = self._run_dir / layout.PROGRESS
        for rank in range(world.base_rank, world.base_rank + (state.processes or 1)):
            found = read_corruption(corruption_path(folder, rank), generation=state.entered, beneath=self._run_dir)
            if found is None or (state.entered, found.kind) in self._reported:
                continue
            self._reported.add((state.entered, found.kind))
            return Corruption(
                **envelope(self._node, time_of(found.time)),
                generation=state.entered,
                found=FoundCorruption(
                    rank=rank,
                    kind=_KINDS[found.kind],
                    step=found.step,
                    sound=found.sound,
                    suspects=found.suspects,
                    repeats=found.repeats,
                    device=found.device,
                    checksums=found.checksums,
                ),
                progress=progress,
            )
        return None
