"""Tests of an attacker who has taken over a node: it has the node's grant and token, and the whole of Temporal's SDK.

All other jobs on the server are out of its reach, and of its own job it reaches what its agent needs.
"""

from __future__ import annotations

import asyncio
import json
import re
import secrets
import socket
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import grpc
import pytest
import temporalio.api.workflowservice.v1 as service
from temporalio.api.common.v1 import WorkflowExecution
from temporalio.api.enums.v1 import TaskQueueKind
from temporalio.api.taskqueue.v1 import TaskQueue
from temporalio.service import RPCError, RPCStatusCode

from perdure.base.credentials.keyring import Keyring
from perdure.base.credentials.names import GATEWAY_NAME, GRANT_HEADER, TOKEN_HEADER
from perdure.contract import AgentMessage, Destination, Route, routed_to
from perdure.contract.names import dataset_workflow_id, store_workflow_id
from perdure.gateway.calls import CALLS, MESSAGES, SERVICE
from perdure.gateway.limits import MESSAGE_BYTES
from tests.agent.harness import Workflows, recording
from tests.gateway.attacker import Attacker
from tests.gateway.site import GatewaySite
from tests.support.temporal_server import DevServer
from tests.support.waiting import DEADLINE

DENIED = RPCStatusCode.PERMISSION_DENIED
GUIDE = Path(__file__).parents[2] / "docs" / "gateway.md"


@pytest.fixture
async def victim(temporal_server: DevServer) -> AsyncIterator[Workflows]:
    """Another team's job on the same server."""
    async with recording(temporal_server) as both:
        yield both


OWN = {"uid": "aaaaaaaa", "role": "worker", "rank": 0, "incarnation": 1, "token": "t"}


async def test_no_method_but_those_of_an_agent_exists(attacker: Attacker) -> None:
    """Every method of the service is called, also those that an agent has."""
    names = [name.removesuffix("Request") for name in dir(service) if name.endswith("Request")]
    assert len(names) > 80

    async def status(channel: grpc.aio.Channel, method: str) -> grpc.StatusCode:
        call: Callable[..., Awaitable[bytes]] = channel.unary_unary(method)
        try:
            await call(b"", timeout=DEADLINE)
        except grpc.aio.AioRpcError as error:
            return error.code()
        return grpc.StatusCode.OK

    async with attacker.site.channel() as channel:
        for name in names:
            expected = grpc.StatusCode.UNAUTHENTICATED if name in CALLS else grpc.StatusCode.UNIMPLEMENTED
            assert await status(channel, f"/{SERVICE}/{name}") is expected, name
        for other in ("temporal.api.operatorservice.v1.OperatorService/ListSearchAttributes", "grpc.health.v1/Check"):
            assert await status(channel, f"/{other}") is grpc.StatusCode.UNIMPLEMENTED


async def test_others_jobs_are_neither_seen_nor_changed(attacker: Attacker, victim: Workflows) -> None:
    handle = attacker.client.get_workflow_handle(victim.job.id)
    for call in (
        handle.fetch_history(),
        handle.terminate("mine"),
        handle.cancel(),
        handle.query("seen"),
        attacker.client.start_workflow("TrainingJob", id="job/tests/mine", task_queue="perdure"),
        attacker.client.count_workflows(),
    ):
        await attacker.refused(call, RPCStatusCode.UNIMPLEMENTED)
    await attacker.refused(handle.describe(), DENIED, "not the node's own job")
    await attacker.refused(attacker.signal(victim.job.id, "failure", {"sender": OWN}), DENIED, "not the node's own")
    await attacker.refused(attacker.signal(victim.group.id, "joined", {"sender": OWN}), DENIED, "not the node's own")
    assert await victim.seen(victim.job) == []


async def test_a_node_exchanges_with_the_datasets_of_its_own_job_only(
    attacker: Attacker, workflows: Workflows, victim: Workflows
) -> None:
    own = dataset_workflow_id(workflows.job.id, "aaaaaaaa", "train")
    for workflow in (
        victim.job.id,
        workflows.job.id,
        workflows.group.id,
        dataset_workflow_id(victim.job.id, "aaaaaaaa", "train"),
        dataset_workflow_id(workflows.job.id, "bbbbbbbb", "train"),
        f"{own}/0",
        dataset_workflow_id(workflows.job.id, "aaaaaaaa", "0"),
        dataset_workflow_id(workflows.job.id, "aaaaaaaa", ""),
        own.removesuffix("/train"),
    ):
        handle = attacker.client.get_workflow_handle(workflow)
        await attacker.refused(handle.execute_update("exchange", {"sender": OWN}), DENIED, "neither a dataset")
        poll = service.PollWorkflowExecutionUpdateRequest(namespace=attacker.namespace)
        poll.update_ref.workflow_execution.workflow_id = workflow
        called = attacker.client.workflow_service.poll_workflow_execution_update(poll)
        await attacker.refused(called, DENIED, "neither a dataset")
    handle = attacker.client.get_workflow_handle(own)
    await attacker.refused(handle.execute_update("other", {"sender": OWN}), DENIED, "input.name")
    await attacker.refused(handle.execute_update("exchange", args=[{"sender": OWN}] * 2), DENIED, "one message")
    for sender in ({**OWN, "rank": 1}, {**OWN, "incarnation": 2}, {**OWN, "uid": "bbbbbbbb"}, None):
        await attacker.refused(handle.execute_update("exchange", {"sender": sender}), DENIED, "sender")
    # What an agent sends passes: there is no such dataset yet.
    await attacker.refused(handle.execute_update("exchange", {"sender": OWN}), RPCStatusCode.NOT_FOUND)


async def test_a_node_calls_the_store_of_its_own_job_only(
    attacker: Attacker, workflows: Workflows, victim: Workflows
) -> None:
    own = store_workflow_id(workflows.job.id, "aaaaaaaa")
    for workflow in (
        victim.job.id,
        store_workflow_id(victim.job.id, "aaaaaaaa"),
        store_workflow_id(workflows.job.id, "bbbbbbbb"),
        f"{own}/0",
        f"{own} ",
    ):
        handle = attacker.client.get_workflow_handle(workflow)
        await attacker.refused(handle.execute_update("call", {"sender": OWN}), DENIED, "nor its store")
        poll = service.PollWorkflowExecutionUpdateRequest(namespace=attacker.namespace)
        poll.update_ref.workflow_execution.workflow_id = workflow
        called = attacker.client.workflow_service.poll_workflow_execution_update(poll)
        await attacker.refused(called, DENIED, "nor its store")
    handle = attacker.client.get_workflow_handle(own)
    for name in ("exchange", "other"):
        await attacker.refused(handle.execute_update(name, {"sender": OWN}), DENIED, "input.name")
    await attacker.refused(handle.execute_update("call", args=[{"sender": OWN}] * 2), DENIED, "one message")
    for sender in ({**OWN, "rank": 1}, {**OWN, "incarnation": 2}, {**OWN, "uid": "bbbbbbbb"}, None):
        await attacker.refused(handle.execute_update("call", {"sender": sender}), DENIED, "sender")
    for forbidden in (handle.signal("call", {"sender": OWN}), handle.describe()):
        await attacker.refused(forbidden, DENIED)
    # What an agent sends passes: there is no such store yet.
    await attacker.refused(handle.execute_update("call", {"sender": OWN}), RPCStatusCode.NOT_FOUND)


async def test_of_its_own_job_a_node_learns_only_whether_it_runs(attacker: Attacker, workflows: Workflows) -> None:
    described = await attacker.client.get_workflow_handle(workflows.job.id).describe()
    assert described.run_id == workflows.job.first_execution_run_id
    raw = described.raw_description
    assert [field.name for field, _ in raw.ListFields()] == ["workflow_execution_info"]
    shown = {field.name for field, _ in raw.workflow_execution_info.ListFields()}
    assert shown <= {"execution", "type", "status", "first_run_id", "start_time"}


async def test_a_node_cannot_change_its_job_beyond_its_own_reports(attacker: Attacker, workflows: Workflows) -> None:
    handle = attacker.client.get_workflow_handle(workflows.job.id)
    await attacker.refused(handle.terminate(), RPCStatusCode.UNIMPLEMENTED)
    for workflow, name in (
        (workflows.job.id, "close"),
        (workflows.job.id, "transitions"),
        (workflows.job.id, "joined"),
        (workflows.group.id, "desire"),
        (workflows.group.id, "adopt"),
        (workflows.group.id, "node_events"),
        (workflows.group.id, "failure"),
        (workflows.group.id, "__temporal_x"),
    ):
        await attacker.refused(attacker.signal(workflow, name, {"sender": OWN}), DENIED, "signal_name")
    assert await workflows.seen(workflows.job) == []
    assert await workflows.seen(workflows.group) == []


@pytest.mark.parametrize(
    "sender",
    [
        {**OWN, "rank": 1},
        {**OWN, "incarnation": 2},
        {**OWN, "uid": "bbbbbbbb"},
        {**OWN, "role": "other"},
        {**OWN, "rank": "0"},
        {},
        None,
        "worker-0",
    ],
)
async def test_a_node_cannot_speak_for_another_one(attacker: Attacker, workflows: Workflows, sender: Any) -> None:
    await attacker.refused(attacker.signal(workflows.job.id, "failure", {"sender": sender}), DENIED, "sender")
    assert await workflows.seen(workflows.job) == []


async def test_a_message_with_two_senders_arrives_with_the_one_that_was_checked(
    attacker: Attacker, workflows: Workflows
) -> None:
    """Readers of JSON differ in which of two equal names counts."""
    own, other = json.dumps(OWN), json.dumps({**OWN, "rank": 1})
    forged = f'{{"sender": {other}, "sender": {own}}}'.encode()
    await attacker.signal(workflows.job.id, "failure", forged)
    await workflows.expect(workflows.job, "failure")
    events = [event async for event in workflows.job.fetch_history_events()]
    [signal] = [event.workflow_execution_signaled_event_attributes for event in events if event.event_type == 26]
    assert signal.input.payloads[0].data.count(b'"sender"') == 1
    forged = f'{{"sender": {own}, "sender": {other}}}'.encode()
    await attacker.refused(attacker.signal(workflows.job.id, "failure", forged), DENIED, "another node")


@pytest.mark.parametrize("message", [b"", b"[1]", b"{", b"\xff\xfe", b"[" * 100_000])
async def test_what_is_no_message_is_refused(attacker: Attacker, workflows: Workflows, message: bytes) -> None:
    await attacker.refused(attacker.signal(workflows.job.id, "failure", message), DENIED, "names no sender")


async def test_headers_and_links_do_not_pass(attacker: Attacker, workflows: Workflows) -> None:
    """Fields that no agent sends are left out, so none of them can do harm."""
    run = {"workflow_execution": WorkflowExecution(workflow_id=workflows.job.id, run_id="another")}
    await attacker.signal(workflows.job.id, "finished", {"sender": OWN}, control="x", identity="root@there", **run)
    [seen] = await workflows.expect(workflows.job, "finished")
    assert seen["sender"] == OWN
    events = [event async for event in workflows.job.fetch_history_events()]
    [signal] = [event.workflow_execution_signaled_event_attributes for event in events if event.event_type == 26]
    assert signal.identity == "worker-0/1@there"


async def test_a_message_that_is_too_large_is_refused(attacker: Attacker, workflows: Workflows) -> None:
    large = {"sender": OWN, "text": "x" * MESSAGE_BYTES}
    await attacker.refused(attacker.signal(workflows.job.id, "failure", large), RPCStatusCode.RESOURCE_EXHAUSTED)


async def test_other_queues_and_namespaces_cannot_be_polled(attacker: Attacker, victim: Workflows) -> None:
    for queue in ("perdure", "perdure-watch", "node/aaaaaaaa/worker-1/1", "node/aaaaaaaa/worker-0/2", ""):
        await attacker.refused(attacker.poll(queue), DENIED, "task_queue")
    own = "node/aaaaaaaa/worker-0/1"
    await attacker.refused(attacker.poll(own, namespace="temporal-system"), DENIED, "namespace")
    # A sticky queue has the name of another one in a second field, which is not passed on.
    poll = asyncio.ensure_future(
        attacker.poll(
            own, task_queue=TaskQueue(name=own, normal_name="perdure", kind=TaskQueueKind.TASK_QUEUE_KIND_STICKY)
        )
    )
    assert not (await asyncio.wait({poll}, timeout=2))[0]
    poll.cancel()


async def test_a_task_can_be_completed_by_its_own_node_only(
    site: GatewaySite, attacker: Attacker, workflows: Workflows
) -> None:
    """The attacker knows the token of another node's lease, and the server's own form of it."""
    neighbour = site.grant(workflows, uid="aaaaaaaa", rank=1)
    client = await site.client(neighbour, site.token(neighbour))
    execution = asyncio.create_task(_lease(workflows, neighbour.task_queue))
    task = await client.workflow_service.poll_activity_task_queue(
        service.PollActivityTaskQueueRequest(
            namespace=attacker.namespace, task_queue=TaskQueue(name=neighbour.task_queue)
        )
    )
    assert task.task_token
    keys = site.keyring.signing_keys
    for token in (task.task_token, neighbour.verify_task(task.task_token, keys)[0], b"", b"x" * 40):
        about: dict[str, Any] = {"namespace": attacker.namespace, "task_token": token}
        ours = attacker.client.workflow_service
        for call in (
            ours.record_activity_task_heartbeat(service.RecordActivityTaskHeartbeatRequest(**about)),
            ours.respond_activity_task_completed(service.RespondActivityTaskCompletedRequest(**about)),
            ours.respond_activity_task_failed(service.RespondActivityTaskFailedRequest(**about)),
            ours.respond_activity_task_canceled(service.RespondActivityTaskCanceledRequest(**about)),
        ):
            await attacker.refused(call, DENIED, "task token")
    beat = service.RecordActivityTaskHeartbeatRequest(namespace=attacker.namespace, task_token=task.task_token)
    await client.workflow_service.record_activity_task_heartbeat(beat)
    await workflows.group.terminate("over")
    await asyncio.gather(execution, return_exceptions=True)


async def _lease(workflows: Workflows, queue: str) -> Any:
    from tests.agent.recorder import Call, Recorder

    call = Call(queue=queue, activity="x", argument={}, within=timedelta(seconds=DEADLINE))
    return await workflows.group.execute_update(Recorder.call, call)  # pyrefly: ignore[no-matching-overload]


async def test_nobody_is_served_without_both_proofs(site: GatewaySite, workflows: Workflows) -> None:
    grant, other = site.grant(workflows), site.grant(workflows)
    token = site.token(grant)
    keys = site.keyring.signing_keys
    genuine = grant.sign(keys)
    content, _, signature = genuine.partition(".")
    widened = grant.model_copy(update={"job_id": "job/other/job"}).sign(keys).split(".")[0]
    for proof, bearer, reason in (
        (None, token, "no grant"),
        (genuine, None, "no token"),
        (genuine, "Bearer ", "no token"),
        (genuine, f"Bearer {secrets.token_hex(8)}", "not valid"),
        (genuine, f"Bearer {site.token(other)}", "different pods"),
        (other.sign(keys), f"Bearer {token}", "different pods"),
        (grant.sign(Keyring.new().signing_keys), f"Bearer {token}", "signature"),
        (f"{widened}.{signature}", f"Bearer {token}", "signature"),
        (f"{content}.", f"Bearer {token}", "signature"),
        ("x.y", f"Bearer {token}", "base64"),
    ):
        headers = [(GRANT_HEADER, proof), (TOKEN_HEADER, bearer)]
        sent = [(name, value) for name, value in headers if value is not None]
        status, details = await site.describe(workflows.job.id, *sent)
        assert status is grpc.StatusCode.UNAUTHENTICATED, proof
        assert reason in details
    assert await site.describe(workflows.job.id, *site.headers(grant, token)) == (grpc.StatusCode.OK, "")


async def test_the_token_of_a_pod_that_is_gone_is_refused(
    site: GatewaySite, workflows: Workflows, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An old incarnation's grant and token are worth nothing as soon as the API server has been asked again."""
    monkeypatch.setattr("perdure.gateway.callers._VALID_SECONDS", 0.0)
    grant = site.grant(workflows)
    token = site.token(grant)
    assert (await site.describe(workflows.job.id, *site.headers(grant, token)))[0] is grpc.StatusCode.OK
    del site.reviewer.pods[token]
    status, _ = await site.describe(workflows.job.id, *site.headers(grant, token))
    assert status is grpc.StatusCode.UNAUTHENTICATED


async def test_while_the_api_server_is_away_known_agents_are_served(
    site: GatewaySite, workflows: Workflows, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("perdure.gateway.callers._VALID_SECONDS", 0.0)
    known, other, new = (site.headers(site.grant(workflows)) for _ in range(3))

    def silence() -> float:
        return site.metrics.registry.get_sample_value("perdure_gateway_api_server_silence_seconds") or 0.0

    for headers in (known, other):
        assert (await site.describe(workflows.job.id, *headers))[0] is grpc.StatusCode.OK
    site.reviewer.silent = True
    assert (await site.describe(workflows.job.id, *known))[0] is grpc.StatusCode.OK
    site.reviewer.silent, site.reviewer.away = False, True
    assert (await site.describe(workflows.job.id, *known))[0] is grpc.StatusCode.OK
    assert silence() > 0
    assert (await site.describe(workflows.job.id, *new))[0] is grpc.StatusCode.UNAVAILABLE
    before = silence()
    assert (await site.describe(workflows.job.id, *new))[0] is grpc.StatusCode.UNAVAILABLE
    assert silence() > before, "it counts from the first review that was not answered"
    with monkeypatch.context() as later:
        later.setattr("perdure.gateway.callers._ASKED_WITHIN", 0.0)
        assert silence() == 0, "no agent has called for long"
    monkeypatch.setattr("perdure.gateway.callers._STALE_SECONDS", 0.0)
    assert (await site.describe(workflows.job.id, *other))[0] is grpc.StatusCode.UNAVAILABLE
    site.reviewer.away = False
    assert (await site.describe(workflows.job.id, *other))[0] is grpc.StatusCode.OK
    assert silence() == 0


async def test_an_impostor_learns_nothing(site: GatewaySite, workflows: Workflows) -> None:
    """It answers at the gateway's address, and has the gateway's name in a certificate of its own authority."""
    grant = site.grant(workflows)
    client = await site.client(grant, site.token(grant))
    keyring, site.keyring = site.keyring, Keyring.new()
    await site.stop()
    await site.start()
    with pytest.raises((RPCError, RuntimeError)):
        await client.get_workflow_handle(workflows.job.id).describe(rpc_timeout=timedelta(seconds=3))
    calls = [sample for metric in site.metrics.registry.collect() for sample in metric.samples]
    assert not [sample for sample in calls if sample.name == "perdure_gateway_calls_total"]
    site.keyring = keyring


async def test_the_gateway_speaks_tls_only(site: GatewaySite) -> None:
    host, _, port = site.address.partition(":")
    with socket.create_connection((host, int(port)), timeout=DEADLINE) as plain:
        plain.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n")
        plain.settimeout(DEADLINE)
        assert b"HTTP" not in plain.recv(100)
    known = ssl.create_default_context(cadata=site.keyring.authority.certificate)
    with (
        socket.create_connection((host, int(port)), timeout=DEADLINE) as own,
        known.wrap_socket(own, server_hostname=GATEWAY_NAME) as secure,
    ):
        assert secure.version() == "TLSv1.3"
    trust = ssl.create_default_context(cadata=Keyring.new().authority.certificate)
    with (
        socket.create_connection((host, int(port)), timeout=DEADLINE) as other,
        pytest.raises(ssl.SSLCertVerificationError),
    ):
        trust.wrap_socket(other, server_hostname=GATEWAY_NAME)


def test_agents_send_the_declared_messages_and_no_others() -> None:
    steps = {"stepping", "stall", "stall_evidence", "step_times", "pace"}
    group = {"joined", "ready", *steps, "lease_taken", "ports_changed", "polls_refused", "leaving", "checked"}
    checkpoints = {"checkpoint_stored", "checkpoint_committed", "checkpoint_restored"}
    assert {
        Destination.JOB: {"bad_number", "corruption", "failure", "finished", "group_missing"},
        Destination.GROUP: group | checkpoints | {"dataset_needed", "store_needed"},
        Destination.DATASET: {"exchange"},
        Destination.STORE: {"call"},
    } == MESSAGES
    rows = [line.split("|")[1:3] for line in GUIDE.read_text(encoding="utf-8").splitlines() if line.startswith("| ")]
    guide = {call.strip(): set(re.findall(r"`(\w+)`", condition)) for call, condition in rows}
    assert guide["signal"] == MESSAGES[Destination.JOB] | MESSAGES[Destination.GROUP]
    assert guide["update, and wait for its result"] == MESSAGES[Destination.DATASET] | MESSAGES[Destination.STORE]


def test_a_message_without_a_route_or_from_elsewhere_is_refused() -> None:
    with pytest.raises(TypeError, match="route"):
        type("Unrouted", (AgentMessage,), {})
    route = Route(Destination.JOB, "terminate")
    with pytest.raises(TypeError, match=r"declared in perdure\.contract"):
        type("Foreign", (AgentMessage,), {"__module__": __name__}, route=route)
    within = {"__module__": "perdure.contract.agents"}
    with pytest.raises(TypeError, match="failure is another message"):
        type("Second", (AgentMessage,), within, route=Route(Destination.JOB, "failure"))
    assert set(routed_to(Destination.JOB)) == MESSAGES[Destination.JOB]
