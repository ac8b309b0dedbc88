"""Tests of the worker's activities with a real server and real local nodes."""

from __future__ import annotations

import asyncio
import os
import secrets
import signal
from collections.abc import AsyncIterator
from datetime import timedelta
from pathlib import Path

import pytest
from temporalio import workflow
from temporalio.client import Client, WorkflowHandle, WorkflowUpdateFailedError
from temporalio.common import RetryPolicy
from temporalio.exceptions import ActivityError, ApplicationError
from temporalio.worker import Worker

with workflow.unsafe.imports_passed_through():
    from perdure.activities.nodes.activities import NodeActivities
    from perdure.activities.nodes.local.backend import LocalBackend
    from perdure.contract import (
        CreatedNode,
        NodeEvents,
        NodeRef,
        NodeRequest,
        NodesRef,
        WatchRequest,
    )
    from perdure.spec.data import Workdir
    from perdure.spec.job import Backend
    from tests.activities.local_nodes import LocalJob, nothing_left
    from tests.support.temporal_server import DevServer
    from tests.support.waiting import eventually


@workflow.defn(name="WatchedGroup", sandboxed=False)
class WatchedGroup:
    """Runs a watch, records what it signals, and creates and deletes nodes on request."""

    @workflow.init
    def __init__(self, queue: str, watch: WatchRequest | None) -> None:
        self.heard: list[NodeEvents] = []
        self.times: list[float] = []
        self.closing = False

    @workflow.run
    async def run(self, queue: str, watch: WatchRequest | None) -> None:
        if watch is not None:
            watching = asyncio.create_task(self._watch(queue, watch))
            await workflow.wait_condition(lambda: self.closing)
            watching.cancel()
            await watching
        await workflow.wait_condition(lambda: self.closing)

    async def _watch(self, queue: str, watch: WatchRequest) -> None:
        try:
            await workflow.execute_activity(
                "watch_nodes",
                watch,
                task_queue=queue,
                start_to_close_timeout=timedelta(days=1),
                heartbeat_timeout=timedelta(seconds=5),
            )
        except ActivityError:
            assert self.closing

    @workflow.signal
    def node_events(self, events: NodeEvents) -> None:
        self.heard.append(events)
        self.times.append(workflow.time())

    @workflow.signal
    def close(self) -> None:
        self.closing = True

    @workflow.query
    def events(self) -> list[NodeEvents]:
        return self.heard

    @workflow.update
    async def create(self, request: NodeRequest) -> CreatedNode | str:
        try:
            return await workflow.execute_activity(
                "create_node",
                request,
                result_type=CreatedNode,
                start_to_close_timeout=timedelta(seconds=60),
                heartbeat_timeout=timedelta(seconds=5),
            )
        except ActivityError as error:
            cause = error.cause
            assert isinstance(cause, ApplicationError)
            return f"{cause.type}: {cause.message}"

    @workflow.update
    async def delete(self, node: NodeRef) -> None:
        await workflow.execute_activity(
            "delete_nodes",
            NodesRef(nodes=(node,)),
            start_to_close_timeout=timedelta(seconds=60),
            retry_policy=RetryPolicy(maximum_attempts=3),
        )


class Running:
    """A job with nodes, its group and the worker of both."""

    def __init__(self, client: Client, job: LocalJob, group: WorkflowHandle, owner: WorkflowHandle) -> None:
        self.client = client
        self.job = job
        self.group = group
        self.owner = owner

    async def until_event(self, kind: str, *, within: float = 30.0) -> None:
        """Returns when it was reported to the group."""

        async def heard() -> bool:
            heard: list[NodeEvents] = await self.group.query("events", result_type=list[NodeEvents])
            return any(event.kind == kind for events in heard for event in events.events)

        await eventually(heard, within=within, what=kind)


@pytest.fixture
async def running(
    temporal_server: DevServer, temporal_client: Client, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[Running]:
    state = tmp_path_factory.mktemp("s")
    queue = f"watched-{secrets.token_hex(4)}"
    activities = NodeActivities(temporal_client, [LocalBackend(state, connection=temporal_server.environment)])
    async with (
        nothing_left(LocalJob(state)) as job,
        Worker(
            temporal_client,
            task_queue=queue,
            workflows=[WatchedGroup],
            activities=[*activities.short, *activities.watches],
            max_heartbeat_throttle_interval=timedelta(seconds=1),
        ),
    ):
        owner = await temporal_client.start_workflow(
            WatchedGroup.run, args=[queue, None], id=job.job_id, task_queue=queue
        )
        assert owner.first_execution_run_id
        job.job_first_run_id = owner.first_execution_run_id
        group = await temporal_client.start_workflow(
            WatchedGroup.run, args=[queue, job.watch()], id=job.group_id, task_queue=queue
        )
        yield Running(temporal_client, job, group, owner)
        for handle in (group, owner):
            if (await handle.describe()).close_time is None:
                await handle.terminate()


async def test_the_group_hears_of_its_nodes_and_of_a_loss_without_waiting_for_other_news(
    running: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("perdure.activities.nodes.activities._GATHER", 3600.0)
    job = running.job
    created = await running.group.execute_update(WatchedGroup.create, job.request())  # pyrefly: ignore[no-matching-overload]
    assert isinstance(created, CreatedNode)
    assert Path(created.log_path).name == "output.log"
    await running.until_event("RUNNING")
    await eventually(lambda: job.pids("sleep 600"))
    os.kill(job.pids("-m perdure_launcher")[0], signal.SIGKILL)
    await running.until_event("GONE")
    await running.group.execute_update(WatchedGroup.delete, job.ref())  # pyrefly: ignore[no-matching-overload]
    assert not job.processes()


async def test_a_refusal_is_not_retried(running: Running) -> None:
    job = running.job
    wrong = job.spec.model_copy(update={"workdir": Workdir(path="/no/such")})
    request = job.request()
    refused = await running.group.execute_update(WatchedGroup.create, request.model_copy(update={"spec": wrong}))  # pyrefly: ignore[no-matching-overload]
    assert isinstance(refused, str)
    assert refused.startswith("NodeRefused: workdir.path is '/no/such'")
    elsewhere = job.spec.model_copy(update={"backend": Backend.KUBERNETES})
    refused = await running.group.execute_update(WatchedGroup.create, request.model_copy(update={"spec": elsewhere}))  # pyrefly: ignore[no-matching-overload]
    assert isinstance(refused, str)
    assert "backend is 'kubernetes', which this worker does not serve (it serves local)" in refused


async def test_a_group_acts_for_its_own_nodes_alone(running: Running, tmp_path: Path) -> None:
    """Another workflow, which anyone who reaches Temporal can start, names the nodes of this job."""
    job, other = running.job, LocalJob(running.job.state)
    assert isinstance(await running.group.execute_update(WatchedGroup.create, job.request()), CreatedNode)  # pyrefly: ignore[no-matching-overload]
    await eventually(lambda: job.pids("sleep 600"))
    forger = await running.client.start_workflow(
        WatchedGroup.run,
        args=[(await running.group.describe()).task_queue, job.watch()],
        id=other.group_id,
        task_queue=(await running.group.describe()).task_queue,
    )
    refused = await forger.execute_update(WatchedGroup.create, job.request(1))  # pyrefly: ignore[no-matching-overload]
    assert refused == (
        f"NodeRefused: the workflow {other.group_id} may not request this: "
        f"expected {job.group_id}, found {other.group_id}"
    )
    mixed = other.request().model_copy(update={"node": job.request(1).node})
    assert "may not request this" in str(await forger.execute_update(WatchedGroup.create, mixed))  # pyrefly: ignore[no-matching-overload]
    for stolen in (job.ref(), job.ref().model_copy(update={"namespace": other.spec.namespace, "uid": other.uid})):
        with pytest.raises(WorkflowUpdateFailedError):
            await forger.execute_update(WatchedGroup.delete, stolen)  # pyrefly: ignore[no-matching-overload]
    assert await forger.query("events", result_type=list[NodeEvents]) == []
    assert job.pids("sleep 600"), "the node is untouched"
    await forger.terminate()
    await running.group.execute_update(WatchedGroup.delete, job.ref())  # pyrefly: ignore[no-matching-overload]


async def test_the_watch_tells_that_the_job_has_closed(running: Running) -> None:
    await running.owner.terminate("by the test")

    async def told() -> bool:
        heard = await running.group.query("events", result_type=list[NodeEvents])
        return any(events.owner_closed for events in heard)

    await eventually(told)


async def test_the_watch_tells_that_the_job_was_deleted(
    temporal_server: DevServer, temporal_client: Client, tmp_path: Path
) -> None:
    queue = f"watched-{secrets.token_hex(4)}"
    job = LocalJob(tmp_path)
    activities = NodeActivities(temporal_client, [LocalBackend(tmp_path, connection=temporal_server.environment)])
    async with Worker(temporal_client, task_queue=queue, workflows=[WatchedGroup], activities=[*activities.watches]):
        group = await temporal_client.start_workflow(
            WatchedGroup.run, args=[queue, job.watch(owner_check=0.2)], id=job.group_id, task_queue=queue
        )

        async def told() -> bool:
            heard = await group.query("events", result_type=list[NodeEvents])
            return any(events.owner_closed for events in heard)

        await eventually(told)
        # A group that is gone ends its watch, and a cancelled watch ends too.
        await group.signal(WatchedGroup.close)
        await group.result()
