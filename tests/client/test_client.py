"""Tests of the client with real jobs: how they start, what they report, and every way in which they end."""

from __future__ import annotations

import asyncio
import shutil
from inspect import isfunction, signature
from pathlib import Path
from typing import Any

import pytest
from temporalio.client import Client as TemporalClient

import perdure
from perdure.base.errors import ExitCode, JobAlreadyRunning, JobNotFound, LogsUnavailable, NoWorker, Refused
from perdure.client.client import Client
from perdure.client.submission import start_job
from perdure.client.sync import SyncClient
from perdure.client.views import JobSnapshot, closed
from perdure.contract import JobPhase
from perdure.contract.names import TRAINING_JOB, WORKER_TASK_QUEUE, job_workflow_id
from perdure.spec.errors import SpecError
from perdure.spec.validate import parse_spec
from perdure.worker import running_worker
from tests.support.command_line import STEPS
from tests.support.temporal_server import dev_server
from tests.support.waiting import eventually


def job(name: str, script: str, **fields: Any) -> dict[str, Any]:
    return {"name": name, "roles": {"worker": {"nodes": 1, "command": ["sh", "-c", script]}}, **fields}


async def running(client: Client, name: str) -> JobSnapshot:
    """The first snapshot in which the job runs."""
    async with asyncio.timeout(120):
        async for snapshot in client.watch(name):
            if snapshot.status and snapshot.status.phase is JobPhase.RUNNING:
                return snapshot
    raise AssertionError("it ended before it ran")


async def test_a_job_from_submit_to_result(client: Client, job_name: str) -> None:
    submission = await client.submit(job(job_name, "sleep 1; echo trained"))
    assert submission.workflow_id == f"job/default/{job_name}"
    snapshots = [snapshot async for snapshot in client.watch(job_name)]
    assert all(snapshot.result is None for snapshot in snapshots[:-1])
    last = snapshots[-1]
    assert last.result is not None
    assert last.status is not None
    assert last.result.phase is last.status.phase is JobPhase.SUCCEEDED
    result = await client.wait(job_name)
    assert (result.phase, result.exit_code) == (JobPhase.SUCCEEDED, ExitCode.OK)
    status = await client.status(job_name)
    assert status.phase is JobPhase.SUCCEEDED
    assert [line.text async for line in client.logs(job_name)] == ["trained"]
    (listed,) = [job for job in await client.list() if job.name == job_name]
    assert listed.phase is JobPhase.SUCCEEDED
    assert listed.owner


async def test_a_file_is_submitted_as_it_is_and_logs_that_were_deleted_are_not_just_empty(
    client: Client, job_name: str, tmp_path: Path
) -> None:
    path = tmp_path / "job.yaml"
    path.write_text(f"name: x\nroles: {{worker: {{nodes: 1, command: [sh, -c, 'pwd']}}}}\nlabels: {{a: {job_name}}}\n")
    submission = await client.submit(path, overrides={"name": job_name})
    assert submission.name == job_name
    assert (await client.wait(job_name)).phase is JobPhase.SUCCEEDED
    assert [line.text async for line in client.logs(job_name)] == [str(tmp_path)]
    for folder in (tmp_path / "nodes").iterdir():
        shutil.rmtree(folder)
    with pytest.raises(LogsUnavailable, match=f"no log of {job_name} is on this machine") as gone:
        _ = [line async for line in client.logs(job_name)]
    assert "outputs.logs" in gone.value.remedy


async def test_a_failed_script_is_exit_code_1(client: Client, job_name: str) -> None:
    await client.submit(job(job_name, "exit 7", retry={"max_restarts": 1}))
    result = await client.wait(job_name)
    assert (result.phase, result.exit_code) == (JobPhase.FAILED, ExitCode.USER_CODE)
    incidents = await client.incidents(job_name)
    assert incidents
    assert incidents[-1].culprit == 0


async def test_a_running_name_is_taken_until_the_job_is_cancelled(client: Client, job_name: str) -> None:
    await client.submit(job(job_name, f"{STEPS}; sleep 600"))
    assert [node.rank for node in (await running(client, job_name)).nodes] == [0]
    with pytest.raises(JobAlreadyRunning, match=job_name) as taken:
        await client.submit(job(job_name, "true"))
    assert f"perdure cancel {job_name}" in taken.value.remedy
    news = client.news(job_name)
    await client.cancel(job_name)
    heard = [one async for one in news]
    assert heard, "also of what has happened before"
    assert (await client.describe(job_name)).finished_at
    result = await client.wait(job_name)
    assert (result.phase, result.exit_code) == (JobPhase.CANCELLED, ExitCode.CANCELLED)
    with pytest.raises(Refused, match="has ended as CANCELLED"):
        await client.cancel(job_name)
    await client.submit(job(job_name, "true"))
    assert (await client.wait(job_name)).phase is JobPhase.SUCCEEDED, "of the second run"


async def test_nodes_are_refreshed_by_their_agents_reports_until_temporal_terminates_the_job(
    client: Client, temporal_client: TemporalClient, job_name: str
) -> None:
    await client.submit(job(job_name, f"{STEPS}; sleep 600"))
    snapshot = await running(client, job_name)
    assert snapshot.status
    bare = [node.replace(progress=None, metrics=None) for node in snapshot.nodes]

    async def refreshed() -> bool:
        assert snapshot.status
        (node,) = await client.refreshed(bare, snapshot.status.groups)
        return node.progress is not None and node.phase == bare[0].phase

    await eventually(refreshed)
    handle = temporal_client.get_workflow_handle(job_workflow_id("default", job_name))
    await handle.terminate(reason="the budget is spent")
    result = await client.wait(job_name)
    assert (result.phase, result.exit_code) == (JobPhase.CANCELLED, ExitCode.CANCELLED)
    assert "the budget is spent" in result.reason
    shown = closed(await client.status(job_name), await client.describe(job_name))
    assert shown.phase is JobPhase.CANCELLED
    assert "ended in Temporal" in shown.reason


async def test_requests_are_accepted_or_refused_in_words(client: Client, job_name: str) -> None:
    await client.submit(job(job_name, f"{STEPS}; sleep 600"))
    await running(client, job_name)
    await an_unknown_name_is_refused_with_the_nearest(client, job_name)
    await an_unknown_role_is_refused_with_those_that_the_job_has(client, job_name)
    assert "2" in (await client.scale(job_name, 2)).message
    with pytest.raises(Refused, match="nodes: got"):
        await client.scale(job_name, "none")
    with pytest.raises(Refused, match="not suspended"):
        await client.resume(job_name)
    with pytest.raises(Refused, match="rank: got 99"):
        await client.relaunch_node(job_name, 99)
    assert "node 0 is being replaced" in (await client.relaunch_node(job_name, 0, role="worker")).message
    assert (await client.suspend(job_name, reason="lunch")).message
    await client.cancel(job_name)
    await client.wait(job_name)


async def an_unknown_name_is_refused_with_the_nearest(client: Client, name: str) -> None:
    with pytest.raises(JobNotFound) as unknown:
        await client.status(name[:-1])
    assert name in unknown.value.remedy
    with pytest.raises(JobNotFound) as elsewhere:
        await client.nodes(name, namespace="other")
    assert "-n default" in elsewhere.value.remedy
    with pytest.raises(JobNotFound):
        await anext(client.news(f"{name}-unknown"))


async def an_unknown_role_is_refused_with_those_that_the_job_has(client: Client, name: str) -> None:
    assert [node.rank for node in await client.nodes(name, role="worker")] == [0]
    for request in (
        client.status(name, role="trainer"),
        client.nodes(name, role="trainer"),
        client.scale(name, 2, role="trainer"),
        client.relaunch_node(name, 0, role="trainer"),
        anext(client.logs(name, role="trainer")),
    ):
        with pytest.raises(Refused, match='role: got "trainer"; this job has the role "worker"') as refused:
            await request
        assert refused.value.exit_code == ExitCode.USAGE
    known = await client.status(name)
    assert (known.phase, known.generation) == (JobPhase.RUNNING, 1)


async def test_a_wrong_specification_never_starts(client: Client, job_name: str) -> None:
    with pytest.raises(SpecError, match='did you mean "nodes"'):
        await client.submit({"name": job_name, "roles": {"worker": {"nods": 1, "command": ["true"]}}})
    with pytest.raises(JobNotFound):
        await client.status(job_name)


async def test_a_wrong_specification_by_plain_json_ends_with_the_same_words(
    client: Client, temporal_client: TemporalClient, job_name: str
) -> None:
    await temporal_client.start_workflow(
        TRAINING_JOB, {"name": job_name}, id=job_workflow_id("default", job_name), task_queue=WORKER_TASK_QUEUE
    )
    with pytest.raises(Refused, match="roles: missing"):
        await client.wait(job_name)


async def test_the_servers_summary_of_a_job_has_no_secrets(temporal_client: TemporalClient, job_name: str) -> None:
    command = ["torchrun", "t.py", "--token", "hunter2"]
    spec = parse_spec({"name": job_name, "roles": {"worker": {"nodes": 1, "command": command}}})
    workflow_id = job_workflow_id("default", job_name)
    handle = await start_job(temporal_client, spec, workflow_id, task_queue=job_name, again=False, memo={})
    assert await (await handle.describe()).static_summary() == "1 node: `torchrun t.py --token [redacted]`"
    await handle.terminate()


async def test_without_a_worker_the_server_tells_what_it_knows(job_name: str) -> None:
    async with dev_server() as server:
        client = Client(temporal=await server.client())
        await client.submit(job(job_name, "true"))
        with pytest.raises(NoWorker, match="no worker answers"):
            await client.status(job_name)
        summary = await client.describe(job_name)
        assert (summary.name, summary.phase, summary.backend) == (job_name, None, "local")
        snapshots = client.watch(job_name)
        # Before the server has given up waiting for one, nothing is known but that there is no answer.
        while (problem := (await anext(snapshots)).problem).endswith("have not answered for seconds"):
            pass
        assert "no worker answers" in problem
        await snapshots.aclose()


async def test_a_namespace_without_search_attributes_gets_them_from_its_worker(
    temporal_client: TemporalClient, job_name: str, tmp_path: Path
) -> None:
    from temporalio.api.workflowservice.v1 import RegisterNamespaceRequest

    from perdure.client.search_attributes import SEARCH_ATTRIBUTES, missing_search_attributes

    request = RegisterNamespaceRequest(namespace=job_name)
    request.workflow_execution_retention_period.FromSeconds(86400)
    await temporal_client.workflow_service.register_namespace(request)
    config = temporal_client.config()
    bare = TemporalClient(**dict[str, Any](config, namespace=job_name))

    async def submitted() -> bool:
        try:
            assert set(await missing_search_attributes(bare)) == set(SEARCH_ATTRIBUTES)
            # A job can be submitted before any worker has run.
            await Client(temporal=bare).submit(job(job_name, "true"))
        except Refused:
            # A new namespace is not known everywhere at once.
            return False
        return True

    await eventually(submitted)
    async with running_worker(bare) as facts:
        assert facts.search_attributes
        assert await missing_search_attributes(bare) == {}


def test_the_synchronous_face(temporal_server: Any, monkeypatch: pytest.MonkeyPatch, job_name: str) -> None:
    for variable, value in temporal_server.environment.items():
        monkeypatch.setenv(variable, value)
    with SyncClient(namespace=job_name) as client:
        assert client.list() == []
        with pytest.raises(JobNotFound):
            client.describe("nothing")


def test_the_synchronous_client_has_the_methods_of_the_other_one() -> None:
    methods = {name: method for name, method in vars(Client).items() if isfunction(method) and not name.startswith("_")}
    for name, method in methods.items():
        assert signature(getattr(SyncClient, name)).parameters == signature(method).parameters
    assert signature(SyncClient.watch).return_annotation == "Iterator[JobSnapshot]"


def test_the_package_offers_its_names_without_importing_them() -> None:
    assert perdure.Client is Client
    assert perdure.SyncClient is SyncClient
    assert perdure.SpecError is SpecError
    assert perdure.__version__
    with pytest.raises(AttributeError, match="no attribute 'Cleint'"):
        _ = perdure.Cleint  # type: ignore[attr-defined]
