"""Reports what the ranks of a node have found about their own numbers, and have written into files."""

from __future__ import annotations

import logging
from pathlib import Path

from perdure.agent.bad_numbers import BadNumbers
from perdure.agent.corruption import Corruptions
from perdure.agent.state import AgentState
from perdure.contract import BadNumber, Corruption, NodeCredentials, Progress

logger = logging.getLogger(__name__)


class RankFindings:
    """The findings of one node's ranks."""

    def __init__(self, node: NodeCredentials, run_dir: Path) -> None:
        self._bad_numbers = BadNumbers(node, run_dir)
        self._corruptions = Corruptions(node, run_dir)

    def find(self, state: AgentState, progress: Progress | None) -> list[BadNumber | Corruption]:
        """Returns what was not reported before."""
        found: list[BadNumber | Corruption] = []
        if (bad := self._bad_numbers.find(state, progress)) is not None:
            number = bad.number
            logger.warning("rank %d: %s is %s at step %d", number.rank, number.kind, number.value, number.step)
            found.append(bad)
        if (wrong := self._corruptions.find(state, progress)) is not None:
            result = wrong.found
            texts = "; ".join(result.checksums)
            logger.warning("rank %d: %s of step %d: %s", result.rank, result.kind, result.step, texts)
            found.append(wrong)
        return found
