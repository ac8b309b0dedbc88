"""Two hundred machines that join one job at the same moment, on a real server."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import pytest
from temporalio.client import Client

from perdure.activities.nodes.joined.machine import Machine
from perdure.client.joining import DirectJobConnection
from perdure.contract import JobResult
from perdure.join.machine import JoinOptions, MachineInJob
from tests.support.temporal_server import dev_server
from tests.workflows.fleet import Fleet, running_fleet, submit
from tests.workflows.joiners import WAITING, joined_spec
from tests.workflows.ways import AS_WORKERS_DO

MACHINES = 200


TEN = ("--dynamic-config-value", "history.maxInFlightUpdates=10")
"""The default of servers, and the limit of Temporal Cloud."""


@pytest.fixture
async def fleet(request: pytest.FixtureRequest, temporal_client: Client) -> AsyncIterator[Fleet]:
    """Opens places, and starts nothing by itself."""
    async with contextlib.AsyncExitStack() as stack:
        if request.param:
            temporal_client = await (await stack.enter_async_context(dev_server(options=request.param))).client()
        fleet = await stack.enter_async_context(running_fleet(temporal_client, **AS_WORKERS_DO))
        fleet.pending = dict.fromkeys(range(MACHINES), WAITING)
        yield fleet


@pytest.mark.long("workflows")
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    "fleet", [pytest.param((), id="own-server"), pytest.param(TEN, id="ten-at-a-time")], indirect=True
)
async def test_machines_that_join_at_once_all_get_places(fleet: Fleet) -> None:
    spec = joined_spec(str(MACHINES))
    handle = await submit(fleet, spec)

    async def connect() -> Client:
        return fleet.client

    endpoint = SimpleNamespace(address="server", is_local_default=False, task_queue=fleet.task_queue)
    client: Any = SimpleNamespace(connect=connect, endpoint=endpoint, namespace="default")

    async def joins(number: int) -> int:
        machine = Machine(node_id=f"machine-{number}", host=f"host-{number}", address="127.0.0.1")
        connection = DirectJobConnection(client, spec["name"], "default")
        joining = MachineInJob(connection, machine, JoinOptions(job=spec["name"]), say=lambda line: None)
        place = await joining._take_place()
        assert not isinstance(place, JobResult)
        return place.node.rank

    try:
        ranks = await asyncio.gather(*map(joins, range(MACHINES)))
    finally:
        with contextlib.suppress(Exception):
            await handle.terminate()
    assert sorted(ranks) == list(range(MACHINES))
