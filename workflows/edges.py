"""How a group speaks to its job: the first edge at once, what follows within a moment together.

A rank that dies must be told of without delay; a thousand nodes that become ready in the same second must not make a
thousand signals in the job's history.
"""

from __future__ import annotations

import asyncio
from datetime import datetime, timedelta
from typing import Any

from temporalio import workflow
from temporalio.exceptions import TemporalError

with workflow.unsafe.imports_passed_through():
    from workflows import options
    from workflows.messages import EdgeKind, GroupEdges, NodeEdge, NodeView


class EdgeBatch:
    """Gathers edges and delivers them in order.

    Invariants:
        - An edge stays here until the job has taken it; edges that could not be delivered go first the next time.
        - Sequence numbers only grow, over continue-as-new too.
    """

    def __init__(self, *, job_id: str, uid: str, group: int, gather: timedelta, sequence: int) -> None:
        self._job_id = job_id
        self._uid = uid
        self._group = group
        self._gather = gather
        self._waiting: list[NodeEdge] = []
        self._adopted: tuple[NodeView, ...] | None = None
        self._wound_down = False
        self._stopped = False
        self._sending = False
        self.sequence = sequence
        """Of the last message."""

    @property
    def is_idle(self) -> bool:
        return not (self._waiting or self._sending or self._adopted is not None)

    def add(self, *, kind: EdgeKind, rank: int, incarnation: int, time: datetime, **facts: Any) -> None:
        self._waiting.append(NodeEdge(kind=kind, rank=rank, incarnation=incarnation, time=time, **facts))

    def adopted(self, nodes: tuple[NodeView, ...]) -> None:
        """Tells the job the whole table with the next message."""
        self._adopted = nodes

    def wound_down(self) -> None:
        """Nothing is left: `deliver` says so and ends."""
        self._wound_down = True

    def stop(self) -> None:
        """Ends `deliver` after what is under way."""
        self._stopped = True

    async def deliver(self) -> None:
        """Sends for as long as the group runs."""
        while not self._stopped:
            await workflow.wait_condition(lambda: not self.is_idle or self._wound_down or self._stopped)
            if self._stopped and self.is_idle:
                return
            if not await self._send():
                if self._wound_down:
                    # The job is closed, or gone: there is nobody left to tell.
                    return
                await workflow.sleep(options.LOST_SIGNAL_RETRY)
                continue
            if self._wound_down:
                return
            await asyncio.sleep(self._gather.total_seconds())

    async def _send(self) -> bool:
        edges, adopted = tuple(self._waiting), self._adopted
        self.sequence += 1
        message = GroupEdges(
            uid=self._uid,
            group=self._group,
            sequence=self.sequence,
            edges=edges,
            adopted=adopted,
            wound_down=self._wound_down,
        )
        self._sending = True
        try:
            await workflow.get_external_workflow_handle(self._job_id).signal("edges", message)
        except TemporalError as error:
            workflow.logger.warning("the job did not take %s edges: %s", len(edges), error)
            return False
        finally:
            self._sending = False
        del self._waiting[: len(edges)]
        if self._adopted is adopted:
            self._adopted = None
        return True
