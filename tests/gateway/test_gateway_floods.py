"""Tests of an agent that floods the gateway, and of callers without proofs."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, suppress

import grpc
import pytest
import temporalio.api.workflowservice.v1 as service
from temporalio.api.common.v1 import WorkflowExecution
from temporalio.service import RPCError, RPCStatusCode

from perdure.base.credentials.names import GRANT_HEADER, JOIN, MACHINES_SERVICE, TOKEN_HEADER
from perdure.gateway.calls import SERVICE
from perdure.gateway.limits import AGENT, Bodies, BodyLimit
from tests.agent.harness import Workflows
from tests.gateway.attacker import Attacker
from tests.gateway.site import GatewaySite
from tests.support.waiting import DEADLINE

OWN = {"uid": "aaaaaaaa", "role": "worker", "rank": 0, "incarnation": 1, "token": "t"}


async def test_one_that_floods_is_held_back(attacker: Attacker, workflows: Workflows) -> None:
    request = service.DescribeWorkflowExecutionRequest(
        namespace=attacker.namespace, execution=WorkflowExecution(workflow_id=workflows.job.id)
    )
    describe = attacker.client.workflow_service.describe_workflow_execution
    tries = int(2 * AGENT.burst)
    answers = await asyncio.gather(*(describe(request) for _ in range(tries)), return_exceptions=True)
    refused = [one for one in answers if isinstance(one, RPCError)]
    # Unavailable: the connection has no room for more calls that wait for their refusal.
    assert len(refused) == sum(isinstance(one, Exception) for one in answers)
    assert {one.status for one in refused} <= {RPCStatusCode.RESOURCE_EXHAUSTED, RPCStatusCode.UNAVAILABLE}
    assert len(refused) > AGENT.at_once
    assert tries - len(refused) >= AGENT.at_once


async def test_nothing_is_received_of_one_who_has_proven_nothing(site: GatewaySite, workflows: Workflows) -> None:
    """Bodies that wait for their refusal would fill the gateway's memory, and end it with all its leases."""
    never = asyncio.Event()

    async def body() -> AsyncIterator[bytes]:
        await never.wait()
        yield b""

    genuine = site.headers(site.grant(workflows))
    async with site.channel() as channel:
        call = channel.stream_unary(f"/{SERVICE}/SignalWorkflowExecution")
        for headers in ((), genuine[:1], (genuine[0], (TOKEN_HEADER, "Bearer x"))):
            with pytest.raises(grpc.aio.AioRpcError) as refusal:
                await call(body(), metadata=headers, timeout=DEADLINE)
            assert refusal.value.code() is grpc.StatusCode.UNAUTHENTICATED


async def test_a_request_to_join_that_does_not_arrive_is_given_up(site: GatewaySite) -> None:
    """It is read before it is known whose it is: those that never end would fill the gateway's memory."""
    assert site._gateway
    site._gateway._bodies = Bodies(BodyLimit(per_address=1, total=1, within=0.01))
    never = asyncio.Event()

    async def body() -> AsyncIterator[bytes]:
        await never.wait()
        yield b""

    async with site.channel() as channel:
        call = channel.stream_unary(f"/{MACHINES_SERVICE}/{JOIN}")
        with pytest.raises(grpc.aio.AioRpcError) as refusal:
            await call(body(), timeout=DEADLINE)
        assert refusal.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED


async def test_one_that_sends_too_much_is_held_back(attacker: Attacker, workflows: Workflows) -> None:
    """The gateway serializes each message again, and serves no other call meanwhile."""
    message = {"sender": OWN, "text": "x" * 1_000_000}
    sent = (attacker.signal(workflows.job.id, "unused", message) for _ in range(6))
    refusals = [str(one) for one in await asyncio.gather(*sent, return_exceptions=True)]
    assert sum("bytes a second" in one for one in refusals) >= 2


async def test_what_a_caller_sends_is_neither_logged_nor_kept(
    attacker: Attacker, caplog: pytest.LogCaptureFixture
) -> None:
    await attacker.refused(attacker.poll("q" * 200_000), RPCStatusCode.PERMISSION_DENIED, "task_queue")
    assert "rejected PollActivityTaskQueue" in caplog.text
    assert len(caplog.text) < 5_000


async def test_who_has_read_a_grant_cannot_use_up_its_share(site: GatewaySite, workflows: Workflows) -> None:
    grant = site.grant(workflows)
    own = site.headers(grant)
    await site.describe(workflows.job.id, *own)
    tries = int(2 * AGENT.burst)
    flood = [
        asyncio.create_task(site.describe(workflows.job.id, *site.headers(grant, "stolen"))) for _ in range(tries // 8)
    ]
    for _ in range(5):
        assert await site.describe(workflows.job.id, *own) == (grpc.StatusCode.OK, "")
    assert {status for status, _ in await asyncio.gather(*flood)} == {grpc.StatusCode.UNAUTHENTICATED}
    # One review of the stolen token served all of them.
    assert site.reviewer.reviews.count("stolen") == 1


async def test_leases_hold_while_an_agent_and_strangers_flood(
    site: GatewaySite, attacker: Attacker, workflows: Workflows, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """As fast as the machine allows, over several connections, with and without proofs."""
    agent = site.agent(workflows, tmp_path_factory.mktemp("n"))
    await agent.start()
    floods: list[asyncio.Task[None]] = []
    try:
        await workflows.expect(workflows.group, "joined")
        lease = await agent.start_lease(epoch=1)
        await workflows.expect(workflows.group, "lease_taken")
        headers = site.headers(site.grant(workflows, uid="aaaaaaaa"))
        async with AsyncExitStack() as channels:
            for proofs in ((), headers, ((GRANT_HEADER, "x"), (TOKEN_HEADER, "Bearer x"))):
                channel = await channels.enter_async_context(site.channel())
                floods += [asyncio.create_task(_flood(channel, proofs)) for _ in range(100)]
            await workflows.beats(3)
            assert (await agent.desire(world=agent.world(1)))["accepted"]
            await workflows.beats(3)
            for flood in floods:
                flood.cancel()
            await asyncio.gather(*floods, return_exceptions=True)
        assert not lease.done()
        assert len(await workflows.seen(workflows.group, "lease_taken")) == 1
        await workflows.group.terminate("over")
        await asyncio.gather(lease, return_exceptions=True)
    finally:
        await agent.close()


async def _flood(channel: grpc.aio.Channel, headers: tuple[tuple[str, str], ...]) -> None:
    """Repeats a call that is refused."""
    call: Callable[..., Awaitable[bytes]] = channel.unary_unary(f"/{SERVICE}/DescribeWorkflowExecution")
    while True:
        with suppress(grpc.aio.AioRpcError):
            await call(b"", metadata=headers, timeout=DEADLINE)
