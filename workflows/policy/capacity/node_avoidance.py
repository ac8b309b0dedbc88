"""Chooses the machines that the next nodes should avoid: those on which the job has lost nodes without another reason.

A machine with failing memory or a bad cable often looks healthy to its cluster, and the scheduler prefers it: it has
room, and the image. So losses are counted by machine, within the window of the job's budget. A node that was removed on
purpose, or that used too much memory, speaks against no machine.

The result is a preference: where no other machine has room, a node runs there again, and no job waits for it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable
from datetime import datetime, timedelta

from perdure.contract import LossCause
from perdure.spec.capabilities import CAPABILITIES
from perdure.spec.job import JobSpec
from perdure.workflows.policy.state.job import RoleInJob
from perdure.workflows.policy.state.node import MachineLoss, NodeState

LOSSES = 2
"""Unexplained losses that make a machine suspect; one loss that the machine's own failure explains is enough."""

_STANDS_OUT = 2
"""A machine stands out with more than this many times the mean of unexplained losses of the job's other machines: a
user or a script that kills processes everywhere is not a machine's fault."""

_SPEAK_AGAINST_A_MACHINE = (LossCause.MACHINE, LossCause.EVICTED, LossCause.UNKNOWN)

_REMEMBERED = 64
"""Losses that a job remembers, the newest: they ride through continue-as-new."""

_AVOIDED = 8
"""The most machines that a node avoids: the node's manifest and each message about it contain the list."""


def suspects(
    losses: Iterable[MachineLoss], *, now: datetime, window: timedelta, machines: Collection[str] = ()
) -> tuple[str, ...]:
    """The names of the machines to avoid.

    Args:
        losses: The losses with their machines, in any order.
        now: The time.
        window: Only losses within this time count.
        machines: All machines of the job, where they are known: unexplained losses that all machines have alike speak
            against none of them.
    """
    counted = [loss for loss in losses if now - loss.time < window]
    proven = {loss.host for loss in counted if loss.cause is LossCause.MACHINE}
    unexplained = Counter(loss.host for loss in counted if loss.cause is not LossCause.MACHINE)
    newest = {loss.host: loss.time for loss in sorted(counted, key=lambda loss: loss.time)}

    def stands_out(host: str) -> bool:
        others = {*machines, *newest} - {host} if machines else set[str]()
        return not others or unexplained[host] * len(others) > _STANDS_OUT * sum(unexplained[one] for one in others)

    guilty = proven | {host for host, count in unexplained.items() if count >= LOSSES and stands_out(host)}
    return tuple(sorted(sorted(guilty, key=lambda host: (newest[host], host))[-_AVOIDED:]))


def machines_to_avoid(state: RoleInJob, job: JobSpec, now: datetime) -> tuple[str, ...]:
    """The machines that the job's next node should avoid; empty where its backend does not choose machines."""
    if not CAPABILITIES[job.backend].chooses_machines:
        return ()
    machines = {node.host for node in state.nodes.values() if node.host}
    return suspects(state.losses, now=now, window=job.retry.window, machines=machines)


def suspect(state: RoleInJob, host: str, now: datetime) -> RoleInJob:
    """Remembers that a machine has failed a check."""
    loss = MachineLoss(host=host, time=now, cause=LossCause.MACHINE)
    return state.replace(losses=(*state.losses, loss)[-_REMEMBERED:])


def remember(state: RoleInJob, node: NodeState) -> RoleInJob:
    """Remembers the loss of this node, if it speaks against its machine."""
    if not node.host or node.loss_cause not in _SPEAK_AGAINST_A_MACHINE:
        return state
    loss = MachineLoss(host=node.host, time=node.since, cause=node.loss_cause)
    return state.replace(losses=(*state.losses, loss)[-_REMEMBERED:])
