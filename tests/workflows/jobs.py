"""Queries jobs, and waits for their states, for tests that run real workflows."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from temporalio.api.common.v1 import WorkflowExecution
from temporalio.api.workflowservice.v1 import ResetWorkflowExecutionRequest
from temporalio.client import WorkflowHandle

from perdure.contract import IncidentView, JobPhase, JobStatus
from tests.support.waiting import eventually
from tests.workflows.fleet import Fleet
from tests.workflows.played_node import PlayedNode


async def status(handle: WorkflowHandle[Any, Any]) -> JobStatus:
    return await handle.query("status", result_type=JobStatus)


async def incidents(handle: WorkflowHandle[Any, Any]) -> list[IncidentView]:
    return await handle.query("incidents", result_type=list[IncidentView])


async def until(
    handle: WorkflowHandle[Any, Any], condition: Callable[[JobStatus], bool], *, within: float = 60
) -> JobStatus:
    """The status once the condition holds."""
    known: JobStatus | None = None

    async def fitting() -> JobStatus | None:
        nonlocal known
        known = await status(handle)
        return known if condition(known) else None

    return await eventually(fitting, within=within, what=lambda: str(known))


async def history_length(handle: WorkflowHandle[Any, Any]) -> int:
    return (await handle.describe()).history_length


async def settled_history(handle: WorkflowHandle[Any, Any]) -> int:
    """The history's length once what the start of a job brings with it is over."""
    length = await history_length(handle)
    while True:
        await asyncio.sleep(1)
        if (now_length := await history_length(handle)) == length:
            return length
        length = now_length


async def continued_as_new(handle: WorkflowHandle[Any, Any], first_run: str | None) -> None:
    """Returns once the workflow has another run."""

    async def continued() -> bool:
        return (await handle.describe()).run_id != first_run

    await eventually(continued, within=60, what=f"{handle.id} continues as new")


async def reset(handle: WorkflowHandle[Any, Any]) -> None:
    """Resets the workflow to its first task, as `temporal workflow reset` does."""
    first_task = next(
        event.event_id
        for event in [event async for event in handle.fetch_history_events()]
        if event.HasField("workflow_task_completed_event_attributes")
    )
    client = handle._client  # pyright: ignore[reportPrivateUsage]
    await client.workflow_service.reset_workflow_execution(
        ResetWorkflowExecutionRequest(
            namespace=client.namespace,
            workflow_execution=WorkflowExecution(workflow_id=handle.id),
            reason="test",
            request_id=handle.id,
            workflow_task_finish_event_id=first_task,
        )
    )


async def running(
    handle: WorkflowHandle[Any, Any], *, nodes: int, generation: int | None = None, within: float = 60
) -> JobStatus:
    """The status once the job runs with so many nodes."""
    return await until(
        handle,
        lambda s: s.phase is JobPhase.RUNNING and s.nodes == nodes and generation in (None, s.generation),
        within=within,
    )


async def node(
    fleet: Fleet, handle: WorkflowHandle[Any, Any], rank: int, incarnation: int = 1, *, role: str = ""
) -> PlayedNode:
    """One incarnation, once it was created; `role` of a job with several."""
    key = (fleet.place(handle.id, role), rank, incarnation)
    await eventually(lambda: key in fleet.nodes, within=30, what=f"node {rank}.{incarnation} is created")
    return fleet.nodes[key]
