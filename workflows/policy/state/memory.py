"""What a role remembers of earlier interruptions: see `perdure.workflows.policy.repair.memory`."""

from __future__ import annotations

from datetime import datetime
from typing import Self

from pydantic import Field

from perdure.contract import FailureClass, Message
from perdure.workflows.policy.state.slow_ranks import SlowRanks

_MACHINES = 8


class RaisedError(Message):
    """An error of the script that ended ranks, perhaps several times in a row, and no step was gained in between."""

    raised_at: str
    """Its type, and the line that raised it."""
    machines: tuple[str, ...] = ()
    """The first machines on which it ended ranks: two prove as much as many."""

    def on(self, *machines: str) -> Self:
        """The error, seen on these machines, too."""
        return self.replace(machines=tuple(dict.fromkeys((*self.machines, *machines)))[:_MACHINES])


class EarlyEnd(Message):
    """The end of a rank soon after the start of its world, or of a command that has no ranks, perhaps the same several
    times in a row."""

    rank: int
    """Its node (slot)."""
    exit_code: int | None = None
    signal: int | None = None
    generation: int = 0
    """The world that it ended; without ranks, the newest one before it."""
    without_ranks: bool = False
    """It is the end of a command before its first torchrun or after a complete one, where it can gain no step."""
    times: int = 1

    def after(self, before: EarlyEnd | None) -> Self:
        """The end, counted with those before it that were the same, each in the world that followed the last.

        A world in between that ended otherwise, by a request or a drained node, may have made any number of steps.
        """
        last = self.generation if self.without_ranks else self.generation - 1
        if before is None or before.generation != last:
            return self
        # Each node of a script that ends by an exit code of its own does so, and any of them may report it first. The
        # same holds for the line of a command after its ranks.
        rank = before.rank if self.exit_code is None and not self.without_ranks else self.rank
        same = before.replace(times=self.times, generation=self.generation, rank=rank) == self
        return self.replace(times=before.times + 1) if same else self


class Repair(Message):
    """An action that the ladder has taken: how often in a row, and when last."""

    times: int = 1
    incarnation: int = 0
    """The incarnation of the node that it was taken for; 0 where it was for the whole role."""
    generation: int
    """The world that was interrupted then."""
    at: datetime
    """When that interruption was over."""


class RepairMemory(Message):
    """What is remembered within a stage of the command."""

    of_nodes: dict[str, dict[int, Repair]] = Field(default={})
    """Actions that name nodes, by kind of action and node (slot)."""
    of_role: dict[str, Repair] = Field(default={})
    """Actions that name none, by kind of action."""
    slow_ranks: SlowRanks = SlowRanks()
    last_failure: FailureClass | None = None
    """The class of the last failure that was charged to the budgets."""
    last_error: RaisedError | None = None
    """The error of that failure, if it was the script's own."""
    early_end: EarlyEnd | None = None
    """The end of that failure, if it came soon after the start and is nobody's known failure."""
    failures_without_progress: int = 0
    best_step: int = -1
    """The highest step reported before a failure, of the training that goes on: not of steps that a return to an older
    one has undone."""
    continued_from: int | None = None
    """The newest saved step that a world of that training has continued from; None before the first one."""
    last_generation_steps: int = -1
    """Steps counted in the attempt before the last failure."""
    restored_step: int = -1
    """The step from which that attempt continued; -1 where none is known."""
