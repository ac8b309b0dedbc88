"""Tests of archives, with real jobs on a real server: what is kept, and that no place harms a job."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from temporalio.api.common.v1 import WorkflowExecution
from temporalio.api.workflowservice.v1 import DeleteWorkflowExecutionRequest
from temporalio.client import Client as TemporalClient
from temporalio.client import WorkflowFailureError, WorkflowHandle

from perdure.activities.archive import ArchivePlaces
from perdure.base.errors import JobNotFound, PerdureError, Refused
from perdure.base.executions import find
from perdure.client.archive import ArchivedJobs
from perdure.client.client import Client
from perdure.client.connection import Endpoint
from perdure.client.failing_activities import describe_failing, failing_of
from perdure.contract import ArchiveReport, FailureKind, JobPhase, JobStatus
from perdure.contract.archive import archive_folder
from perdure.contract.names import archiver_workflow_id
from perdure.page.report import report
from tests.support.waiting import eventually
from tests.workflows.fleet import Fleet, job_spec, running_fleet, submit
from tests.workflows.jobs import continue_as_new, node, reset, running, status, tasks
from tests.workflows.ways import replayed, sandboxed

Handle = WorkflowHandle[Any, Any]


class StrictFleet(Fleet):
    """Its workers write archives nowhere."""

    archive_places = ArchivePlaces(own_machine=False)


def archived_spec(place: Path | str, nodes: str = "1", **fields: Any) -> dict[str, Any]:
    url = place if isinstance(place, str) else f"file://{place}"
    spec = job_spec(nodes, outputs={"archive": url}, **fields)
    return spec | {"timing": spec["timing"] | {"owner_check": "500ms"}}


def archiver(fleet: Fleet, known: JobStatus) -> WorkflowHandle[Any, ArchiveReport]:
    workflow_id = archiver_workflow_id(f"job/{known.namespace}/{known.name}", known.uid)
    return fleet.client.get_workflow_handle(workflow_id, result_type=ArchiveReport)


async def finished(fleet: Fleet, job: Handle, nodes: int = 1) -> JobStatus:
    """The status of a job whose nodes all finish."""
    await running(job, nodes=nodes)
    for rank in range(nodes):
        newest = fleet.node(job.id, rank)
        await newest.finish()
    await job.result()
    return await status(job)


async def forget(client: TemporalClient, job: Handle) -> None:
    """Deletes a job as Temporal's retention does."""
    await client.workflow_service.delete_workflow_execution(
        DeleteWorkflowExecutionRequest(
            namespace=client.namespace, workflow_execution=WorkflowExecution(workflow_id=job.id)
        )
    )
    ours = client_of(client)

    async def is_gone() -> bool:
        try:
            await ours.describe(job.id.rpartition("/")[2])
        except JobNotFound:
            return True
        return False

    await eventually(is_gone, what=f"{job.id} is gone")


def client_of(temporal: TemporalClient) -> Client:
    endpoint = Endpoint(address=temporal.service_client.config.target_host, namespace=temporal.namespace)
    return Client(temporal=temporal, endpoint=endpoint)


@pytest.mark.long("workflows")
@replayed
async def test_a_job_that_temporal_has_forgotten_is_told_by_its_archive(fleet: Fleet, tmp_path: Path):
    job = await submit(fleet, archived_spec(tmp_path / "kept", "2", env={"COLOR": "red"}))
    await running(job, nodes=2)
    await (await node(fleet, job, 1)).rank_dies()
    await running(job, nodes=2, generation=2)
    known = await finished(fleet, job, 2)
    kept = await archiver(fleet, known).result()
    folder = archive_folder(f"file://{tmp_path}/kept", "default", known.name, known.uid)
    assert known.archive == folder == kept.folder
    assert (kept.problem, kept.complete_at is not None) == ("", True)
    told = await client_of(fleet.client).incidents(known.name)
    await forget(fleet.client, job)
    async with ArchivedJobs(f"file://{tmp_path}/kept") as jobs:
        found = await jobs.status(known.name)
        assert (found.phase, found.reason, found.generation) == (known.phase, known.reason, known.generation)
        assert await jobs.incidents(known.name) == told
        assert [one.rank for one in await jobs.nodes(known.name)] == [0, 1]
        assert (await jobs.describe(known.name)).phase is JobPhase.SUCCEEDED
        record = await jobs.archived(known.name)
        assert record.spec["env"] == {"COLOR": "red"}
        page = await report(jobs, known.name)
        with pytest.raises(Refused, match="no role ps; its roles are: worker"):
            await jobs.status(known.name, role="ps")
        with pytest.raises(Refused, match="cannot be changed"):
            await jobs.scale(known.name, 2)
    assert "node 1" in page
    assert (tmp_path / "kept" / "default" / known.name / known.uid / "report.html").read_text().startswith("<!doctype")
    tokens = {played.request.node.token for played in fleet.nodes.values()}
    written = b"".join(path.read_bytes() for path in (tmp_path / "kept").rglob("*") if path.is_file())
    assert tokens
    assert not [token for token in tokens if token.encode() in written], "tokens of nodes are secrets"


async def test_a_place_that_cannot_be_written_is_told_while_the_job_trains_and_used_once_it_can(
    fleet: Fleet, tmp_path: Path
):
    place = tmp_path / "kept"
    place.write_text("a file where a folder should be")
    job = await submit(fleet, archived_spec(place))
    known = await running(job, nodes=1)
    client, name = client_of(fleet.client), known.name

    async def fails() -> bool:
        found = await find(fleet.client, archiver(fleet, known).id)
        return found is not None and bool(await failing_of(fleet.client, found))

    await eventually(fails)
    [words] = describe_failing(await client.failing_activities(name))
    assert str(place) in words
    assert "cannot be written" in words
    known = await finished(fleet, job)
    assert known.phase is JobPhase.SUCCEEDED
    place.unlink()
    kept = await archiver(fleet, known).result()
    assert (kept.problem, kept.begun_at, kept.complete_at is not None) == ("", None, True)
    async with ArchivedJobs(f"file://{place}") as jobs:
        assert (await jobs.status(name)).uid == known.uid


async def test_a_place_that_the_site_does_not_allow_is_told_at_once_and_the_job_succeeds(
    temporal_client: TemporalClient, tmp_path: Path
):
    async with running_fleet(temporal_client, fleet_type=StrictFleet) as fleet:
        job = await submit(fleet, archived_spec(tmp_path / "kept"))
        await running(job, nodes=1)
        client = client_of(fleet.client)
        known = await status(job)

        async def problem() -> str:
            return (await client.archive(known)).problem

        words = await eventually(problem)
        assert words.endswith("this site lets its workers write archives to no place (archive_places)")
        known = await finished(fleet, job)
        assert known.phase is JobPhase.SUCCEEDED
        assert (await archiver(fleet, known).result()).problem == words
        assert not (tmp_path / "kept").exists()


@sandboxed
async def test_a_job_that_was_terminated_is_archived_as_it_was(fleet: Fleet, tmp_path: Path):
    job = await submit(fleet, archived_spec(tmp_path / "kept"))
    known = await running(job, nodes=1)
    await job.terminate("by an operator")
    assert (await archiver(fleet, known).result()).problem == ""
    async with ArchivedJobs(f"file://{tmp_path}/kept") as jobs:
        found = await jobs.status(known.name)
        assert (found.phase, found.nodes) == (JobPhase.CANCELLED, 1)
        assert "terminated" in found.reason


async def test_a_job_that_has_ended_and_is_reset_to_a_later_task_is_archived_as_it_ends_then(
    fleet: Fleet, tmp_path: Path
):
    job = await submit(fleet, archived_spec(tmp_path / "kept", retry={"max_restarts": 0}))
    known = await running(job, nodes=1)
    trains = (await tasks(job))[-1]
    await (await node(fleet, job, 0)).fail(kind=FailureKind.COMMAND, exit_code=1)
    with pytest.raises(WorkflowFailureError):
        await job.result()
    await archiver(fleet, known).result()
    fleet.nodes.clear()
    await reset(job, to=trains, reapply=False)
    job = fleet.client.get_workflow_handle(job.id)
    played = await node(fleet, job, 0)
    await eventually(lambda: played.entered == 1, what="the new node is in the world")
    known = await finished(fleet, job)
    assert known.phase is JobPhase.SUCCEEDED
    await archiver(fleet, known).result()
    async with ArchivedJobs(f"file://{tmp_path}/kept") as jobs:
        assert (await jobs.status(known.name)).phase is JobPhase.SUCCEEDED


@pytest.mark.long("workflows")
async def test_a_later_job_of_the_name_does_not_take_its_place(fleet: Fleet, tmp_path: Path):
    place = tmp_path / "kept"
    place.write_text("a file where a folder should be")
    spec = archived_spec(place)
    earlier = await finished(fleet, await submit(fleet, spec))
    job = await submit(fleet, spec)
    later = await running(job, nodes=1)
    assert later.uid != earlier.uid
    place.unlink()
    await archiver(fleet, earlier).result()
    [folder] = [folder for folder in (place / "default" / spec["name"]).iterdir() if folder.name == earlier.uid]
    record = json.loads((folder / "job.json").read_text())
    assert (record["uid"], record["phase"]) == (earlier.uid, "SUCCEEDED")
    assert record["roles"]["worker"]["status"]["uid"] == earlier.uid
    await finished(fleet, job)
    await archiver(fleet, later).result()
    async with ArchivedJobs(f"file://{place}") as jobs:
        assert (await jobs.status(spec["name"])).uid == later.uid, "the newest run is read"


@pytest.mark.long("workflows")
async def test_a_run_that_continues_as_new_starts_no_second_archive(fleet_of_short_runs: Fleet, tmp_path: Path):
    fleet = fleet_of_short_runs
    job = await submit(fleet, archived_spec(tmp_path / "kept"))
    job = fleet.client.get_workflow_handle(job.id)
    await running(job, nodes=1)
    await (await node(fleet, job, 0)).rank_dies()
    await running(job, nodes=1, generation=2)
    await continue_as_new(job)
    known = await finished(fleet, job)
    assert (await archiver(fleet, known).result()).complete_at is not None
    async with ArchivedJobs(f"file://{tmp_path}/kept") as jobs:
        assert [one.number for one in await jobs.incidents(known.name)] == [1]


async def test_a_job_without_a_place_and_without_notifications_starts_nothing(fleet: Fleet):
    job = await submit(fleet, job_spec("1"))
    known = await finished(fleet, job)
    assert known.archive == ""
    events = [event async for event in job.fetch_history_events()]
    children = [
        event.start_child_workflow_execution_initiated_event_attributes.workflow_id
        for event in events
        if event.HasField("start_child_workflow_execution_initiated_event_attributes")
    ]
    assert not [child for child in children if child.endswith("/archive")]
    activities = [
        event.activity_task_scheduled_event_attributes.activity_type.name
        for event in events
        if event.HasField("activity_task_scheduled_event_attributes")
    ]
    assert activities
    assert "notify" not in activities
    assert await client_of(fleet.client).archive(known) == ArchiveReport()


@pytest.mark.parametrize(
    ("url", "is_allowed"),
    [
        ("s3://kept/jobs", True),
        ("s3://kept/jobs/nlp", True),
        ("s3://kept/jobs-of-others", False),
        ("s3://kept/jobs/../other", False),
        ("s3://other/jobs", False),
        ("gs://kept/jobs", False),
        ("simplecache::s3://kept/jobs", False),
        ("s3://kept/jobs?versionId=1", False),
        ("s3://kept/jobs?", False),
        ("s3://kept/jobs#", False),
        ("s3://kept/jo\tbs", False),
        ("file:///srv/ke\tpt", False),
        ("file:///etc", False),
        ("file:///srv/kept/a", True),
    ],
)
def test_a_site_names_the_places_below_which_its_workers_write(url: str, is_allowed: bool):
    places = ArchivePlaces(own_machine=False, places=("s3://kept/jobs/", "file:///srv/kept"))
    assert (places.problem(url) == "") is is_allowed
    assert ArchivePlaces(own_machine=True).problem(url) == "", "users run what they like there anyway"


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("{", "is not the archive of a job"),
        ('{"format": 99}', "is not the archive of a job"),
    ],
)
async def test_what_is_no_archive_is_refused(tmp_path: Path, content: str, words: str):
    folder = tmp_path / "default" / "a" / "0a1b2c3d"
    folder.mkdir(parents=True)
    (folder / "job.json").write_text(content)
    async with ArchivedJobs(f"file://{tmp_path}") as jobs:
        with pytest.raises(PerdureError, match=words):
            await jobs.status("a")
        with pytest.raises(JobNotFound, match='no archive of a job "b"'):
            await jobs.status("b")
