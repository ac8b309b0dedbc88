"""Tests of machines that join through the gateway: what a ticket is good for, and what a thief gets from one.

Jobs, groups, server and gateway are real; agents' processes are played, with the real SDK through the gateway.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, suppress
from datetime import UTC, datetime, timedelta
from typing import Any

import grpc
import pytest
import temporalio.api.workflowservice.v1 as service
from temporalio.api.common.v1 import Payload, WorkflowExecution
from temporalio.client import Client as TemporalClient
from temporalio.client import WorkflowHandle
from temporalio.service import RPCError, RPCStatusCode

from perdure.agent.job_liveness import JobLiveness, query_job_liveness
from perdure.base.credentials.grants import Grant
from perdure.base.credentials.names import GRANT_HEADER, MACHINES_SERVICE, TICKET_HEADER, TOKEN_HEADER
from perdure.base.credentials.tickets import new_secret
from perdure.base.errors import JoinRefused, NotPermitted
from perdure.client.client import Client
from perdure.contract import (
    DepartureCall,
    JobPhase,
    JoinAnswer,
    JoinRefusal,
    JoinRequest,
    Message,
    NodeRequest,
    PlaceCall,
    ReasonRequest,
    RelaunchRequest,
    ResultCall,
)
from perdure.contract.names import store_workflow_id
from perdure.gateway.limits import JOIN_BYTES, NEWCOMERS
from perdure.join.gateway import GatewayJobConnection
from perdure.join.ticket_file import TicketFile
from tests.gateway.site import GatewaySite
from tests.support.waiting import DEADLINE, eventually
from tests.workflows.fleet import Fleet, running_fleet, submit
from tests.workflows.jobs import running, until
from tests.workflows.joiners import WAITING, JoiningNode, asks, joined_spec

Job = WorkflowHandle[Any, Any]


class GatewayFleet(Fleet):
    """Agents of machines connect to the gateway."""

    site: GatewaySite
    machines: dict[str, GatewayJobConnection]

    async def agent_client(self, request: NodeRequest) -> TemporalClient:
        return await agent_client(self.site, self.machines[request.node.token])


async def agent_client(site: GatewaySite, machine: GatewayJobConnection) -> TemporalClient:
    """The connection of a machine's agent, with what the machine hands it."""
    grant, token = _proofs(machine)
    return await site.client(Grant.verify(grant, site.keyring.signing_keys), token, lazy=False)


def _proofs(machine: GatewayJobConnection) -> tuple[str, str]:
    """The grant and the token that the machine hands its agent."""
    connection = machine.agent_connection()
    assert connection.gateway
    assert connection.token
    return connection.gateway.grant, connection.token.get_secret_value()


@pytest.fixture
async def fleet(temporal_client: TemporalClient, site: GatewaySite) -> AsyncIterator[GatewayFleet]:
    """Opens places for machines."""
    async with running_fleet(temporal_client, fleet_type=GatewayFleet) as fleet:
        fleet.pending = dict.fromkeys(range(8), WAITING)
        fleet.site, fleet.machines = site, {}
        yield fleet


class Owner:
    """The owner of jobs, and machines with its tickets."""

    def __init__(self, fleet: GatewayFleet, site: GatewaySite, closing: AsyncExitStack) -> None:
        self.fleet, self.site = fleet, site
        self.client = Client(temporal=fleet.client)
        self._closing = closing

    async def job(self, nodes: str = "1") -> Job:
        job = await submit(self.fleet, joined_spec(nodes))
        await until(job, lambda status: "perdure join" in status.next_action)
        return job

    async def ticket(self, job: Job, *, nodes: int = 1, lifetime: timedelta = timedelta(hours=1)) -> TicketFile:
        namespace, name = job.id.split("/")[1:]
        issued = await self.client.issue_ticket(name, nodes=nodes, lifetime=lifetime, namespace=namespace)
        return TicketFile(
            job=name,
            namespace=namespace,
            id=issued.id,
            secret=issued.secret,
            nodes=issued.nodes,
            expires_at=issued.expires_at,
            gateway=self.site.address,
            authority=self.site.keyring.authority.certificate,
        )

    def machine(self, ticket: TicketFile) -> GatewayJobConnection:
        """Another machine with this ticket."""
        machine = GatewayJobConnection(self.site.address, ticket)
        self._closing.push_async_callback(machine.close)
        return machine

    async def place(self, machine: GatewayJobConnection, request: JoinRequest) -> NodeRequest:
        """The place that it is given."""

        async def given() -> NodeRequest | None:
            answer = await machine.request_place(request)
            assert isinstance(answer, JoinAnswer), answer
            return answer.node

        place = await eventually(given, what=f"a place for {request.node_id}")
        self.fleet.machines[place.node.token] = machine
        return place

    async def trains(self, machine: GatewayJobConnection, request: JoinRequest) -> JoiningNode:
        """The machine with its agent."""
        node = JoiningNode(self.fleet, await self.place(machine, request))
        self.fleet.started(node)
        await node.start()
        return node


@pytest.fixture
async def owner(fleet: GatewayFleet, site: GatewaySite) -> AsyncIterator[Owner]:
    async with AsyncExitStack() as closing:
        yield Owner(fleet, site, closing)


async def refused(machine: GatewayJobConnection, request: JoinRequest, kind: JoinRefusal) -> str:
    with pytest.raises(JoinRefused) as refusal:
        await machine.request_place(request)
    assert refusal.value.kind == kind
    return str(refusal.value)


async def test_machines_with_a_ticket_train_and_learn_the_result(owner: Owner) -> None:
    job = await owner.job("2")
    ticket = await owner.ticket(job, nodes=2)
    machines = [owner.machine(ticket) for _ in range(2)]
    nodes = [await owner.trains(machine, asks(name)) for machine, name in zip(machines, "ab", strict=True)]
    await running(job, nodes=2)
    assert await machines[0].result(nodes[0].request) is None
    await nodes[1].die()
    await machines[1].report_departure(nodes[1].request, time=datetime.now(UTC), reason="got SIGTERM")
    await until(job, lambda status: status.phase is JobPhase.WAITING)
    again = await owner.trains(machines[1], asks("b", stay=2))
    assert (again.rank, again.incarnation) == (nodes[1].rank, 2)
    await running(job, nodes=2)
    for node in (nodes[0], again):
        await node.finish()
    result = await machines[0].wait()
    assert result.phase is JobPhase.SUCCEEDED
    assert await machines[0].result(nodes[0].request) == result
    # One that comes too late learns it, too.
    assert await owner.machine(ticket).request_place(asks("c")) == result


async def test_no_ticket_no_place(owner: Owner, site: GatewaySite) -> None:
    job, other = await owner.job(), await owner.job()
    ticket, others = await owner.ticket(job), await owner.ticket(other)
    made_up = new_secret()
    for forged in (
        ticket.model_copy(update={"secret": others.secret}),
        ticket.model_copy(update={"job": others.job}),
        ticket.model_copy(update={"job": "no-such-job"}),
        ticket.model_copy(update={"namespace": "elsewhere"}),
        ticket.model_copy(update={"secret": type(ticket.secret)(made_up)}),
        # What the job's history shows of it.
        ticket.model_copy(update={"secret": type(ticket.secret)(ticket.id)}),
    ):
        with pytest.raises(NotPermitted, match="ticket"):
            await owner.machine(forged).request_place(asks("thief"))
    call = PlaceCall(namespace=ticket.namespace, job=ticket.job, request=asks("thief"))
    secret = (TICKET_HEADER, ticket.secret.get_secret_value())
    assert await send(site, "Join", call, (TOKEN_HEADER, "Bearer x")) == "UNAUTHENTICATED"
    assert await send(site, "Join", call, secret) == "UNAUTHENTICATED"
    large = call.model_copy(update={"request": asks("thief", command=("x" * JOIN_BYTES,))})
    assert await send(site, "Join", large, secret, (TOKEN_HEADER, "Bearer x")) == "PERMISSION_DENIED"


async def send(site: GatewaySite, method: str, call: Message, *headers: tuple[str, str]) -> str:
    """The status of a call of the gateway's own service."""
    async with site.channel() as channel:
        return await send_over(channel, method, call, *headers)


async def send_over(channel: grpc.aio.Channel, method: str, call: Message, *headers: tuple[str, str]) -> str:
    unary: Any = channel.unary_unary(f"/{MACHINES_SERVICE}/{method}")
    try:
        await unary(call.model_dump_json().encode(), metadata=headers, timeout=DEADLINE)
    except grpc.aio.AioRpcError as error:
        return error.code().name
    return "OK"


async def test_a_stolen_ticket_is_worth_its_nodes_of_its_job_until_it_expires(owner: Owner) -> None:
    job = await owner.job("3")
    ticket = await owner.ticket(job, nodes=1)
    machine, thief = owner.machine(ticket), owner.machine(ticket)
    place = await owner.place(machine, asks("a"))
    assert "is for 1 node," in await refused(thief, asks("thief"), JoinRefusal.NO_PLACE)
    # Another ticket gives no power over the machine, whatever names its bearer takes.
    other = owner.machine(await owner.ticket(job, nodes=1))
    elsewhere = await owner.place(other, asks("a"))
    assert elsewhere.node.rank != place.node.rank
    answer = await machine.request_place(asks("a"))
    assert isinstance(answer, JoinAnswer)
    assert answer.node == place

    expired, known = await joined_before_it_expires(owner, job, asks("c"))
    await eventually(lambda: datetime.now(UTC) > expired.expires_at)
    assert "expired" in await refused(owner.machine(expired), asks("d"), JoinRefusal.TICKET)
    # A machine that joined before may come back: it proves that by its token.
    answer = await known.request_place(asks("c", stay=2))
    assert isinstance(answer, JoinAnswer)


async def joined_before_it_expires(
    owner: Owner, job: Job, request: JoinRequest
) -> tuple[TicketFile, GatewayJobConnection]:
    """A ticket that expires soon, and a machine that has joined with it: how soon is, depends on the machine's load."""
    for seconds in (3, 12, 48):
        ticket = await owner.ticket(job, nodes=2, lifetime=timedelta(seconds=seconds))
        machine = owner.machine(ticket)
        with suppress(JoinRefused):
            await owner.place(machine, request)
            return ticket, machine
    raise AssertionError("no machine has joined in time")


async def test_a_session_is_the_digest_of_the_machines_own_token(owner: Owner) -> None:
    """Who has the same ticket, and has read the session in a history, gets no grant for the machine's incarnation."""
    job = await owner.job()
    ticket = await owner.ticket(job)
    machine, thief = owner.machine(ticket), owner.machine(ticket)
    place = await owner.place(machine, asks("a"))
    thief.session = machine.session
    request = asks("a").model_copy(update={"session": machine.session, "stay": 1})
    answer = await thief.request_place(request)
    # It counts as a new process under the same node ID: it has displaced the machine, and the job records that.
    assert isinstance(answer, JoinAnswer)
    assert answer.node != place
    await refused(machine, asks("a"), JoinRefusal.DISPLACED)


async def test_a_revoked_ticket_takes_its_machines_places(owner: Owner) -> None:
    job = await owner.job("1:2")
    kept, lost = await owner.ticket(job), await owner.ticket(job)
    machines = [owner.machine(ticket) for ticket in (kept, lost)]
    first, second = [await owner.trains(machine, asks(name)) for machine, name in zip(machines, "ab", strict=True)]
    known = await running(job, nodes=2)
    await owner.client.revoke_ticket(lost.job, lost.id)
    await until(job, lambda status: status.generation > known.generation and status.nodes == 1)
    await eventually(lambda: first.worlds[-1].nodes == 1)
    await refused(machines[1], asks("b", stay=2), JoinRefusal.TICKET)
    await second.die()
    await job.cancel()


async def test_a_machine_that_lost_its_place_reports_nothing_more(
    owner: Owner, site: GatewaySite, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its grant lets it receive the command to stop, and learn whether the job is over."""
    monkeypatch.setattr("perdure.gateway.memberships._VALID_SECONDS", 0.0)
    job = await owner.job()
    machine = owner.machine(await owner.ticket(job))
    node = await owner.trains(machine, asks("a"))
    await running(job, nodes=1)
    client, place = await agent_client(site, machine), node.request
    await node.die()
    await machine.report_departure(place, time=datetime.now(UTC), reason="stolen")
    await until(job, lambda status: status.phase is not JobPhase.RUNNING)

    async def denied(call: Any) -> None:
        with pytest.raises(RPCError, match="does not have this place any more") as refusal:
            await call
        assert refusal.value.status is RPCStatusCode.UNAUTHENTICATED

    namespace = site.server.namespace
    message = Payload(
        metadata={"encoding": b"json/plain"},
        data=json.dumps({"sender": place.node.model_dump(), "sequence": 99}).encode(),
    )
    for workflow, signal in ((place.job_id, "failure"), (place.group_id, "joined")):
        request = service.SignalWorkflowExecutionRequest(
            namespace=namespace, workflow_execution=WorkflowExecution(workflow_id=workflow), signal_name=signal
        )
        request.input.payloads.append(message)
        await denied(client.workflow_service.signal_workflow_execution(request))
    update = service.UpdateWorkflowExecutionRequest(namespace=namespace)
    update.workflow_execution.workflow_id = store_workflow_id(place.job_id, place.node.uid)
    update.request.input.name = "call"
    update.request.input.args.payloads.append(message)
    await denied(client.workflow_service.update_workflow_execution(update))
    assert await liveness(client, place) is JobLiveness.OPEN
    await job.terminate("over")
    assert await liveness(client, place) is JobLiveness.CLOSED


async def liveness(client: TemporalClient, place: NodeRequest) -> JobLiveness:
    return await query_job_liveness(
        client, job_id=place.job_id, first_run_id=place.job_first_run_id, rpc_timeout=timedelta(seconds=DEADLINE)
    )


async def test_a_machine_has_the_rights_of_its_own_node_only(owner: Owner, site: GatewaySite) -> None:
    job, victim = await owner.job("2"), await owner.job()
    ticket = await owner.ticket(job, nodes=2)
    machine, neighbour = owner.machine(ticket), owner.machine(ticket)
    await owner.trains(machine, asks("a"))
    others = await owner.place(neighbour, asks("b"))
    client = await agent_client(site, machine)
    handle = client.get_workflow_handle(job.id)
    for update, argument in (
        ("join", asks("c")),
        ("relaunch_node", RelaunchRequest(rank=others.node.rank)),
        ("suspend", ReasonRequest()),
        ("issue_ticket", {"id": "x" * 12, "digest": "0" * 64, "nodes": 9, "lifetime": 3600}),
    ):
        with pytest.raises(RPCError, match=r"is neither a dataset of the node.s own job") as refusal:
            await handle.execute_update(update, argument)
        assert refusal.value.status is RPCStatusCode.PERMISSION_DENIED
    with pytest.raises(RPCError) as unknown:
        await handle.query("machines")
    assert unknown.value.status is RPCStatusCode.UNIMPLEMENTED

    own, foreign = (_proofs(one) for one in (machine, neighbour))
    # The grant of a neighbour, with the token of this machine, and the other way round.
    for grant, token in ((foreign[0], own[1]), (own[0], foreign[1])):
        headers = ((GRANT_HEADER, grant), (TOKEN_HEADER, f"Bearer {token}"))
        assert (await site.describe(job.id, *headers))[0] is grpc.StatusCode.UNAUTHENTICATED
        leave = DepartureCall(time=datetime.now(UTC), reason="forged")
        assert await send(site, "Leave", leave, *headers) == "UNAUTHENTICATED"
    proofs = ((GRANT_HEADER, own[0]), (TOKEN_HEADER, f"Bearer {own[1]}"))
    assert (await site.describe(victim.id, *proofs))[0] is grpc.StatusCode.PERMISSION_DENIED
    described = await victim.describe()
    wrong = ResultCall(
        namespace="default",
        job=victim.id.rpartition("/")[2],
        first_run_id=described.raw_description.workflow_execution_info.first_run_id,
    )
    assert await send(site, "Result", wrong, *proofs) == "PERMISSION_DENIED"
    await asyncio.gather(job.cancel(), victim.cancel())


async def test_who_tries_tickets_is_held_back_and_machines_are_not(owner: Owner, site: GatewaySite) -> None:
    job = await owner.job("2")
    ticket = await owner.ticket(job, nodes=2)
    machine = owner.machine(ticket)
    await owner.trains(machine, asks("a"))
    call = PlaceCall(namespace=ticket.namespace, job=ticket.job, request=asks("thief"))
    async with site.channel() as channel:
        proofs = (((TICKET_HEADER, new_secret()), (TOKEN_HEADER, "Bearer x")) for _ in range(NEWCOMERS.at_once))
        tries = [asyncio.create_task(send_over(channel, "Join", call, *headers)) for headers in proofs]
        await owner.place(owner.machine(ticket), asks("b"))
        assert set(await asyncio.gather(*tries)) <= {"UNAUTHENTICATED", "RESOURCE_EXHAUSTED", "UNAVAILABLE"}
    await job.cancel()
