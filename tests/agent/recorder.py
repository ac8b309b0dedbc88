"""Replacements for the workflows that an agent reports to: they record every signal and forward commands."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

from pydantic import BaseModel
from temporalio import workflow
from temporalio.common import RawValue, RetryPolicy
from temporalio.exceptions import ActivityError, ApplicationError

with workflow.unsafe.imports_passed_through():
    from perdure.contract import LeaseRequest


RECORDED: Counter[str] = Counter()
"""Signals that workers of this process have recorded, by workflow; those of replays included."""


class Seen(BaseModel):
    """One signal, in the order of handling."""

    signal: str
    body: dict[str, Any]


class Call(BaseModel):
    """A command for a node."""

    queue: str
    activity: str
    argument: dict[str, Any]
    within: timedelta = timedelta(seconds=10)
    """The time for one attempt."""


class LeaseCall(BaseModel):
    """A lease for a node to hold."""

    queue: str
    request: LeaseRequest
    timeout: timedelta


@workflow.defn(name="Recorder", sandboxed=False)
class Recorder:
    """Records signals, calls activities on agents' queues, schedules leases and notes how they end."""

    @workflow.init
    def __init__(self) -> None:
        self._seen: list[Seen] = []
        self._leases: list[str] = []
        self._closing = False

    @workflow.run
    async def run(self) -> None:
        await workflow.wait_condition(lambda: self._closing)
        await workflow.wait_condition(workflow.all_handlers_finished)

    @workflow.signal(dynamic=True)
    def record(self, name: str, arguments: Sequence[RawValue]) -> None:
        try:
            body = workflow.payload_converter().from_payload(arguments[0].payload, dict)
        except ApplicationError:
            # As any workflow whose handlers name their types, it takes no signal that it may not read.
            return
        self._seen.append(Seen(signal=name, body=body))
        RECORDED[workflow.info().workflow_id] += 1

    @workflow.signal
    def close(self) -> None:
        self._closing = True

    @workflow.query
    def seen(self) -> list[Seen]:
        return self._seen

    @workflow.query
    def leases(self) -> list[str]:
        return self._leases

    @workflow.update
    async def call(self, call: Call) -> dict[str, Any]:
        return await workflow.execute_activity(
            call.activity,
            call.argument,
            task_queue=call.queue,
            result_type=dict,
            start_to_close_timeout=call.within,
            schedule_to_close_timeout=timedelta(minutes=4),
        )

    @workflow.update
    async def lease(self, call: LeaseCall) -> str:
        """Holds a lease once and says how it ended."""
        try:
            await workflow.execute_activity(
                "hold_lease",
                call.request,
                task_queue=call.queue,
                start_to_close_timeout=timedelta(days=1),
                heartbeat_timeout=call.timeout,
                retry_policy=RetryPolicy(maximum_attempts=1),
                cancellation_type=workflow.ActivityCancellationType.TRY_CANCEL,
            )
        except ActivityError as error:
            ended = type(error.cause).__name__
        else:
            ended = "returned"
        self._leases.append(ended)
        return ended
