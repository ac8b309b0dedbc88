"""Recovery after failures: the choice of repairs, their number, and their time limits."""

from __future__ import annotations

from datetime import timedelta
from enum import StrEnum
from typing import Annotated

from pydantic import Field

from .base import MOST_RULES, Integer, Section
from .durations import Duration, PositiveDuration
from .rules import RetryRule


class CapacityLoss(StrEnum):
    """Reactions of a job that has fewer nodes than before."""

    SHRINK = "shrink"
    """Continues at once with the nodes it has, down to `nodes.min`, and grows again when a replacement is ready."""
    WAIT = "wait"
    """Waits for a replacement, for `replace_timeout`; then continues with what it has, if that is enough."""
    FAIL = "fail"
    """Stops the job."""


class StateLoss(StrEnum):
    """Reactions of a job that cannot load the newest state which is known to have existed."""

    WAIT = "wait"
    """Waits as long as that state may come back, then takes the older one, or stops."""
    OLDER = "older"
    """Takes the older one, or begins at the first step."""
    STOP = "stop"
    """Stops the job."""


class OnNan(StrEnum):
    """Reactions of a job whose loss is not a finite number."""

    REPORT = "report"
    """Continues, and keeps the step, the rank and the samples for `perdure explain`."""
    ROLLBACK = "rollback"
    """Restarts the ranks, and has them load a state from before it."""
    STOP = "stop"
    """Stops the job."""


class HangAction(StrEnum):
    """Reactions of a job to a rank that hangs after it has stepped."""

    REPORT = "report"
    """Shows it, and waits."""
    RESTART = "restart"
    """Restarts the ranks in place; replaces the node that hangs again."""
    REPLACE = "replace"
    """Replaces the node at once."""


class StragglerAction(StrEnum):
    """Reactions of a job to a rank for which all others wait."""

    REPORT = "report"
    """Shows it."""
    REPLACE = "replace"
    """Replaces its node, once."""
    EXPERIMENT = "experiment"
    """Has its node exchange its place with another one, and replaces the node if it is slow there, too."""


class Recovery(Section):
    """Replacement of lost nodes, and restarts of ranks."""

    on_capacity_loss: CapacityLoss = CapacityLoss.SHRINK
    """`shrink` continues with fewer nodes (only where `nodes.min` allows it), `wait` waits for a replacement, `fail`
    stops the job."""
    replace_timeout: PositiveDuration = timedelta(minutes=10)
    """The longest wait for a replacement. A job with fewer than `nodes.min` nodes then stops; a job that waits because
    `on_capacity_loss` is `wait` continues with the nodes that it has. The wait for the first world is
    `timing.rendezvous.join_timeout`."""
    on_state_loss: StateLoss = StateLoss.WAIT
    """What follows where the newest state of a `Checkpointer` that the job knows cannot be loaded: its storage is not
    mounted, is another one or cannot be reached, or a node that holds it is gone (docs/checkpoints.md). `wait` waits
    while it may come back, for `state_timeout` for a storage and for `replace_timeout` for a node; then the job stops,
    or takes an older state for good where only memory was lost. `older` takes the older one, or begins at the first
    step; `stop` stops the job. No checkpoint is deleted because of it."""
    state_timeout: PositiveDuration = timedelta(hours=1)
    """The longest wait for a storage that lacks a checkpoint which the job has committed; the job then stops.
    `perdure restart JOB --older` ends the wait earlier, with an older state."""
    on_nan: OnNan = OnNan.REPORT
    """What follows when a rank reports a loss that is not a finite number: `report` only records it, `rollback`
    restarts the ranks from a state that was saved before it, `stop` stops the job. Where the same step fails again
    after a rollback, the job stops: see docs/numbers.md."""
    report_spikes: bool = False
    """Whether losses and gradient norms far above those of the last steps are shown in `perdure explain`. They lead to
    nothing else."""
    on_hang: HangAction = HangAction.RESTART
    """What follows where two independent signs agree that a rank hangs (docs/hangs.md): `restart` restarts the ranks in
    place, and replaces the node if it hangs again, `replace` does so at once, `report` waits for users. Fewer signs are
    only shown."""
    on_straggler: StragglerAction = StragglerAction.REPORT
    """What follows where the others wait for a slow rank in each step, and have lost more time by it than a restart
    takes (docs/stragglers.md): `replace` replaces its node, once; `experiment` first has the node exchange its place
    with another one, and replaces it only if it is slow there, too; `report` only shows the rank."""
    warm_starts: bool = True
    """Whether ranks are started from an interpreter on the node that has already imported torch. That saves seconds per
    restart and takes about 0.7 GB of memory per node; beside GPUs the same again per rank, if that memory is free.
    Where a warm start would make a difference to the script, ranks are started in the ordinary way, and `perdure
    explain` says why: see docs/warm-starts.md."""


class Retry(Section):
    """Limits on repairs of failures, before the job stops with the reason."""

    max_restarts: Integer = Field(default=10, ge=0)
    """Restarts allowed within `window`. Losses of nodes count; scaling and resuming by users do not, nor do nodes that
    are deleted, drained, evicted or preempted on purpose."""
    window: PositiveDuration = timedelta(hours=1)
    """The window in which restarts count against `max_restarts`."""
    same_loss: Duration = timedelta(seconds=30)
    """Nodes that are lost within this time of a restart that counts do not cause another one: when a rack or a switch
    fails, the losses of its machines are reported over several seconds."""
    no_progress_limit: Integer = Field(default=3, ge=1)
    """The job restarts after this many failures in a row without a step beyond the furthest one so far, and stops at
    the next one. A failure after such a step is not among them: the count begins behind it. Killed ranks and lost nodes
    leave the count as it is; ranks that are killed soon after each start have one of their own."""
    fatal_exit_codes: list[Annotated[Integer, Field(ge=1, le=255)]] = Field(default=[2])
    """A process that exits with one of these codes stops the job at once. Python programs exit with 2 when called with
    wrong arguments."""
    rules: list[RetryRule] = Field(default=[], max_length=MOST_RULES)
    """What is done about failures that these rules describe, at most 32: see docs/failures.md."""


class Limits(Section):
    """Time limits of a job and its parts."""

    active_deadline: PositiveDuration | None = None
    """The job is stopped this long after it began; unset: never."""
    queue_timeout: PositiveDuration | None = None
    """The longest wait for the machines of the first world, while the queue has not admitted the job or no machine has
    room; the job then stops with the scheduler's message. Unset: no limit. Once the nodes have machines,
    `timing.rendezvous.join_timeout` applies."""
    termination_grace_period: Duration = timedelta(seconds=30)
    """The time from SIGTERM to SIGKILL when the job's processes are stopped for good, in which they can save."""
