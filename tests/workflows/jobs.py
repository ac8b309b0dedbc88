"""Asking a job, and waiting for what it should become: for tests that run real workflows."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any

from temporalio.client import WorkflowHandle

from tests.workflows.fleet import Fleet, PlayedNode
from workflows.messages import IncidentView, JobPhase, JobStatus


async def eventually(condition: Callable[[], bool], *, within: float = 60, what: str = "it") -> None:
    """Returns once the condition holds."""
    deadline = time.monotonic() + within
    while not condition():
        assert time.monotonic() < deadline, f"{what}: not within {within} s"
        await asyncio.sleep(0.05)


async def status(handle: WorkflowHandle[Any, Any]) -> JobStatus:
    return await handle.query("status", result_type=JobStatus)


async def incidents(handle: WorkflowHandle[Any, Any]) -> list[IncidentView]:
    return await handle.query("incidents", result_type=list[IncidentView])


async def until(
    handle: WorkflowHandle[Any, Any], condition: Callable[[JobStatus], bool], *, within: float = 60
) -> JobStatus:
    """The status once the condition holds."""
    deadline = time.monotonic() + within
    while not condition(known := await status(handle)):
        assert time.monotonic() < deadline, f"not within {within} s: {known}"
        await asyncio.sleep(0.05)
    return known


async def running(
    handle: WorkflowHandle[Any, Any], *, nodes: int, generation: int | None = None, within: float = 60
) -> JobStatus:
    """The status once the job runs with so many nodes."""
    return await until(
        handle,
        lambda s: s.phase is JobPhase.RUNNING and s.nodes == nodes and generation in (None, s.generation),
        within=within,
    )


async def node(fleet: Fleet, handle: WorkflowHandle[Any, Any], rank: int, incarnation: int = 1) -> PlayedNode:
    """One incarnation, once it was created."""
    key = (handle.id, rank, incarnation)
    await eventually(lambda: key in fleet.nodes, within=30, what=f"node {rank}.{incarnation} is created")
    return fleet.nodes[key]
