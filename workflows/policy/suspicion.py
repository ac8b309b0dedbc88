"""Which machines the next nodes had better keep away from: those on which the job has lost nodes for no better reason.

A machine with failing memory or a bad cable often looks healthy to its cluster, and the scheduler likes it: it has
room, and the image. So losses are counted by machine, within the window of the job's budget. A node that was wanted
gone, or that took too much memory, speaks against no machine.

What follows is a wish: where no other machine has room, a node runs there again, and no job waits for it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from datetime import datetime, timedelta

from perdure.spec.job import Backend, JobSpec
from workflows.messages import LossCause
from workflows.policy.state import JobState, MachineLoss, NodeState

LOSSES = 2
"""Unexplained ones that make a machine suspect; one that its own failure explains is enough."""

_REMEMBERED = 64
"""Losses, the newest: they ride through continue-as-new."""

_AVOIDED = 8
"""Machines at most that a node keeps away from: as many ride in its manifest and in each message about it."""


def suspects(losses: Iterable[MachineLoss], *, now: datetime, window: timedelta) -> tuple[str, ...]:
    """The machines to keep away from, by name.

    Args:
        losses: What was lost where, in any order.
        now: The time.
        window: Only losses of the last this long count.
    """
    counted = [loss for loss in losses if now - loss.time < window]
    strikes: Counter[str] = Counter()
    for loss in counted:
        strikes[loss.host] += LOSSES if loss.cause is LossCause.MACHINE else 1
    newest = {loss.host: loss.time for loss in sorted(counted, key=lambda loss: loss.time)}
    guilty = [host for host, count in strikes.items() if count >= LOSSES]
    return tuple(sorted(sorted(guilty, key=lambda host: (newest[host], host))[-_AVOIDED:]))


def avoided(state: JobState, job: JobSpec, now: datetime) -> tuple[str, ...]:
    """What the job's next node keeps away from; nothing where its backend does not choose machines."""
    if job.backend is not Backend.KUBERNETES:
        return ()
    return suspects(state.losses, now=now, window=job.retry.window)


def remembered(state: JobState, node: NodeState) -> JobState:
    """The state in which the loss of this node speaks against its machine, if it does."""
    if not node.host or node.loss_cause not in (LossCause.MACHINE, LossCause.UNKNOWN):
        return state
    loss = MachineLoss(host=node.host, time=node.since, cause=node.loss_cause)
    return state.changed(losses=(*state.losses, loss)[-_REMEMBERED:])
