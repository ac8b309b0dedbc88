"""What `perdure history` shows, and what `perdure doctor` says of the recording."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from temporalio.api.enums.v1 import PendingActivityState, WorkflowExecutionStatus
from temporalio.api.failure.v1 import Failure
from temporalio.api.workflow.v1 import PendingActivityInfo
from temporalio.api.workflowservice.v1 import DescribeWorkflowExecutionResponse
from temporalio.client import Client
from typer.testing import CliRunner, Result

import perdure
from perdure.activities.history.activities import keeping_history
from perdure.activities.history.settings import HistorySettings
from perdure.activities.history.store import HistoryStore
from perdure.base.executions import ExecutionDescription
from perdure.cli.checks import Verdict, check_history
from perdure.cli.main import app
from perdure.client.connection import Endpoint
from perdure.contract.names import recorder_workflow_id
from tests.activities.history.played_jobs import jobs_are_played
from tests.activities.history.stored import FAILED, incident, record, shape, status
from tests.support.temporal_server import DevServer
from tests.support.waiting import eventually

NOW = datetime.now(UTC)


@pytest.fixture
async def queue(
    temporal_client: Client, temporal_server: DevServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> AsyncGenerator[str]:
    """A worker with a history of three jobs, as the command finds it."""
    url = f"sqlite:///{tmp_path / 'history.db'}"
    store = HistoryStore(url, tenant=temporal_client.namespace)
    store.prepare()
    alike = shape(team="nlp")
    failures = [
        incident(1, timedelta(minutes=9)),
        incident(2, timedelta(minutes=20), failure="NETWORK", host="[gpu-8]"),
    ]
    store.write(record("llama", like=alike, began=NOW - timedelta(days=2)))
    store.write(
        record(
            "llama-long", like=alike, began=NOW - timedelta(days=1), answers=status(generation=3), incidents=failures
        )
    )
    store.write(
        record("other", like=shape("acme/other:1", "python x.py"), ended=FAILED, began=NOW - timedelta(days=40))
    )
    store.close()
    async with jobs_are_played(temporal_client) as queue:
        for variable, value in temporal_server.environment.items():
            monkeypatch.setenv(variable, value)
        monkeypatch.setenv("PERDURE_TASK_QUEUE", queue)
        async with keeping_history(temporal_client, HistorySettings(url=url), task_queue=queue):
            yield queue
        await temporal_client.get_workflow_handle(recorder_workflow_id(queue)).terminate()


async def history(*options: str) -> str:
    result = await asyncio.to_thread(CliRunner().invoke, app, ["history", *options], None, {"COLUMNS": "200"})
    assert result.exit_code == 0, (result.output, result.exception)
    return result.output


def first_column(table: str) -> list[str]:
    return [line.split()[0] for line in table.splitlines() if line.strip()]


async def test_a_client_asks_it_too(queue: str) -> None:
    client = perdure.Client()
    answer: perdure.HistoryAnswer = await client.history(perdure.HistoryRequest(namespace="nlp", like="llama"))
    assert [job.name for job in answer.jobs] == ["llama-long", "llama"]
    assert {host.host for host in answer.hosts} >= {"[gpu-8]"}
    assert (await client.history()).found == 3
    with pytest.raises(perdure.Refused, match='the history has no job named "gpt"'):
        await client.history(perdure.HistoryRequest(like="gpt"))


async def test_it_shows_jobs_that_temporal_does_not_know(queue: str, tmp_path: Path) -> None:
    shown = await history("-n", "nlp", "--price", "2")
    assert first_column(shown) == ["NAME", "llama-long", "llama", "other"]
    assert first_column(await history("-A", "--since", "30d"))[1:] == ["llama-long", "llama"]
    assert "no such jobs" in await history()
    assert "2 of 3 jobs" in await history("-n", "nlp", "--limit", "2")
    job = json.loads(await history("-n", "nlp", "-o", "json"))["jobs"][1]
    assert (job["name"], job["node_hours"], job["shape"]["labels"]) == ("llama", 4.0, {"team": "nlp"})
    assert "8.00" in shown

    like = await history("-n", "nlp", "--like", "llama")
    assert first_column(like)[1:] == ["llama-long", "llama"]
    assert "3 of 3" in like
    spec = tmp_path / "job.yaml"
    spec.write_text(
        "name: new\nbackend: kubernetes\nroles:\n"
        "  trainer: {nodes: 2, image: 'acme/llama:1', command: [torchrun, train.py, --lr, '3']}\n"
    )
    assert "2 of 3" in await history("-n", "nlp", "-f", str(spec))

    hosts = await history("-n", "nlp", "--failures-by-host")
    assert first_column(hosts)[1:] == ["[gpu-8]", "gpu-7"]
    assert "NETWORK 1" in hosts
    [_, needs] = (await history("-n", "nlp", "--image", "acme/llama")).splitlines()
    assert needs.split()[0] == "acme/llama:1"
    assert "torchrun train.py --lr" in needs
    assert "100%" in needs


async def test_what_it_cannot_answer_is_said(queue: str) -> None:
    async def error(*options: str) -> str:
        result = await asyncio.to_thread(CliRunner().invoke, app, ["history", *options])
        assert result.exception is not None
        return str(result.exception)

    assert 'no job named "nobody"' in await error("-n", "nlp", "--like", "nobody")
    assert "expected a time such as" in await error("--since", "yesterday")
    assert "give one of them" in await error("--like", "a", "-f", "b")


async def test_doctor_says_whether_jobs_are_recorded(temporal_client: Client, queue: str) -> None:
    endpoint = Endpoint(address="", task_queue=queue)

    async def records() -> bool:
        found = await check_history(temporal_client, endpoint)
        return found is not None and found.verdict is Verdict.OK

    await eventually(records)
    assert await check_history(temporal_client, Endpoint(address="", task_queue="another")) is None


@pytest.mark.parametrize(("heard", "verdict"), [(30, Verdict.OK), (-30, Verdict.WARNING)])
async def test_doctor_warns_of_a_recording_that_was_begun_again_and_is_silent(
    monkeypatch: pytest.MonkeyPatch, heard: float, verdict: Verdict
) -> None:
    recording = PendingActivityInfo(
        state=PendingActivityState.PENDING_ACTIVITY_STATE_STARTED,
        attempt=2,
        last_failure=Failure(message="activity Heartbeat timeout"),
    )
    recording.last_started_time.FromDatetime(NOW)
    recording.last_heartbeat_time.FromDatetime(NOW + timedelta(seconds=heard))
    response = DescribeWorkflowExecutionResponse(pending_activities=[recording])
    response.workflow_execution_info.status = WorkflowExecutionStatus.WORKFLOW_EXECUTION_STATUS_RUNNING
    described = ExecutionDescription(response.workflow_execution_info, response)

    async def find(*_: Any, **__: Any) -> ExecutionDescription:
        return described

    monkeypatch.setattr("perdure.cli.checks.find", find)
    client: Any = None
    check = await check_history(client, Endpoint(address="", task_queue="queue"))
    assert check is not None
    assert check.verdict is verdict
    assert ("Heartbeat timeout" in check.detail) is (verdict is Verdict.WARNING)


@pytest.fixture
def file(queue: str, temporal_client: Client, tmp_path: Path) -> Path:
    """A job that leaves its resources to jobs of the past, of which there is one."""
    store = HistoryStore(f"sqlite:///{tmp_path / 'history.db'}", tenant=temporal_client.namespace)
    used = status(peaks=perdure.Peaks(watched=7200.0, memory=20 * 2**30, cpu=6.0), nodes=8)
    store.write(record("llama-measured", like=shape(team="nlp"), began=NOW, answers=used))
    store.close()
    file = tmp_path / "job.yaml"
    file.write_text(
        "name: job\nnamespace: nlp\nbackend: kubernetes\nlabels: {team: nlp}\nroles:\n  trainer: {nodes: auto, "
        "image: 'acme/llama:1', command: [torchrun, train.py, --lr, '1'], resources: auto}\n"
    )
    return file


CHOSEN = "trainer: 4 nodes with 7 processors and 23Gi of memory for each node, from a job like it: llama-measured"


async def shown(*arguments: str) -> Result:
    result = await asyncio.to_thread(CliRunner().invoke, app, [*arguments], None, {"COLUMNS": "200"})
    assert result.exit_code == 0, (result.output, result.exception)
    return result


async def test_a_plan_of_a_file_shows_what_jobs_of_the_past_make_of_it(file: Path) -> None:
    assert (await shown("plan", str(file))).output.startswith(CHOSEN)
    [chosen] = json.loads((await shown("plan", str(file), "-o", "json")).output)
    assert (chosen["memory"], chosen["jobs"], chosen["measured"]) == ("23Gi", ["llama-measured"], 1)


async def test_what_jobs_of_the_past_make_of_a_file_is_shown_before_it_starts(file: Path) -> None:
    assert f"{file}: {CHOSEN}" in (await shown("validate", str(file))).output
    [report] = json.loads((await shown("validate", str(file), "-o", "json")).output)
    assert [one["memory"] for one in report["auto"]] == ["23Gi"]
    for command in ("submit", "run"):
        dry = await shown(command, str(file), "--dry-run")
        assert CHOSEN in dry.stderr
        file.write_text(dry.stdout)
    assert f"{file}: {CHOSEN}" in (await shown("validate", str(file))).output
