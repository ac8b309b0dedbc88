"""How a group speaks to its job: the first edge at once, what follows within a moment together.

The death of a rank must be reported without delay; a thousand nodes that become ready in the same second must not make
a thousand signals in the job's history.
"""

from __future__ import annotations

from contextlib import suppress
from datetime import datetime, timedelta
from typing import Any

from temporalio import workflow

with workflow.unsafe.imports_passed_through():
    from workflows import options
    from workflows.delivery import Delivery, deliver
    from workflows.messages import GroupTransitions, NodeTransition, NodeView, TransitionKind
    from workflows.node_record import TransitionsCarried
    from workflows.policy.behavior import CURRENT, Behavior


class TransitionBatch:
    """Gathers edges and delivers them in order.

    Invariants:
        - An edge stays here until the job has taken it; edges that could not be delivered go first the next time.
        - What `carried` tells rides through continue-as-new: edges that wait, and sequence numbers that only grow.
        - Each message has a higher sequence number than the one before, and says how many edges went before its first:
          the job recognises a repeat of a message, and of edges that it took although the delivery seemed to fail.
    """

    def __init__(
        self,
        *,
        job_id: str,
        uid: str,
        group: int,
        gather: timedelta,
        carried: TransitionsCarried,
        behavior: Behavior = CURRENT,
    ) -> None:
        self._behavior = behavior
        self._job_id = job_id
        self._uid = uid
        self._group = group
        self._gather = gather
        self._waiting: list[NodeTransition] = list(carried.waiting)
        self._adopted: tuple[NodeView, ...] | None = carried.adopted
        self._adoptions = 0
        """A message may be in flight while the group is adopted; one job may do so twice, and find the same."""
        self._wound_down = False
        self._stopped = False
        self._sequence = carried.sequence
        self._delivered = carried.delivered
        """Edges that the job has taken: the number of those before the first that waits."""
        self._ownership_epoch = carried.ownership_epoch

    @property
    def carried(self) -> TransitionsCarried:
        """What the next run begins with, once `deliver` has ended."""
        return TransitionsCarried(
            waiting=tuple(self._waiting),
            adopted=self._adopted,
            sequence=self._sequence,
            delivered=self._delivered,
            ownership_epoch=self._ownership_epoch,
        )

    def add(self, *, kind: TransitionKind, rank: int, incarnation: int, time: datetime, **facts: Any) -> None:
        self._waiting.append(NodeTransition(kind=kind, rank=rank, incarnation=incarnation, time=time, **facts))

    def adopted(self, nodes: tuple[NodeView, ...], *, ownership_epoch: str) -> None:
        """Tells the job that now has the group the whole table with the next message."""
        self._adopted = nodes
        self._adoptions += 1
        self._ownership_epoch = ownership_epoch

    def wound_down(self) -> None:
        """Nothing is left: `deliver` reports it and ends."""
        self._wound_down = True

    def stop(self) -> None:
        """Ends `deliver` after the message that is in flight; what waits is in `carried`."""
        self._stopped = True

    async def deliver(self) -> None:
        """Sends for as long as the group runs."""
        while True:
            await workflow.wait_condition(lambda: self._has_news or self._wound_down or self._stopped)
            if self._stopped:
                return
            winding_down, adoptions = self._wound_down, self._adoptions
            delivery = await self._send()
            if winding_down and delivery is not Delivery.FAILED:
                if self._adoptions != adoptions:
                    # Meanwhile a job has adopted this group, and would wait for its nodes forever.
                    continue
                # The job has taken it, or is closed: no workflow is left to report to.
                return
            with suppress(TimeoutError):
                await workflow.wait_condition(
                    lambda waits=winding_down: self._stopped or (self._wound_down and not waits),
                    timeout=self._gather if delivery is Delivery.TAKEN else options.LOST_SIGNAL_RETRY,
                )

    @property
    def _has_news(self) -> bool:
        return bool(self._waiting) or self._adopted is not None

    async def _send(self) -> Delivery:
        transitions, adopted, adoptions = tuple(self._waiting), self._adopted, self._adoptions
        self._sequence += 1
        message = GroupTransitions(
            uid=self._uid,
            group=self._group,
            sequence=self._sequence,
            before=self._delivered,
            transitions=transitions,
            adopted=adopted,
            wound_down=self._wound_down,
            ownership_epoch=self._ownership_epoch,
        )
        delivery = await deliver(self._job_id, "edges", message, behavior=self._behavior)
        if delivery is not Delivery.TAKEN:
            return delivery
        self._delivered += len(transitions)
        del self._waiting[: len(transitions)]
        if self._adoptions == adoptions:
            self._adopted = None
        return delivery
