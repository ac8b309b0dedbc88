"""Reads the files of ranks whose loss or gradient norm is not a finite number, and reports each node's first one.

After one rank, all others soon have such numbers: the report of the earliest step of a node tells enough, and a job of
a thousand nodes is sent a thousand reports at most.
"""

from __future__ import annotations

from pathlib import Path

from perdure.agent.outbox import envelope
from perdure.agent.protocol import time_of
from perdure.agent.state import AgentState
from perdure.contract import BadNumber, NodeCredentials, NumberKind, Progress, RankNumber
from perdure_training.node_api import layout
from perdure_training.node_api.number_file import GRADIENT_NORM, LOSS, SPIKES, FoundNumber, number_path, read_numbers

_KINDS = {
    LOSS: NumberKind.LOSS,
    GRADIENT_NORM: NumberKind.GRADIENT_NORM,
    SPIKES[LOSS]: NumberKind.LOSS_SPIKE,
    SPIKES[GRADIENT_NORM]: NumberKind.GRADIENT_NORM_SPIKE,
}


class BadNumbers:
    """The numbers of one node's ranks that are not finite."""

    def __init__(self, node: NodeCredentials, run_dir: Path) -> None:
        self._node = node
        self._run_dir = run_dir
        self._reported: set[tuple[int, str]] = set()
        """The generations, and the names of the numbers."""

    def find(self, state: AgentState, progress: Progress | None) -> BadNumber | None:
        """Returns the report of the world that the node is in; None if there is nothing new to report. An agent that
        was started again reports once more."""
        world = state.world
        if world is None or world.generation != state.entered:
            return None
        folder, ranks = self._run_dir / layout.PROGRESS, range(state.processes or 1)
        found = [
            (_order(number), rank, number)
            for rank in (world.base_rank + local for local in ranks)
            for number in read_numbers(number_path(folder, rank), generation=state.entered, beneath=self._run_dir)
            if (state.entered, number.name) not in self._reported
        ]
        if not found:
            return None
        _, rank, number = min(found, key=lambda one: one[:2])
        self._reported.add((state.entered, number.name))
        return BadNumber(
            **envelope(self._node, time_of(number.time)),
            generation=state.entered,
            number=RankNumber(
                rank=rank,
                kind=_KINDS[number.name],
                value=number.value,
                step=number.step,
                last_finite=number.last_finite,
                samples=number.samples,
            ),
            progress=progress,
        )


def _order(number: FoundNumber) -> tuple[bool, int]:
    """Puts losses first: only they say that the state is not sound."""
    return number.name != LOSS, number.step
