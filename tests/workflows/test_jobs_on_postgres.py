"""Tests of many jobs at once on Temporal's real server with PostgreSQL, as docs/install-kubernetes.md has it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import create_engine, text
from temporalio.client import Client, WorkflowHandle

from perdure.contract import NodeRequest
from tests.support.configured_server import configured_server, pools_of_all_processes
from tests.support.postgres import PostgresServer
from tests.support.waiting import eventually
from tests.workflows.fleet import Fleet, job_spec, running_fleet, submit

pytestmark = [pytest.mark.long("cluster-faults"), pytest.mark.timeout(900)]

JOBS = 100
NODES = 2
TOGETHER = 20
"""Jobs that are submitted at once."""

CONNECTIONS = 8
"""Of all agents to the server."""

PATIENCE = 400.0
"""Seconds: two cores have all of it to do, the server, its database, the worker and the agents."""

REFUSALS = ("too many clients already", "remaining connection slots")
"""What PostgreSQL writes where it has no connection left."""


class FleetOfASite(Fleet):
    """Its agents share a few connections, since each takes a thread and memory here."""

    def __init__(self, client: Client, task_queue: str) -> None:
        super().__init__(client, task_queue)
        self.connections: list[Client] = []
        self._turns = count()

    async def agent_client(self, request: NodeRequest) -> Client:
        return self.connections[next(self._turns) % len(self.connections)]

    def in_world(self, job: WorkflowHandle[Any, Any], generation: int) -> bool:
        """Whether all nodes of the job have entered this world or a later one."""
        newest = {rank: node for (known, rank, _), node in sorted(self.nodes.items()) if known == job.id}
        return len(newest) == NODES and all(node.entered >= generation for node in newest.values())


@pytest.fixture
async def site(
    temporal_programs: Mapping[str, Path], tmp_path: Path
) -> AsyncIterator[tuple[FleetOfASite, PostgresServer]]:
    async with AsyncExitStack() as stack:
        server, database = await stack.enter_async_context(configured_server(temporal_programs, tmp_path))
        await server.prepare("default")
        fleet = await stack.enter_async_context(running_fleet(await server.client(), fleet_type=FleetOfASite))
        fleet.connections = [await server.client() for _ in range(CONNECTIONS)]
        yield fleet, database


def refused(database: PostgresServer) -> list[str]:
    """The connections that the database has refused."""
    return [line for line in database.log.read_text().splitlines() if any(words in line for words in REFUSALS)]


def connections(database: PostgresServer) -> int:
    """How many connections the server's processes keep."""
    engine = create_engine(database.url)
    with engine.connect() as connection:
        clients = "SELECT count(*) FROM pg_stat_activity WHERE datname LIKE 'temporal%'"
        found = connection.scalar(text(clients))
    engine.dispose()
    return found or 0


async def test_a_hundred_jobs_form_and_recover_at_once_and_the_database_refuses_no_connection(
    site: tuple[FleetOfASite, PostgresServer],
) -> None:
    fleet, database = site
    limit = asyncio.Semaphore(TOGETHER)

    async def submitted() -> WorkflowHandle[Any, Any]:
        async with limit:
            return await submit(fleet, job_spec(str(NODES)))

    async def all_in_world(generation: int) -> None:
        def late() -> str:
            waiting = [job.id for job in jobs if not fleet.in_world(job, generation)]
            return f"{len(waiting)} of {JOBS} jobs are not in world {generation}; refused: {len(refused(database))}"

        await eventually(lambda: all(fleet.in_world(job, generation) for job in jobs), within=PATIENCE, what=late)

    jobs = await asyncio.gather(*(submitted() for _ in range(JOBS)))
    await all_in_world(1)
    await asyncio.gather(*(fleet.node(job.id, 0).rank_dies() for job in jobs))
    await all_in_world(2)
    assert refused(database) == []
    assert connections(database) <= pools_of_all_processes()
