"""Two tenants on a Temporal server that asks for credentials: what works with them, and what another tenant's open."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path

import pytest
import temporalio.api.workflowservice.v1 as service
import yaml
from temporalio.api.taskqueue.v1 import TaskQueue
from temporalio.client import Client
from temporalio.service import RPCError

from perdure.base.encryption.keys import KEYS_FILE_VARIABLE, create_keys
from perdure.base.state_folder import StateFolder
from tests.support.authorizing_server import AuthorizingServer, Identities, authorizing_server
from tests.support.command_line import CommandLine, end_nodes

pytestmark = pytest.mark.long("cluster-faults")

TENANTS = ("nlp", "vision")


@pytest.fixture
async def server(temporal_program: Path, tmp_path: Path) -> AsyncIterator[AuthorizingServer]:
    async with authorizing_server(temporal_program, tmp_path) as server:
        await server.register(TENANTS)
        yield server


def line_of(server: AuthorizingServer, tenant: str, folder: Path) -> CommandLine:
    """A user or a worker of a tenant, with its token and its payload keys."""
    folder.mkdir()
    keys = create_keys(folder / "keys.json").path
    state = StateFolder(folder / "state")
    return CommandLine(
        folder,
        {
            **server.environment(tenant, server.identities.token(f"{tenant}:write")),
            KEYS_FILE_VARIABLE: str(keys),
            "PERDURE_STATE": str(state.path),
            "COLUMNS": "200",
        },
    )


@contextmanager
def worker(line: CommandLine) -> Iterator[None]:
    process = line.start("worker")
    try:
        yield
    finally:
        process.terminate()
        process.wait()
        end_nodes(line.folder)


async def test_each_tenant_runs_its_jobs_and_opens_nothing_of_the_other(
    server: AuthorizingServer, tmp_path: Path
) -> None:
    """Both run a job of the same name, on the same task queue."""
    lines = [line_of(server, tenant, tmp_path / tenant) for tenant in TENANTS]
    with worker(lines[0]), worker(lines[1]):
        for line, tenant in zip(lines, TENANTS, strict=True):
            command = [sys.executable, "-c", f"print('of {tenant}')"]
            line.write(
                "job.yaml", yaml.safe_dump({"name": "same", "roles": {"worker": {"nodes": 1, "command": command}}})
            )
        done = await asyncio.gather(*(asyncio.to_thread(line.run, "submit", "job.yaml", "--wait") for line in lines))
        assert [(one.code, one.err) for one in done if one.code] == []
        for line, tenant in zip(lines, TENANTS, strict=True):
            assert f"of {tenant}" in line.run("logs", "same").out
            assert [job["name"] for job in line.run("list", "-o", "json").json] == ["same"]
            checks = line.run("doctor").out
            assert f"namespace {tenant}, version" in checks, checks
        # Without administrators' rights, attributes for searching cannot be added: jobs run without them.
        for line, tenant, other in zip(lines, TENANTS, TENANTS[::-1], strict=True):
            await opens_nothing(await server.client(other, server.identities.token(f"{tenant}:write")))
            stranger = CommandLine(line.folder, {**line.environment, "TEMPORAL_NAMESPACE": other})
            listed = stranger.run("list")
            assert (listed.code != 0, "same" in listed.out) == (True, False), listed


@pytest.mark.parametrize("token", ["none", "expired", "forged", "of another namespace", "without permissions"])
async def test_nothing_opens_without_a_valid_token(server: AuthorizingServer, token: str) -> None:
    given = {
        "none": None,
        "expired": server.identities.token("nlp:write", valid=-timedelta(minutes=5)),
        "forged": Identities().token("nlp:write"),
        "of another namespace": server.identities.token("vision:admin"),
        "without permissions": server.identities.token(),
    }[token]
    await opens_nothing(await server.client("nlp", given))


async def opens_nothing(client: Client) -> None:
    """Reads, starts, signals and polls, as far as the server lets this client."""
    handle = client.get_workflow_handle("job/default/same")
    poll = service.PollWorkflowTaskQueueRequest(namespace=client.namespace, task_queue=TaskQueue(name="perdure"))
    for call in (
        client.count_workflows(),
        handle.describe(),
        handle.fetch_history(),
        handle.query("status"),
        handle.signal("failure", {}),
        handle.terminate(),
        client.start_workflow("TrainingJob", id="job/default/mine", task_queue="perdure"),
        client.workflow_service.poll_workflow_task_queue(poll),
    ):
        # A client whose token is not valid at all does not even connect.
        with pytest.raises((RPCError, RuntimeError), match="Request unauthorized"):
            await call
