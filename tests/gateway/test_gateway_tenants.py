"""Tests of two tenants on one Temporal server: a namespace, a worker, a gateway and payload keys each, and jobs of the
same names."""

from __future__ import annotations

import copy
import secrets
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from datetime import timedelta
from pathlib import Path
from typing import Any

import grpc
import pytest
import temporalio.api.workflowservice.v1 as service
from google.protobuf.duration_pb2 import Duration
from temporalio.api.common.v1 import Payload, WorkflowExecution
from temporalio.api.enums.v1 import EventType
from temporalio.api.taskqueue.v1 import TaskQueue
from temporalio.client import Client, WorkflowHandle
from temporalio.service import RPCError, RPCStatusCode

from perdure.base.credentials.grants import Grant
from perdure.base.credentials.names import GRANT_HEADER, TOKEN_HEADER
from perdure.base.encryption.codec import ENCRYPTED, PayloadEncryption, Plain
from perdure.base.encryption.keys import create_keys
from perdure.contract.names import store_workflow_id
from tests.agent.harness import Workflows, recording
from tests.gateway.site import GatewaySite, gateway_site
from tests.support.temporal_server import DevServer
from tests.support.waiting import eventually

OWN = {"uid": "aaaaaaaa", "role": "worker", "rank": 0, "incarnation": 1, "token": "t"}


class Tenant:
    """What one tenant has: nothing of it is another one's."""

    def __init__(self, site: GatewaySite, workflows: Workflows, encryption: PayloadEncryption) -> None:
        self.site, self.workflows, self.encryption = site, workflows, encryption
        self.namespace = site.server.namespace
        self.grant: Grant = site.grant(workflows, uid=OWN["uid"])

    async def agent(self) -> Client:
        """A client with the proofs of this tenant's node."""
        return await self.site.client(self.grant, self.site.token(self.grant))


@pytest.fixture
async def tenants(temporal_server: DevServer, tmp_path: Path) -> AsyncIterator[tuple[Tenant, Tenant]]:
    job = f"job/tests/{secrets.token_hex(4)}"
    async with AsyncExitStack() as stack:
        both: list[Tenant] = []
        for name in (f"nlp-{secrets.token_hex(3)}", f"vision-{secrets.token_hex(3)}"):
            server = await namespace_of(temporal_server, name)
            encryption = PayloadEncryption.of(create_keys(tmp_path / f"{name}.json"), Plain.REFUSE)
            client = await Client.connect(server.address, namespace=name, data_converter=encryption.data_converter)
            encryption.use(client)
            workflows = await stack.enter_async_context(recording(server, client=client, job=job))
            site = await stack.enter_async_context(gateway_site(server, encryption))
            both.append(Tenant(site, workflows, encryption))
        yield both[0], both[1]


async def namespace_of(server: DevServer, name: str) -> DevServer:
    """The server with another namespace, which is created."""
    client = await server.client()
    await client.workflow_service.register_namespace(
        service.RegisterNamespaceRequest(
            namespace=name, workflow_execution_retention_period=Duration(seconds=int(timedelta(days=1).total_seconds()))
        )
    )
    other = copy.copy(server)
    other.namespace = name

    async def known() -> bool:
        try:
            await (await other.client()).count_workflows()
        except RPCError:
            return False
        return True

    await eventually(known)
    return other


def signal(client: Client, namespace: str, workflow: str, content: Any) -> Any:
    request = service.SignalWorkflowExecutionRequest(
        namespace=namespace, workflow_execution=WorkflowExecution(workflow_id=workflow), signal_name="finished"
    )
    request.input.payloads.append(content)
    return client.workflow_service.signal_workflow_execution(request)


REPORT = Payload(
    metadata={"encoding": b"json/plain"},
    data=b'{"sender": {"uid": "aaaaaaaa", "role": "worker", "rank": 0, "incarnation": 1, "token": "t"}}',
)


async def refused(call: Any, status: RPCStatusCode, reason: str = "") -> None:
    with pytest.raises(RPCError) as refusal:
        await call
    assert (refusal.value.status, reason in refusal.value.message) == (status, True), refusal.value


async def test_reports_reach_the_job_of_their_own_tenant_only(tenants: tuple[Tenant, Tenant]) -> None:
    """Both jobs and their nodes have the same names."""
    nlp, vision = tenants
    assert nlp.workflows.job.id == vision.workflows.job.id
    await signal(await nlp.agent(), nlp.namespace, nlp.workflows.job.id, REPORT)
    [seen] = await nlp.workflows.expect(nlp.workflows.job, "finished")
    assert seen["sender"] == OWN
    # Handled in order: what had arrived before this is there.
    await signal(await vision.agent(), vision.namespace, vision.workflows.job.id, REPORT)
    assert len(await vision.workflows.expect(vision.workflows.job, "finished")) == 1


@pytest.mark.parametrize("mine", [0, 1], ids=["nlp", "vision"])
async def test_through_its_gateway_a_tenant_reaches_nothing_of_another_namespace(
    tenants: tuple[Tenant, Tenant], mine: int
) -> None:
    """Every call that the gateway allows, for a workflow and a queue that are its own but for the namespace."""
    own, other = tenants[mine], tenants[1 - mine]
    client = await own.agent()
    job, theirs = own.workflows.job.id, other.namespace
    calls = client.workflow_service
    execution = WorkflowExecution(workflow_id=job)
    queue = TaskQueue(name=own.grant.task_queue)
    update = service.UpdateWorkflowExecutionRequest(
        namespace=theirs,
        workflow_execution=WorkflowExecution(workflow_id=store_workflow_id(job, OWN["uid"])),
    )
    update.request.input.name = "call"
    update.request.input.args.payloads.append(REPORT)
    for call in (
        calls.describe_namespace(service.DescribeNamespaceRequest(namespace=theirs)),
        calls.describe_workflow_execution(
            service.DescribeWorkflowExecutionRequest(namespace=theirs, execution=execution)
        ),
        calls.poll_activity_task_queue(service.PollActivityTaskQueueRequest(namespace=theirs, task_queue=queue)),
        signal(client, theirs, job, REPORT),
        calls.update_workflow_execution(update),
    ):
        await refused(call, RPCStatusCode.PERMISSION_DENIED, f"'{theirs}' is not that of the job")
    start = service.StartWorkflowExecutionRequest(namespace=theirs, workflow_id="job/tests/mine")
    history = service.GetWorkflowExecutionHistoryRequest(namespace=theirs, execution=execution)
    for call in (calls.start_workflow_execution(start), calls.get_workflow_execution_history(history)):
        await refused(call, RPCStatusCode.UNIMPLEMENTED)
    assert await other.workflows.seen(other.workflows.job) == []


async def test_proofs_of_one_tenant_are_worth_nothing_at_the_gateway_of_another(tenants: tuple[Tenant, Tenant]) -> None:
    nlp, vision = tenants
    # Its agents do not even trust that gateway: each has an authority of its own.
    assert nlp.site.keyring.authority.certificate != vision.site.keyring.authority.certificate
    signed = nlp.grant.sign(nlp.site.keyring.signing_keys)
    token = vision.site.token(nlp.grant)
    status, reason = await vision.site.describe(
        nlp.workflows.job.id, (GRANT_HEADER, signed), (TOKEN_HEADER, f"Bearer {token}")
    )
    assert (status, "signature" in reason) == (grpc.StatusCode.UNAUTHENTICATED, True)


async def test_with_the_keys_of_another_gateway_a_grant_still_leads_to_its_own_namespace_only(
    tenants: tuple[Tenant, Tenant],
) -> None:
    """An administrator has copied the key ring, or a tenant has signed a grant for a namespace that is not its own."""
    nlp, vision = tenants
    status, reason = await vision.site.describe(nlp.workflows.job.id, *vision.site.headers(nlp.grant))
    assert status is grpc.StatusCode.PERMISSION_DENIED
    assert f"does not serve the namespace '{nlp.namespace}'" in reason


async def test_the_worker_of_one_tenant_decodes_nothing_of_another(
    tenants: tuple[Tenant, Tenant], caplog: pytest.LogCaptureFixture
) -> None:
    """A user with access to both namespaces sends a payload of one tenant to the job of the other."""
    nlp, vision = tenants
    await signal(await nlp.agent(), nlp.namespace, nlp.workflows.job.id, REPORT)
    await nlp.workflows.expect(nlp.workflows.job, "finished")
    [payload] = [
        event.workflow_execution_signaled_event_attributes.input.payloads[0]
        async for event in nlp.workflows.job.fetch_history_events()
        if event.event_type == EventType.EVENT_TYPE_WORKFLOW_EXECUTION_SIGNALED
    ]
    assert payload.metadata["encoding"] == ENCRYPTED
    await signal(vision.workflows.client, vision.namespace, vision.workflows.job.id, payload)
    assert nlp.encryption.keys
    await eventually(lambda: failed_task(vision.workflows.job))
    assert nlp.encryption.keys.newest.id in caplog.text
    assert "does not have" in caplog.text
    await vision.workflows.job.terminate("over")


async def failed_task(handle: WorkflowHandle[Any, Any]) -> bool:
    """Whether the worker has failed to handle a task of the workflow."""
    failed = EventType.EVENT_TYPE_WORKFLOW_TASK_FAILED
    return failed in [event.event_type async for event in handle.fetch_history_events()]
