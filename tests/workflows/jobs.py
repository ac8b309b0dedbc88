"""Queries jobs, and waits for their states, for tests that run real workflows."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from datetime import timedelta
from typing import Any, TypeVar
from uuid import uuid4

import pytest
from temporalio.api.common.v1 import WorkflowExecution
from temporalio.api.enums.v1 import ResetReapplyExcludeType
from temporalio.api.workflowservice.v1 import ResetWorkflowExecutionRequest
from temporalio.client import Client, WorkflowHandle
from temporalio.service import RPCError, RPCStatusCode

from perdure.contract import GroupTransitions, IncidentView, JobPhase, JobStatus
from tests.support.waiting import DEADLINE, eventually
from tests.workflows import observed_tasks
from tests.workflows.fleet import Fleet
from tests.workflows.played_node import PlayedNode

Found = TypeVar("Found")

RUN_ENDS = (RPCStatusCode.NOT_FOUND, RPCStatusCode.RESOURCE_EXHAUSTED, RPCStatusCode.FAILED_PRECONDITION)
"""Answers of the server to an update of a workflow that is not there yet, or that continues as new meanwhile: then the
update's task may fail, for which there is no word of its own. Agents send it again."""


async def status(handle: WorkflowHandle[Any, Any]) -> JobStatus:
    # By default the SDK waits for 10 s, in which a busy machine may not come to it.
    return await handle.query("status", result_type=JobStatus, rpc_timeout=timedelta(seconds=DEADLINE))


async def incidents(handle: WorkflowHandle[Any, Any]) -> list[IncidentView]:
    return await handle.query("incidents", result_type=list[IncidentView])


async def seen(
    handle: WorkflowHandle[Any, Any],
    look: Callable[[], Awaitable[Found | None]],
    *,
    within: float = DEADLINE,
    what: str | Callable[[], str] = "",
) -> Found:
    """Returns the first true answer; looks again after each task of the workflow."""
    end = time.monotonic() + within
    while True:
        known = observed_tasks.count(handle.id)
        if found := await look():
            return found
        if time.monotonic() > end:
            said = what() if callable(what) else what
            raise AssertionError(f"{said or look}: not within {within:g} s")
        await observed_tasks.wait_for_task_after(handle.id, known)


async def until(
    handle: WorkflowHandle[Any, Any], condition: Callable[[JobStatus], bool], *, within: float = DEADLINE
) -> JobStatus:
    """The status once the condition holds."""
    known: JobStatus | None = None

    async def fitting() -> JobStatus | None:
        nonlocal known
        known = await status(handle)
        return known if condition(known) else None

    return await seen(handle, fitting, within=within, what=lambda: str(known))


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

    await eventually(continued, what=f"{handle.id} continues as new")


async def continue_as_new(
    handle: WorkflowHandle[Any, Any], send: Callable[[], Awaitable[object]] | None = None
) -> None:
    """Fills the history of a workflow until it has another run.

    A test lowers `options.HISTORY_LIMIT` for that before its workflows begin, and leaves it so: a replay under another
    limit would make other commands, and the workflow fails its tasks indefinitely.

    Args:
        handle: The workflow.
        send: Sends something that changes nothing; not needed for a job.
    """
    first_run = (await handle.describe()).run_id
    noise = GroupTransitions(uid="of another job", group=0, sequence=1)

    async def continued() -> bool:
        await (send() if send is not None else handle.signal("transitions", noise))
        return (await handle.describe()).run_id != first_run

    await eventually(continued, what=f"{handle.id} continues as new")


async def tasks(handle: WorkflowHandle[Any, Any]) -> list[int]:
    """The tasks of the newest run to which it can be reset, as the IDs of their events."""
    return [
        event.event_id
        async for event in handle.fetch_history_events()
        if event.HasField("workflow_task_completed_event_attributes")
    ]


async def reset(handle: WorkflowHandle[Any, Any], *, to: int | None = None, reapply: bool = True) -> None:
    """Resets the workflow to a task, its first one if none is given, as `temporal workflow reset` does."""
    task = to or (await tasks(handle))[0]
    excluded = ResetReapplyExcludeType
    kinds = (excluded.RESET_REAPPLY_EXCLUDE_TYPE_SIGNAL, excluded.RESET_REAPPLY_EXCLUDE_TYPE_UPDATE)
    client = handle._client
    await client.workflow_service.reset_workflow_execution(
        ResetWorkflowExecutionRequest(
            namespace=client.namespace,
            workflow_execution=WorkflowExecution(workflow_id=handle.id),
            reason="test",
            request_id=uuid4().hex,
            workflow_task_finish_event_id=task,
            reset_reapply_exclude_types=() if reapply else kinds,
        )
    )


async def running(
    handle: WorkflowHandle[Any, Any], *, nodes: int, generation: int | None = None, within: float = DEADLINE
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
    await eventually(lambda: key in fleet.nodes, what=f"node {rank}.{incarnation} is created")
    return fleet.nodes[key]


def forget_run(monkeypatch: pytest.MonkeyPatch, client: Client, run_id: str) -> None:
    """Has the server answer as if it did not know a run any more, for which it takes a quarter of a minute."""

    def forgetting(answer: Callable[..., Awaitable[Any]]) -> Callable[..., Awaitable[Any]]:
        async def answer_of_others(request: Any, **options: Any) -> Any:
            if request.execution.run_id == run_id:
                raise RPCError("workflow execution not found", RPCStatusCode.NOT_FOUND, b"")
            return await answer(request, **options)

        return answer_of_others

    for name in ("get_workflow_execution_history", "describe_workflow_execution"):
        monkeypatch.setattr(client.workflow_service, name, forgetting(getattr(client.workflow_service, name)))
