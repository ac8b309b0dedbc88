"""What happens when something fails: which repair, how often, and for how long."""

from __future__ import annotations

from datetime import timedelta
from enum import StrEnum
from typing import Annotated

from pydantic import Field

from .base import Integer, Section
from .durations import Duration, PositiveDuration


class CapacityLoss(StrEnum):
    """What a job does that has fewer nodes than before."""

    SHRINK = "shrink"
    """Continues at once with the nodes it has, down to `nodes.min`, and grows again when a replacement is ready."""
    WAIT = "wait"
    """Waits for a replacement, for `replace_timeout`; then continues with what it has, if that is enough."""
    FAIL = "fail"
    """Stops."""


class Recovery(Section):
    """How a lost node is made up for, and how ranks are started again."""

    on_capacity_loss: CapacityLoss = CapacityLoss.SHRINK
    """`shrink` continues with fewer nodes (only where `nodes.min` allows it), `wait` waits for a replacement, `fail`
    stops the job."""
    replace_timeout: PositiveDuration = timedelta(minutes=10)
    """How long a job waits for a replacement: with fewer than `nodes.min` nodes, after which it stops, or because
    `on_capacity_loss` is `wait`, after which it continues with the nodes it has. The wait for the first world is
    `timing.rendezvous.join_timeout`."""
    warm_starts: bool = True
    """Ranks are started from an interpreter of the node that has imported torch already, which saves seconds per
    restart and takes about 0.7 GB of memory per node; beside GPUs once more per rank, where it is free. Where that
    would make a difference to the script, ranks are started in the ordinary way, and `perdure explain` says why: see
    docs/warm-starts.md."""


class Retry(Section):
    """How often failures are repaired before the job stops with the reason."""

    max_restarts: Integer = Field(default=10, ge=0)
    """Restarts allowed within `window`. Losses of nodes count; scaling and resuming by users do not."""
    window: PositiveDuration = timedelta(hours=1)
    """Only restarts of the last this long count against `max_restarts`."""
    same_loss: Duration = timedelta(seconds=30)
    """Nodes that are lost within this long of a restart that counts do not make another: when a rack or a switch goes,
    the news of its machines takes seconds."""
    no_progress_limit: Integer = Field(default=3, ge=1)
    """The job stops after this many restarts in a row without a step beyond the furthest one so far."""
    fatal_exit_codes: list[Annotated[Integer, Field(ge=1, le=255)]] = Field(default=[2])
    """A process that exits with one of these stops the job at once; 2 is what Python programs exit with when called
    with wrong arguments."""


class Limits(Section):
    """How long a job and its parts may take."""

    active_deadline: PositiveDuration | None = None
    """The job is stopped this long after it began; unset: never."""
    queue_timeout: PositiveDuration | None = None
    """How long a job may wait for the machines of its first world, while its queue has not admitted it or no machine
    has room; then it stops with the scheduler's message. Unset: no limit. Once its nodes have machines,
    `timing.rendezvous.join_timeout` counts."""
    termination_grace_period: Duration = timedelta(seconds=30)
    """From SIGTERM to SIGKILL when the job's processes are stopped for good: time to save."""
