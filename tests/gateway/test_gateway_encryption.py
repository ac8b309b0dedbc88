"""Tests of a gateway with the site's keys: agents have none, and Temporal stores nothing that can be read."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from temporalio.client import Client, WorkflowHistory, WorkflowUpdateFailedError
from temporalio.exceptions import ApplicationError

from perdure.base.encryption.codec import PayloadEncryption, Plain
from perdure.base.encryption.keys import create_keys
from perdure.contract import CheckConnection, StoreAction
from tests.agent.harness import Workflows, recording
from tests.agent.test_agent_datasets import body, dataset, granted
from tests.agent.test_agent_store import answered, set_key, store_of
from tests.agent.test_agent_store import body as call
from tests.gateway.site import gateway_site
from tests.support.temporal_server import DevServer


async def stored(workflows: Workflows) -> str:
    """What the server has of both workflows, as text."""
    histories: list[WorkflowHistory] = [await one.fetch_history() for one in (workflows.job, workflows.group)]
    return "".join(str(event) for history in histories for event in history.events)


@pytest.fixture
def encryption(tmp_path: Path) -> PayloadEncryption:
    return PayloadEncryption.of(create_keys(tmp_path / "keys.json"), Plain.REFUSE)


async def test_agents_without_keys_work_and_the_server_reads_nothing(
    temporal_server: DevServer, encryption: PayloadEncryption, tmp_path_factory: pytest.TempPathFactory
) -> None:
    client = await Client.connect(
        temporal_server.address, namespace=temporal_server.namespace, data_converter=encryption.data_converter
    )
    encryption.use(client)
    async with (
        recording(temporal_server, client=client) as workflows,
        gateway_site(temporal_server, encryption) as site,
    ):
        agent = site.agent(workflows, tmp_path_factory.mktemp("n"))
        await agent.start()
        try:
            await workflows.expect(workflows.group, "joined")
            lease = await agent.start_lease(epoch=1)
            await workflows.expect(workflows.group, "lease_taken")
            assert (await agent.desire(world=agent.world(1)))["accepted"]
            async with dataset(workflows, agent.node.uid):
                assert await granted(agent, body(shards=1)) == ((0, 10),)
            async with store_of(workflows, agent.node.uid):
                waiting = asyncio.create_task(answered(agent, call(StoreAction.GET, "secret")))
                await answered(agent, set_key("secret"))
                assert (await waiting).values == (b"\xff",)
            # A command that fails: its message is encrypted like everything else.
            other = agent.node.model_copy(update={"incarnation": 2})
            with pytest.raises(WorkflowUpdateFailedError) as refused:
                await agent.command("check_connection", CheckConnection(node=other, address="192.0.2.1", port=9))
            refusal = root_of(refused.value)
            assert refusal.type == "WrongIncarnation"
            assert agent.node.path in refusal.message
            await workflows.beats(2)
            assert not lease.done()
            text = await stored(workflows)
            for secret in (agent.node.token, "192.0.2.1", "store_address", "agent_started_at", refusal.message):
                assert secret not in text, secret
            assert "binary/encrypted" in text
            await workflows.group.terminate("over")
            await asyncio.gather(lease, return_exceptions=True)
        finally:
            await agent.close()


def root_of(error: BaseException) -> ApplicationError:
    """The error that the agent raised."""
    while error.__cause__:
        error = error.__cause__
    assert isinstance(error, ApplicationError)
    return error


async def test_what_is_sent_past_the_gateway_is_dropped(
    temporal_server: DevServer, encryption: PayloadEncryption
) -> None:
    """An attacker who reaches the server and knows the names of workflows, but has no key."""
    client = await Client.connect(
        temporal_server.address, namespace=temporal_server.namespace, data_converter=encryption.data_converter
    )
    encryption.use(client)
    async with recording(temporal_server, client=client) as workflows:
        plain = await temporal_server.client()
        for name in ("failure", "finished"):
            await plain.get_workflow_handle(workflows.job.id).signal(name, {"sender": {}})
        await client.get_workflow_handle(workflows.job.id).signal("group_missing", {})
        await workflows.expect(workflows.job, "group_missing")
        assert [one.signal for one in await workflows.seen(workflows.job)] == ["group_missing"]
