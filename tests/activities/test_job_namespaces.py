"""Tests that leftovers are looked for in the namespaces of all jobs that Temporal remembers, however many one has."""

from __future__ import annotations

from uuid import uuid4

import pytest
from temporalio.client import Client

from perdure.activities.nodes.kubernetes import leftovers
from perdure.contract.names import TRAINING_JOB, job_workflow_id
from tests.support.waiting import eventually


async def test_a_namespace_whose_jobs_are_older_than_many_others_is_found(
    temporal_client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(leftovers, "JOBS_AT_ONCE", 2)
    old, busy = f"old-{uuid4().hex[:8]}", f"busy-{uuid4().hex[:8]}"
    jobs = [
        await temporal_client.start_workflow(TRAINING_JOB, id=job_workflow_id(namespace, name), task_queue="nobody")
        for namespace, name in [(old, "a"), *((busy, f"job-{number}") for number in range(3))]
    ]

    async def found() -> bool:
        return {old, busy} <= await leftovers._namespaces(temporal_client)

    await eventually(found)
    for job in jobs:
        await job.terminate()


async def test_an_id_that_anybody_chose_keeps_no_namespace_from_being_found(
    temporal_client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(leftovers, "JOBS_AT_ONCE", 2)
    ours, foreign = f"ours-{uuid4().hex[:8]}", f"it's-{uuid4().hex[:8]}"
    jobs = [
        await temporal_client.start_workflow(TRAINING_JOB, id=job_workflow_id(namespace, name), task_queue="nobody")
        for namespace, name in [(ours, "a"), *((foreign, f"job-{number}") for number in range(3))]
    ]

    async def found() -> bool:
        return ours in await leftovers._namespaces(temporal_client)

    await eventually(found)
    for job in jobs:
        await job.terminate()
