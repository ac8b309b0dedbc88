"""The states of other checkpointers that a rank saves in turn with one: all of them continue from one step.

A rank may be killed between two of these saves, and each checkpointer alone would load the newest step that it has. So
the first one that restores also looks for what the others have, and each further one follows the first.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from perdure_training.checkpoint.save_turns import SaveTurns, read_of_one_count
from perdure_training.checkpoint.world import RankIdentity
from perdure_training.node_api.bodies import UnsoundSteps
from perdure_training.snapshots.agreement import Holding, loadable_steps
from perdure_training.snapshots.arena import Arena, Header

Assigned = Callable[[Arena], Sequence[Header]]
"""Returns the snapshots for which a rank speaks."""


class OtherStates:
    """What one rank knows of them."""

    def __init__(self, own: RankIdentity, name: str, turns: SaveTurns) -> None:
        """Creates the object.

        Args:
            own: This rank.
            name: The checkpointer's name.
            turns: Those of the rank, with the steps that others have restored.
        """
        self._own = own
        self._name = name
        self._turns = turns
        names = read_of_one_count(own.folder)
        self._names = names - {name} if name in names else frozenset[str]()

    def report(self, assigned: Assigned) -> dict[str, list[dict[str, Any]]]:
        """What rank 0 learns: what this rank has of each, as fields of `Holding`."""
        found: dict[str, list[dict[str, Any]]] = {}
        for name in self._names:
            done = name in self._turns.restored
            headers = () if done else assigned(Arena(self._own.folder / name, required=False))
            found[name] = [Holding.of(one).fields() for one in headers]
        return found

    def steps(
        self, reports: Sequence[Mapping[str, Sequence[Mapping[str, Any]]]], *, unsound: UnsoundSteps | None
    ) -> set[int] | None:
        """As rank 0, the steps that all of them can load, or have loaded; None where there are no others."""
        # A node that is new knows none of them.
        self._names = frozenset(name for report in reports for name in report)
        common: set[int] | None = None
        for name in self._names:
            if name in self._turns.restored:
                steps = {self._turns.restored[name]}
            else:
                held = {rank: [Holding(**one) for one in report.get(name, ())] for rank, report in enumerate(reports)}
                steps = loadable_steps(held, self._own.world_size, unsound=unsound)
            common = steps if common is None else common & steps
        return common

    def begin(self, step: int) -> str:
        """Records the step with which this one begins, 0 where nothing was loaded; returns how it differs from that of
        the others, as rank 0 knows it. Empty where it does not."""
        restored = self._turns.restored
        restored[self._name] = step
        apart = {name: restored[name] for name in sorted(self._names & restored.keys()) if restored[name] != step}
        if not apart:
            return ""
        others = " and ".join(f"{name!r} {_begins(its)}" for name, its in apart.items())
        return (
            f"the checkpointer {self._name!r} {_begins(step)}, and {others}, although they save the same steps: no "
            "step is left that all of them have"
        )


def _begins(step: int) -> str:
    return f"continues from step {step:,}" if step else "begins anew"
