"""Reports what the ranks of a node have found about their own numbers, and have written into files.

After one rank, all others soon have such numbers: the earliest finding of each kind tells enough, and a job of a
thousand nodes is sent a thousand reports at most.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from perdure.agent.outbox import envelope
from perdure.agent.protocol import time_of
from perdure.agent.state import AgentState
from perdure.contract.agents import Progress
from perdure.contract.findings import BadNumber, Corruption, CorruptionKind, FoundCorruption, NumberKind, RankNumber
from perdure.contract.identity import NodeCredentials
from perdure_training.node_api import layout
from perdure_training.node_api.corruption_file import (
    GRADIENTS,
    NOT_DETERMINISTIC,
    PARAMETERS,
    corruption_path,
    read_corruption,
)
from perdure_training.node_api.number_file import GRADIENT_NORM, LOSS, SPIKES, number_path, read_numbers

logger = logging.getLogger(__name__)

_NUMBERS = {
    LOSS: NumberKind.LOSS,
    GRADIENT_NORM: NumberKind.GRADIENT_NORM,
    SPIKES[LOSS]: NumberKind.LOSS_SPIKE,
    SPIKES[GRADIENT_NORM]: NumberKind.GRADIENT_NORM_SPIKE,
}
_CORRUPTIONS = {
    GRADIENTS: CorruptionKind.GRADIENTS,
    PARAMETERS: CorruptionKind.PARAMETERS,
    NOT_DETERMINISTIC: CorruptionKind.NOT_DETERMINISTIC,
}


@dataclass(frozen=True, kw_only=True)
class _Finding:
    """What one rank has written down."""

    kind: str
    """Only the first finding of a kind is reported."""
    order: tuple[bool, int]
    """Findings with a smaller order are reported first."""
    time: float
    text: str
    """A description for the agent's log."""
    message: Callable[..., BadNumber | Corruption]


class RankFindings:
    """The findings of one node's ranks."""

    def __init__(self, node: NodeCredentials, run_dir: Path) -> None:
        self._node = node
        self._run_dir = run_dir
        self._reported: set[tuple[int, str]] = set()
        """The generations, and the kinds."""

    def find(self, state: AgentState, progress: Progress | None) -> list[BadNumber | Corruption]:
        """Returns the reports of the world that the node is in which are new, one from each sort of file. An agent that
        was started again reports once more."""
        world = state.world
        if world is None or world.generation != state.entered:
            return []
        ranks = range(world.base_rank, world.base_rank + (state.processes or 1))
        reports: list[BadNumber | Corruption] = []
        for read in (_read_numbers, _read_corruptions):
            found = [
                (finding.order, rank, finding)
                for rank in ranks
                for finding in read(self._run_dir, rank, state.entered)
                if (state.entered, finding.kind) not in self._reported
            ]
            if not found:
                continue
            _, rank, first = min(found, key=lambda entry: entry[:2])
            self._reported.add((state.entered, first.kind))
            logger.warning("rank %d: %s", rank, first.text)
            identity = envelope(self._node, time_of(first.time))
            reports.append(first.message(**identity, generation=state.entered, progress=progress))
        return reports


def _read_numbers(run_dir: Path, rank: int, generation: int) -> Iterable[_Finding]:
    path = number_path(run_dir / layout.PROGRESS, rank)
    for number in read_numbers(path, generation=generation, beneath=run_dir):
        yield _Finding(
            kind=number.name,
            # Only losses say that the state is not sound.
            order=(number.name != LOSS, number.step),
            time=number.time,
            text=f"{_NUMBERS[number.name]} is {number.value} at step {number.step}",
            message=partial(
                BadNumber,
                number=RankNumber(
                    rank=rank,
                    kind=_NUMBERS[number.name],
                    value=number.value,
                    step=number.step,
                    last_finite=number.last_finite,
                    samples=number.samples,
                ),
            ),
        )


def _read_corruptions(run_dir: Path, rank: int, generation: int) -> Iterable[_Finding]:
    path = corruption_path(run_dir / layout.PROGRESS, rank)
    found = read_corruption(path, generation=generation, beneath=run_dir)
    if found is not None:
        yield _Finding(
            kind=found.kind,
            order=(False, found.step),
            time=found.time,
            text=f"{_CORRUPTIONS[found.kind]} of step {found.step}: {'; '.join(found.checksums)}",
            message=partial(
                Corruption,
                found=FoundCorruption(
                    rank=rank,
                    kind=_CORRUPTIONS[found.kind],
                    step=found.step,
                    sound=found.sound,
                    suspects=found.suspects,
                    repeats=found.repeats,
                    device=found.device,
                    checksums=found.checksums,
                ),
            ),
        )
