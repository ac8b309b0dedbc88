"""Attacks of another user of the same machine on the embedded control plane, whose server serves any local process.

They use Temporal's own command line under another uid, and what it reads.
"""

from __future__ import annotations

import json
import os
import secrets
import stat
import sys
from base64 import b64decode, b64encode
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from temporalio import workflow
from temporalio.api.common.v1 import Payload, WorkflowExecution
from temporalio.api.query.v1 import WorkflowQuery
from temporalio.api.workflowservice.v1 import ListWorkflowExecutionsRequest, QueryWorkflowRequest
from temporalio.client import Client as TemporalClient
from temporalio.client import WorkflowFailureError
from temporalio.common import RawValue, RetryPolicy
from temporalio.exceptions import ActivityError, ApplicationError
from temporalio.service import RPCError
from temporalio.worker import UnsandboxedWorkflowRunner, Worker

from perdure.base.encryption.codec import ENCRYPTED, REFUSED_PAYLOAD
from perdure.base.errors import Refused
from perdure.base.state_folder import StateFolder
from perdure.client.client import Client
from perdure.contract import JobPhase
from perdure.contract.names import ASK_NODE, NODE_GROUP, TRAINING_JOB, WORKDIR_UPLOAD, job_workflow_id
from perdure.local import control_plane as module
from perdure.local.control_plane import LocalControlPlane
from tests.support.command_line import Finished, end_nodes
from tests.support.other_user import OtherUser, other_user
from tests.system.site import Job, Site

PASSWORD = f"hunter2-{secrets.token_hex(8)}"
ARGUMENT = f"argument-{secrets.token_hex(8)}"


@pytest.fixture(scope="module")
def attacker(control_plane: LocalControlPlane) -> Iterator[OtherUser]:
    server = control_plane.status().server
    assert server is not None
    with other_user(server.address) as user:
        yield user


@pytest.fixture
async def job(site: Site) -> Job:
    """A job with a secret in its environment and in its command, which runs until the test lets it end."""
    wait = (
        "import os, sys, time\nfrom perdure_training import report\nreport(step=1)\n"
        "while not os.path.exists(sys.argv[1] + '/finish'): time.sleep(0.1)"
    )
    name = f"secret-{secrets.token_hex(3)}"
    command = [sys.executable, "-c", wait]
    job = await site.submit(name=name, nodes="1", command=["sh", "-c", ":"], **_spec(site, name, command))
    await job.running(nodes=1)
    return job


def _spec(site: Site, name: str, command: list[str]) -> dict[str, Any]:
    out = site.folder / name
    out.mkdir()
    return {
        "env": {"HF_TOKEN": PASSWORD},
        # What would be prepared for a second start is an interpreter with torch.
        "recovery": {"warm_starts": False},
        "roles": {"worker": {"nodes": 1, "command": [*command, str(out), ARGUMENT]}},
    }


def finish(site: Site, job: Job) -> None:
    (site.folder / job.name / "finish").touch()


def evil_spec(name: str, owned: Path) -> str:
    return json.dumps({"name": name, "roles": {"worker": {"nodes": 1, "command": ["touch", str(owned)]}}})


def start(attacker: OtherUser, kind: str, workflow_id: str, content: str, *metadata: str) -> Finished:
    return attacker.temporal(
        *("workflow", "start", "--type", kind, "--task-queue", "perdure", "--workflow-id", workflow_id),
        *("--input", content, *metadata),
    )


def tokens(state: StateFolder, job: Job) -> list[str]:
    """The tokens of the job's nodes."""
    files = [folder / "agent.json" for folder in state.nodes.iterdir() if job.uid in folder.name]
    return [json.loads(file.read_text())["node"]["token"] for file in files]


async def test_what_it_starts_runs_no_command(attacker: OtherUser, site: Site) -> None:
    name = f"evil-{secrets.token_hex(3)}"
    owned = attacker.folder / f"owned-{name}"
    started = start(attacker, TRAINING_JOB, job_workflow_id("default", name), evil_spec(name, owned))
    assert started.code == 0, started.err
    result = attacker.temporal("workflow", "result", "--workflow-id", job_workflow_id("default", name))
    assert "FAILED" in result.out
    assert (
        "ActivityTaskScheduled"
        not in attacker.temporal("workflow", "show", "--workflow-id", job_workflow_id("default", name)).out
    )
    assert not owned.exists()
    # The user is told why, whichever way they look.
    for look in (site.client.status, site.client.wait):
        with pytest.raises(Refused, match="not encrypted"):
            await look(name)


@pytest.mark.long("commands")
async def test_the_attack_works_where_nothing_is_encrypted(
    attacker: OtherUser, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise the test above would prove nothing."""
    monkeypatch.setattr(module, "create_keys", lambda _: None)
    plane = LocalControlPlane(StateFolder(tmp_path / "state"))
    try:
        endpoint = await plane.ensure()
        open_server = OtherUser(attacker.folder, endpoint.address)
        owned = attacker.folder / "owned"
        assert start(open_server, TRAINING_JOB, "job/default/evil", evil_spec("evil", owned)).code == 0
        assert (await Client(endpoint=endpoint).wait("evil")).phase is JobPhase.SUCCEEDED
        assert owned.stat().st_uid == os.getuid(), "its command ran as us"
    finally:
        await plane.stop_worker()
        await plane.stop_server()
        end_nodes(plane.state.path)


@pytest.mark.parametrize("kind", [ASK_NODE, NODE_GROUP, WORKDIR_UPLOAD])
async def test_no_other_workflow_of_the_worker_accepts_it(attacker: OtherUser, kind: str) -> None:
    workflow_id = f"evil-{secrets.token_hex(3)}"
    assert start(attacker, kind, workflow_id, "{}").code == 0
    assert "FAILED" in attacker.temporal("workflow", "result", "--workflow-id", workflow_id).out


async def readable(attacker: OtherUser, *workflow_ids: str) -> bytes:
    """Everything that the server answers about workflows. Temporal's command line shows no more."""
    server = await TemporalClient.connect(attacker.address)
    calls, namespace = server.workflow_service, server.namespace
    answers: list[bytes] = []
    for workflow_id in workflow_ids:
        handle = server.get_workflow_handle(workflow_id)
        answers += [event.SerializeToString() for event in (await handle.fetch_history()).events]
        answers.append((await handle.describe()).raw_description.SerializeToString())
        for query in ("status", "nodes", "incidents", "__stack_trace", "__temporal_workflow_metadata"):
            request = QueryWorkflowRequest(
                namespace=namespace,
                execution=WorkflowExecution(workflow_id=workflow_id),
                query=WorkflowQuery(query_type=query),
            )
            try:
                answers.append((await calls.query_workflow(request)).SerializeToString())
            except RPCError as error:
                answers.append(str(error).encode() + error.raw_grpc_status)
    listed = await calls.list_workflow_executions(ListWorkflowExecutionsRequest(namespace=namespace))
    return b"\n".join([*answers, listed.SerializeToString()])


async def test_it_reads_no_secret(attacker: OtherUser, site: Site, job: Job) -> None:
    group = (await job.status()).groups[0]
    shown = attacker.temporal("workflow", "show", "--workflow-id", job.workflow_id, "--output", "json")
    read = shown.out.encode() + await readable(attacker, job.workflow_id, group)
    assert b64encode(ENCRYPTED) in read
    assert ENCRYPTED in read
    node_tokens = tokens(site.state, job)
    assert node_tokens
    for secret in (PASSWORD, ARGUMENT, "finish", *node_tokens):
        assert secret.encode() not in read
    database = b"".join(path.read_bytes() for path in site.state.temporal.glob("temporal.db*"))
    for secret in (PASSWORD, ARGUMENT, *node_tokens):
        assert secret.encode() not in database
    finish(site, job)
    assert (await site.client.wait(job.name)).phase is JobPhase.SUCCEEDED


async def test_what_it_sends_to_a_job_changes_nothing(attacker: OtherUser, site: Site, job: Job) -> None:
    known = await job.status()
    sent = (event.get("workflowExecutionSignaledEventAttributes") for event in events(attacker, job))
    stored = next(attributes for attributes in sent if attributes)["input"]["payloads"][0]
    copied = Payload(
        metadata={name: b64decode(value) for name, value in stored["metadata"].items()}, data=b64decode(stored["data"])
    )
    # The server accepts whatever any process of the machine sends; Temporal's command line sends one message a process.
    server = await TemporalClient.connect(attacker.address)
    for workflow_id in (job.workflow_id, known.groups[0]):
        for signal in ("failure", "finished", "transitions", "desire", "adopt", "node_events", "joined"):
            for message in ({}, {"sender": None}, RawValue(copied)):
                await server.get_workflow_handle(workflow_id).signal(signal, message)
    for update, request in (("suspend", "{}"), ("scale", '{"nodes": "2"}'), ("restart", "{}")):
        done = attacker.temporal(
            "workflow", "update", "execute", "--workflow-id", job.workflow_id, "--name", update, "--input", request
        )
        assert done.code != 0
    after = await job.status()
    assert (after.phase, after.generation, after.nodes_max) == (known.phase, known.generation, known.nodes_max)
    assert not await job.incidents()
    assert await site.client.task_failures(job.name) == ()
    finish(site, job)
    assert (await site.client.wait(job.name)).phase is JobPhase.SUCCEEDED


def events(attacker: OtherUser, job: Job) -> list[dict[str, Any]]:
    """The job's history, with payloads as they are stored."""
    words = ("workflow", "show", "--workflow-id", job.workflow_id, "--output", "json", "--no-json-shorthand-payloads")
    return json.loads(attacker.temporal(*words).out)["events"]


def raw(payload: dict[str, Any]) -> tuple[str, ...]:
    """The options that send a payload as it was read."""
    metadata = [f"--input-meta={name}={b64decode(value).decode()}" for name, value in payload["metadata"].items()]
    return "--input", payload["data"], "--input-base64", *metadata


@pytest.mark.long("commands")
async def test_a_copied_job_starts_under_no_other_name(attacker: OtherUser, site: Site, job: Job) -> None:
    (copied,) = events(attacker, job)[0]["workflowExecutionStartedEventAttributes"]["input"]["payloads"]
    copy = job_workflow_id("default", f"{job.name}-copy")
    _, data, *how = raw(copied)
    assert start(attacker, TRAINING_JOB, copy, data, *how).code == 0
    result = attacker.temporal("workflow", "result", "--workflow-id", copy)
    assert "FAILED" in result.out
    with pytest.raises(Refused, match="was encrypted for"):
        await site.client.status(f"{job.name}-copy")
    finish(site, job)
    assert (await site.client.wait(job.name)).phase is JobPhase.SUCCEEDED


@workflow.defn(name="Evil")
class Evil:
    """A workflow of another user's own, which schedules activities of our worker."""

    @workflow.run
    async def run(self, activity: str, task_queue: str) -> None:
        await workflow.execute_activity(
            activity,
            {},
            task_queue=task_queue,
            start_to_close_timeout=timedelta(seconds=20),
            retry_policy=RetryPolicy(maximum_attempts=1),
        )


@pytest.mark.parametrize("activity", ["create_node", "create_nodes", "delete_nodes", "signal_desire"])
async def test_no_activity_accepts_what_is_not_encrypted(control_plane: LocalControlPlane, activity: str) -> None:
    server = control_plane.status().server
    assert server is not None
    temporal = await TemporalClient.connect(server.address)
    queue = f"evil-{secrets.token_hex(3)}"
    async with Worker(temporal, task_queue=queue, workflows=[Evil], workflow_runner=UnsandboxedWorkflowRunner()):
        with pytest.raises(WorkflowFailureError) as failed:
            await temporal.execute_workflow(Evil.run, args=[activity, "perdure"], id=queue, task_queue=queue)
    cause = failed.value.cause
    assert isinstance(cause, ActivityError)
    owner = await Client(endpoint=await control_plane.ensure_server()).connect()
    with pytest.raises(WorkflowFailureError) as readable:
        await owner.get_workflow_handle(queue).result()
    activity_error = readable.value.cause
    assert isinstance(activity_error, ActivityError)
    assert isinstance(activity_error.cause, ApplicationError)
    refused = activity_error.cause.cause
    assert isinstance(refused, ApplicationError)
    assert refused.type == REFUSED_PAYLOAD


@pytest.mark.long("commands")
@pytest.mark.usefixtures("root")
async def test_it_reaches_no_file_and_no_socket(attacker: OtherUser, site: Site, job: Job) -> None:
    state = site.state.path
    paths = [state, *state.rglob("*")]
    assert any(stat.S_ISSOCK(path.lstat().st_mode) for path in paths)
    listing = attacker.folder / "paths"
    listing.write_text("\0".join(map(str, paths)))
    look = (
        "import os, socket, sys\n"
        "connect = lambda path: socket.socket(socket.AF_UNIX).connect(path)\n"
        "for path in open(sys.argv[1]).read().split('\\0'):\n"
        "    for attempt in (os.listdir, open, connect):\n"
        "        try: attempt(path)\n"
        "        except OSError: continue\n"
        "        print('reached', attempt, path)\n"
    )
    # The interpreter of the virtual environment lies in a folder that only its owner may enter.
    python = next(path for path in ("/usr/bin/python3", "/usr/local/bin/python3") if Path(path).exists())
    done = attacker.run(python, "-c", look, str(listing))
    assert (done.code, done.out, done.err) == (0, "", "")
    for path in paths:
        if not path.is_symlink() and (path.parent in (state, state / "nodes", state / "temporal") or path == state):
            assert path.lstat().st_mode & 0o077 == 0, path
    finish(site, job)
    assert (await site.client.wait(job.name)).phase is JobPhase.SUCCEEDED
