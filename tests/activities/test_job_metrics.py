"""Tests of the metrics of jobs: from decisions, and from the server's list."""

from __future__ import annotations

from datetime import timedelta
from typing import Any, cast
from uuid import uuid4

from temporalio.client import Client

from perdure.activities.job_metrics import JobMetrics
from perdure.contract.datasets import DatasetParameters
from perdure.contract.names import TRAINING_JOB
from perdure.workflows.policy.record.job_events import events_between
from perdure.workflows.policy.services.datasets import DatasetState
from perdure.workflows.policy.state.job import JobState
from tests.policy.job_of_roles import Roles
from tests.policy.scenario import Scenario
from tests.support.exported import values
from tests.support.waiting import eventually


class NoServer:
    """A client whose server is away."""

    namespace = "default"

    @property
    def workflow_service(self) -> Any:
        raise ConnectionError("api_key=topsecret: no answer")


def take(metrics: JobMetrics, before: JobState, job: Scenario) -> None:
    for event in events_between(before, job.whole, job.now):
        metrics.on_event(job.whole, event)


async def test_a_repair_is_counted_by_its_cause_and_measured() -> None:
    metrics = JobMetrics(cast("Client", NoServer()), zero_for=timedelta())
    job = Scenario("2").running()
    before = job.whole
    job.rank_raised(1, error="RuntimeError: password=hunter2, token ghp_0123456789abcdefghij")
    job.ready(0, 1, after=1)
    job.steps(0, 1)
    take(metrics, before, job)
    text = await metrics.text()
    found = values(text)
    name = (job.state.namespace, job.state.name)
    assert found["perdure_job_restarts_total", *name, "worker", "USER_CODE"] == 1
    assert found["perdure_job_generation", *name, "worker"] == 2
    assert found["perdure_job_notice_seconds_count", "USER_CODE"] == 1
    assert found["perdure_job_repair_seconds_count", "USER_CODE"] == 1
    assert found[("perdure_listing_failures_total",)] == 1
    assert not any(secret in text.decode() for secret in ("hunter2", "ghp_", "topsecret"))


async def test_the_end_and_replaced_nodes_are_counted() -> None:
    metrics = JobMetrics(cast("Client", NoServer()), zero_for=timedelta())
    job = Scenario("2").running()
    before = job.whole
    job.lost(1)
    take(metrics, before, job)
    other = Scenario("2").running()
    before = other.whole
    other.finish(0, 1)
    other.command_ended(0, 1)
    take(metrics, before, other)
    found = values(await metrics.text())
    assert found["perdure_job_relaunches_total", job.state.namespace, job.state.name, "worker"] == 1
    assert found["perdure_jobs_ended_total", job.state.namespace, "SUCCEEDED"] == 1


async def test_a_restart_is_counted_for_the_role_that_has_failed() -> None:
    metrics = JobMetrics(cast("Client", NoServer()), zero_for=timedelta())
    job = Roles(trainer={}, ps={"ready": {"port": 6000}}).runs("ps", "trainer")
    before = job.state
    job.rank_killed("ps", 0).runs("ps")
    for event in events_between(before, job.state, job.now):
        metrics.on_event(job.state, event)
    found = values(await metrics.text())
    of_job = {key: value for key, value in found.items() if key[1:3] == ("default", "job") and "listing" not in key[0]}
    assert of_job == {
        ("perdure_job_restarts_total", "default", "job", "ps", "KILLED"): 1,
        ("perdure_job_generation", "default", "job", "ps"): 2,
    }


async def test_the_backlog_of_a_dataset_is_told() -> None:
    metrics = JobMetrics(cast("Client", NoServer()), zero_for=timedelta())
    parameters = DatasetParameters(size=1_000, shard_size=10)
    metrics.on_dataset("job/nlp/llama", "train", DatasetState(parameters=parameters, next=300, aside=((40, 50),)))
    found = values(await metrics.text())
    assert found["perdure_dataset_samples_done", "nlp", "llama", "train"] == 290
    assert found["perdure_dataset_samples_left", "nlp", "llama", "train"] == (parameters.end or 0) - 290
    assert found["perdure_dataset_samples_set_aside", "nlp", "llama", "train"] == 10


async def test_open_jobs_are_listed_by_the_server(temporal_client: Client) -> None:
    name = f"listed-{uuid4().hex[:8]}"
    handle = await temporal_client.start_workflow(
        TRAINING_JOB, {}, id=f"job/nlp/{name}", task_queue=f"nobody-{uuid4().hex}"
    )
    try:

        async def phases() -> list[tuple[str, ...]]:
            found = values(await JobMetrics(temporal_client).text())
            return [key for key in found if key[:3] == ("perdure_job_phase", "nlp", name)]

        assert await eventually(phases) == [("perdure_job_phase", "nlp", name, "UNKNOWN")]
    finally:
        await handle.terminate()
