"""Delivers the signals between jobs and groups, on behalf of both: see `perdure.workflows.delivery`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from temporalio import activity
from temporalio.client import Client
from temporalio.service import RPCError, RPCStatusCode

from perdure.contract import Adopt, GroupDesire, GroupTransitions
from perdure.workflows import options
from perdure.workflows.delivery import SIGNAL_ACTIVITIES, Delivery


class SignalActivities:
    """Sends signals with the worker's own client."""

    def __init__(self, client: Client) -> None:
        self._client = client

    @property
    def all(self) -> Sequence[Callable[..., Any]]:
        return (self.signal_desire, self.signal_adopt, self.signal_transitions)

    @activity.defn(name=SIGNAL_ACTIVITIES["desire"])
    async def signal_desire(self, group_id: str, message: GroupDesire) -> Delivery:
        """Signals a group the desired state that its job derived."""
        return await self._deliver(group_id, "desire", message)

    @activity.defn(name=SIGNAL_ACTIVITIES["adopt"])
    async def signal_adopt(self, group_id: str, message: Adopt) -> Delivery:
        """Requests the table of a running group on behalf of the job that adopts it."""
        return await self._deliver(group_id, "adopt", message)

    @activity.defn(name=SIGNAL_ACTIVITIES["transitions"])
    async def signal_transitions(self, job_id: str, message: GroupTransitions) -> Delivery:
        """Signals a job the transitions in one of its groups."""
        return await self._deliver(job_id, "transitions", message)

    async def _deliver(
        self, workflow_id: str, signal: str, message: GroupDesire | Adopt | GroupTransitions
    ) -> Delivery:
        try:
            handle = self._client.get_workflow_handle(workflow_id)
            await handle.signal(signal, message, rpc_timeout=options.SIGNAL_TIMEOUT)
        except RPCError as error:
            if error.status is RPCStatusCode.NOT_FOUND:
                return Delivery.CLOSED
            raise
        return Delivery.TAKEN
