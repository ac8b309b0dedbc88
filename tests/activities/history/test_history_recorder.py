"""Tests of the recording: what has happened is in the database once, however often it was away."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from datetime import timedelta
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
from temporalio.api.enums.v1 import PendingActivityState
from temporalio.client import Client, WorkflowFailureError, WorkflowHandle
from temporalio.exceptions import ActivityError, ApplicationError
from temporalio.service import RPCError, RPCStatusCode

from perdure.activities.history import activities as history_activities
from perdure.activities.history.activities import HistoryActivities, keeping_history, start_recorder
from perdure.activities.history.answers import answer
from perdure.activities.history.records import JobRecord
from perdure.activities.history.settings import HistorySettings
from perdure.activities.history.store import HistoryStore, HistoryUnavailable
from perdure.base.executions import Execution, ExecutionDescription, find
from perdure.contract import HistoryAnswer, HistoryRequest, JobPhase
from perdure.contract.names import READ_HISTORY, recorder_workflow_id
from tests.activities.history.played_jobs import jobs_are_played, start_job
from tests.activities.history.stored import incident, status
from tests.support.waiting import eventually
from tests.workflows.jobs import reset


@pytest.fixture
async def queue(temporal_client: Client) -> AsyncGenerator[str]:
    async with jobs_are_played(temporal_client) as queue:
        yield queue


@pytest.fixture
def url(tmp_path: Path) -> str:
    return f"sqlite:///{tmp_path / 'kept' / 'history.db'}"


def recorder(client: Client, url: str, queue: str, **settings: Any) -> tuple[HistoryActivities, HistoryStore]:
    store = HistoryStore(url, tenant=client.namespace)
    return HistoryActivities(client, store, task_queue=queue, retention=timedelta(days=1), **settings), store


async def ask(client: Client, queue: str) -> HistoryAnswer:
    return await client.execute_workflow(
        READ_HISTORY, HistoryRequest(), id=f"ask-{uuid4().hex}", task_queue=queue, result_type=HistoryAnswer
    )


def _type_of(error: WorkflowFailureError) -> str | None:
    failed = error.cause.cause if isinstance(error.cause, ActivityError) else None
    return failed.type if isinstance(failed, ApplicationError) else None


async def test_jobs_are_recorded_while_they_run_and_when_they_have_ended(
    temporal_client: Client, queue: str, url: str
) -> None:
    handle = await start_job(temporal_client, queue)
    wrong = await start_job(temporal_client, queue, spec={"name": "llama"})
    activities, store = recorder(temporal_client, url, queue)
    store.prepare()

    async def found(number: int) -> HistoryAnswer | None:
        # The server's lists are late.
        await activities.look()
        known = answer(store, HistoryRequest(namespace="nlp"))
        finished = [job for job in known.jobs if job.finished_at]
        return known if (known.found, len(finished)) == (2, number) else None

    await eventually(lambda: found(0))
    await handle.signal("play", args=[status(generation=2, restarts_total=1), [incident(1, timedelta(minutes=1))]])
    await handle.signal("end", True)
    await wrong.terminate()
    known = await eventually(lambda: found(2))
    jobs = {job.name: job for job in known.jobs}
    ended = jobs[handle.id.rpartition("/")[2]]
    assert (ended.phase, ended.restarts, ended.worlds) == (JobPhase.SUCCEEDED, 1, 2)
    assert (ended.shape.labels, ended.shape.roles[0].image) == ({"team": "nlp"}, "acme/llama:1")
    assert ended.shape.roles[0].command == "torchrun train.py --lr"
    assert jobs[wrong.id.rpartition("/")[2]].phase is JobPhase.CANCELLED
    assert [host.host for host in known.hosts] == ["gpu-7"]
    await activities.look()
    assert answer(store, HistoryRequest()) == known.replace(recorded_at=answer(store, HistoryRequest()).recorded_at)
    store.close()


async def test_a_job_that_ends_while_the_database_is_away_is_recorded_later(
    temporal_client: Client, queue: str, tmp_path: Path
) -> None:
    blocked = tmp_path / "kept"
    blocked.touch()
    settings = HistorySettings(url=f"sqlite:///{blocked / 'history.db'}")
    handle = await start_job(temporal_client, queue)
    async with keeping_history(temporal_client, settings, task_queue=queue):

        async def fails() -> bool:
            described = await find(temporal_client, recorder_workflow_id(queue))
            assert described is not None
            return any("cannot be written" in one.last_failure.message for one in described.pending_activities)

        await eventually(fails)
        await handle.signal("end", False)
        with pytest.raises(WorkflowFailureError):
            await handle.result()
        refusals: set[str | None] = set()
        with pytest.raises(WorkflowFailureError) as failed:
            await ask(temporal_client, queue)
        assert _type_of(failed.value) == "HistoryUnavailable"
        blocked.unlink()

        async def recorded() -> HistoryAnswer | None:
            try:
                found = await ask(temporal_client, queue)
            except WorkflowFailureError as error:
                refusals.add(_type_of(error))
                return None
            return found if found.jobs and found.jobs[0].finished_at else None

        known = await eventually(recorded)
        assert [job.phase for job in known.jobs] == [JobPhase.FAILED]
        assert refusals <= {"HistoryUnavailable"}
        # A second worker starts no second recording.
        await start_recorder(temporal_client, task_queue=queue)
        described = await find(temporal_client, recorder_workflow_id(queue))
        assert described is not None
        assert [one.state for one in described.pending_activities] == [
            PendingActivityState.PENDING_ACTIVITY_STATE_STARTED
        ]
    await temporal_client.get_workflow_handle(recorder_workflow_id(queue)).terminate()


async def test_a_job_that_was_reset_is_recorded_as_it_goes_on_and_ends(
    temporal_client: Client, queue: str, url: str
) -> None:
    handle = await start_job(temporal_client, queue)
    job = temporal_client.get_workflow_handle(handle.id)
    activities, store = recorder(temporal_client, url, queue)
    store.prepare()
    await handle.query("status")
    await reset(job)

    async def listed(ended: int) -> bool:
        found = temporal_client.list_workflows(f"TaskQueue = '{queue}' AND CloseTime IS NOT NULL")
        return len([one async for one in found]) == ended

    async def phase() -> JobPhase:
        await activities.look()
        [known] = answer(store, HistoryRequest()).jobs
        return known.phase

    await eventually(lambda: listed(1))
    assert [await phase() for _ in range(2)] == [JobPhase.RUNNING] * 2
    await job.signal("end", True)
    await job.result()
    await eventually(lambda: listed(2))
    assert [await phase() for _ in range(2)] == [JobPhase.SUCCEEDED] * 2
    store.close()


async def ended_jobs(client: Client, queue: str, number: int) -> list[WorkflowHandle[Any, Any]]:
    """Jobs that the server lists as ended."""
    handles = [await start_job(client, queue) for _ in range(number)]
    for handle in handles:
        await handle.signal("end", True)
        await handle.result()

    async def all_listed() -> bool:
        ended = client.list_workflows(f"TaskQueue = '{queue}' AND CloseTime IS NOT NULL")
        return len([one async for one in ended]) == number

    await eventually(all_listed)
    return handles


async def test_a_look_that_fails_halfway_leaves_the_rest_for_the_next(
    temporal_client: Client, queue: str, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    await ended_jobs(temporal_client, queue, 3)
    activities, store = recorder(temporal_client, url, queue)
    store.prepare()
    write, written = store.write, 0

    def fail_once(record: object) -> None:
        nonlocal written
        written += 1
        if written == 2:
            raise HistoryUnavailable("the disk is full")
        write(record)  # pyrefly: ignore[bad-argument-type]

    monkeypatch.setattr(store, "write", fail_once)

    async def look() -> bool:
        before = store.complete_until(queue)
        try:
            await activities.look()
        except HistoryUnavailable:
            assert store.complete_until(queue) == before
        return answer(store, HistoryRequest()).found == 3

    await eventually(look)
    # Each was written once, and the one that failed again.
    assert written == 4
    await asyncio.to_thread(store.close)


async def test_a_job_of_which_the_server_does_not_tell_keeps_no_other_from_being_recorded(
    temporal_client: Client, queue: str, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    handles = await ended_jobs(temporal_client, queue, 3)
    activities, store = recorder(temporal_client, url, queue)
    store.prepare()
    read, silent = activities._read, {handles[1].id}

    async def read_others(execution: Execution, described: ExecutionDescription) -> JobRecord:
        if execution.id in silent:
            raise RPCError("context deadline exceeded", RPCStatusCode.DEADLINE_EXCEEDED, b"")
        return await read(execution, described)

    monkeypatch.setattr(activities, "_read", read_others)

    async def found(number: int) -> bool:
        await activities.look()
        return answer(store, HistoryRequest()).found == number

    await eventually(lambda: found(2))
    ended = (await handles[1].describe()).close_time
    complete = store.complete_until(queue)
    assert ended is not None
    assert complete is not None
    assert complete <= ended, "it is looked for again"
    silent.clear()
    assert await found(3)
    await asyncio.to_thread(store.close)


@pytest.mark.parametrize("others_answer", [True, False])
async def test_a_job_that_never_answers_does_not_keep_the_history_from_being_complete(
    temporal_client: Client, queue: str, url: str, monkeypatch: pytest.MonkeyPatch, others_answer: bool
) -> None:
    handles = await ended_jobs(temporal_client, queue, 3)
    activities, store = recorder(temporal_client, url, queue, patience=timedelta())
    store.prepare()
    silent = {handles[1].id} if others_answer else {handle.id for handle in handles}
    query = history_activities.query

    async def query_others(handle: WorkflowHandle[Any, Any], *arguments: Any, **named: Any) -> Any:
        if handle.id in silent:
            raise RPCError("context deadline exceeded", RPCStatusCode.DEADLINE_EXCEEDED, b"")
        return await query(handle, *arguments, **named)

    monkeypatch.setattr(history_activities, "query", query_others)
    ended = (await handles[1].describe()).close_time
    assert ended is not None
    if others_answer:

        async def complete() -> bool:
            # Others end meanwhile, and answer.
            await (await start_job(temporal_client, queue)).signal("end", True)
            await activities.look()
            until = store.complete_until(queue)
            return until is not None and until > ended

        await eventually(complete)
        known = {job.name: job for job in answer(store, HistoryRequest()).jobs}
        job = known[handles[1].id.rpartition("/")[2]]
        assert (job.phase, job.finished_at, job.worlds) == (JobPhase.SUCCEEDED, ended, 0)
    else:

        async def all_are_listed() -> bool:
            await activities.look()
            return len(activities._silent_since) == 3

        await eventually(all_are_listed)
        await activities.look()
        until = store.complete_until(queue)
        assert until is not None
        assert until <= ended, "no worker may be there: all are asked again"
        assert not answer(store, HistoryRequest()).found
    await asyncio.to_thread(store.close)
