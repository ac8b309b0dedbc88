"""Tests of real agents behind a real gateway: they work as they do without one, also while gateways are replaced."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import grpc
import pytest

from perdure.base.credentials.keyring import Keyring
from perdure.contract import Destination
from perdure.gateway import calls
from perdure.gateway.metrics import Reason
from perdure_training.node_api.addresses import host_and_port
from tests.agent.harness import RunningAgent, Workflows, rank_exit
from tests.gateway.site import GatewaySite
from tests.support.ports import free_port, has_ipv6
from tests.support.waiting import DEADLINE, eventually


@asynccontextmanager
async def agent_of(site: GatewaySite, workflows: Workflows, folder: Path) -> AsyncIterator[RunningAgent]:
    agent = site.agent(workflows, folder)
    await agent.start()
    try:
        yield agent
    finally:
        await agent.close()


@pytest.fixture
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("n")


async def test_an_agent_reports_and_obeys_through_the_gateway(
    site: GatewaySite, workflows: Workflows, folder: Path
) -> None:
    async with agent_of(site, workflows, folder) as agent:
        [joined] = await workflows.expect(workflows.group, "joined")
        assert joined["sender"] == agent.node.model_dump()
        lease = await agent.start_lease(epoch=1)
        await workflows.expect(workflows.group, "lease_taken")
        answer = await agent.desire(world=agent.world(1))
        assert answer["accepted"]
        await workflows.beats(3)
        assert not lease.done()
        await workflows.group.terminate("over")
        await asyncio.gather(lease, return_exceptions=True)


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
async def test_a_gateway_without_a_host_is_reached_over_both_families(
    host: str, site: GatewaySite, workflows: Workflows, folder: Path
) -> None:
    if ":" in host and not has_ipv6():
        pytest.skip("this machine has no IPv6")
    await site.stop()
    port = free_port()
    site.address, site.listen = host_and_port(host, port), f":{port}"
    await site.start()
    async with agent_of(site, workflows, folder):
        await workflows.expect(workflows.group, "joined")


async def test_the_agent_learns_that_its_job_has_closed(site: GatewaySite, workflows: Workflows, folder: Path) -> None:
    async with agent_of(site, workflows, folder) as agent:
        await workflows.expect(workflows.group, "joined")
        await agent.launcher_hello()
        version = (await agent.get("/v1/launcher/desired?version=0&wait=0"))["version"]
        await workflows.job.terminate("over")
        await workflows.group.terminate("over")
        desired = await asyncio.wait_for(agent.get(f"/v1/launcher/desired?version={version}&wait=60"), DEADLINE)
        assert (desired["exit"], desired["reason"]) == (True, "the job has closed")


async def test_a_lease_survives_a_gateway_that_is_replaced(
    site: GatewaySite, workflows: Workflows, folder: Path
) -> None:
    async with agent_of(site, workflows, folder) as agent:
        await workflows.expect(workflows.group, "joined")
        lease = await agent.start_lease(epoch=1)
        await workflows.expect(workflows.group, "lease_taken")
        for _ in range(3):
            await site.stop()
            await site.start()
            await workflows.beats(2)
        assert not lease.done()
        answer = await agent.desire(world=agent.world(1))
        assert answer["accepted"]
        assert len(await workflows.seen(workflows.group, "lease_taken")) == 1
        await workflows.group.terminate("over")
        await asyncio.gather(lease, return_exceptions=True)


async def test_signing_keys_are_replaced_while_a_lease_is_held(
    site: GatewaySite, workflows: Workflows, folder: Path
) -> None:
    """In the two steps of docs/gateway.md: its grant and its task are signed with the old key all the time."""
    async with agent_of(site, workflows, folder) as agent:
        await workflows.expect(workflows.group, "joined")
        lease = await agent.start_lease(epoch=1)
        await workflows.expect(workflows.group, "lease_taken")
        [old], [new] = site.keyring.signing_keys, Keyring.new().signing_keys
        for generation, keys in enumerate(((old, new), (new, old)), start=1):
            site.keyring = replace(site.keyring, signing_keys=keys)
            await site.stop()
            await site.start()
            await workflows.beats(2)
            assert (await agent.desire(world=agent.world(generation)))["accepted"]
        assert not lease.done()
        assert len(await workflows.seen(workflows.group, "lease_taken")) == 1
        # A node that is made from now on is granted with the new key, which alone is then enough.
        grant = site.grant(workflows)
        fresh = site.headers(grant)
        site.keyring = replace(site.keyring, signing_keys=(new,))
        await site.stop()
        await site.start()
        assert (await site.describe(workflows.job.id, *fresh))[0] is grpc.StatusCode.OK
        await workflows.group.terminate("over")
        await asyncio.gather(lease, return_exceptions=True)


async def test_what_happens_while_no_gateway_runs_is_reported_afterwards(
    site: GatewaySite, workflows: Workflows, folder: Path
) -> None:
    async with agent_of(site, workflows, folder) as agent:
        await workflows.expect(workflows.group, "joined")
        await site.stop()
        await agent.launcher_hello()
        await agent.handler_hello()
        await agent.ready(0)
        await site.start()
        [ready] = await workflows.expect(workflows.group, "ready")
        assert ready["sender"] == agent.node.model_dump()


async def test_a_report_that_a_gateway_of_an_older_release_does_not_know_holds_up_no_failure(
    site: GatewaySite, workflows: Workflows, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    known = calls.MESSAGES[Destination.JOB]
    monkeypatch.setitem(calls.MESSAGES, Destination.JOB, known - {"finished"})
    async with agent_of(site, workflows, folder) as agent:
        await workflows.expect(workflows.group, "joined")
        await agent.desire(world=agent.world(1))
        await agent.post("/v1/rendezvous/finished", generation=1, time=time.time())
        refusal = ("perdure_gateway_refused_total", {"reason": Reason.NOT_ALLOWED.value})
        await eventually(lambda: site.metrics.registry.get_sample_value(*refusal))
        await agent.ready(1, [rank_exit()])
        await workflows.expect(workflows.job, "failure")
        assert not await workflows.seen(workflows.job, "finished")
        monkeypatch.setitem(calls.MESSAGES, Destination.JOB, known)
        await workflows.expect(workflows.job, "finished")


async def test_an_agent_uses_a_renewed_token(
    site: GatewaySite, workflows: Workflows, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with agent_of(site, workflows, folder) as agent:
        await workflows.expect(workflows.group, "joined")
        assert agent.config.gateway
        [old] = site.reviewer.pods
        pod = site.reviewer.pods.pop(old)
        agent.config.gateway.token_path.write_text("renewed")
        site.reviewer.pods["renewed"] = pod
        await agent.start_lease(1)
        await eventually(lambda: "renewed" in site.reviewer.reviews)
        await workflows.beats(2)
