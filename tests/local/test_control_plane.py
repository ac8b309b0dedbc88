"""Tests of the local control plane: started once, found again, killed and restarted, with real server and worker."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import uuid
from datetime import timedelta
from pathlib import Path

import psutil
import pytest
from temporalio.common import SearchAttributeKey

from perdure.activities.nodes.local.retention import KEPT_JOBS
from perdure.base.errors import ControlPlaneUnreachable
from perdure.base.state_folder import StateFolder
from perdure.cli.checks import Verdict, check_worker_code
from perdure.client.client import Client
from perdure.client.connection import connect, find_endpoint
from perdure.client.search_attributes import SEARCH_ATTRIBUTES, missing_search_attributes
from perdure.contract.names import WORKER_TASK_QUEUE
from perdure.local.code_version import code_version
from perdure.local.control_plane import LocalControlPlane, WorkerRecord
from perdure.local.ports import FIRST_PORT
from perdure.local.processes import DaemonRecord
from perdure.workflows import search_attributes
from tests.activities.local_nodes import LocalJob
from tests.docs.pages import ROOT
from tests.support.running_command import RunningCommand
from tests.support.waiting import eventually
from tests.support.warm_process import warm_interpreter


def start_command(output: Path, *arguments: str) -> RunningCommand:
    """Starts `tests.local.ensure_server`, which writes to a file."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    with output.open("wb") as file:
        interpreter = warm_interpreter("tests.support.command_imports")
        return RunningCommand(
            interpreter.start("tests.local.ensure_server", *arguments, environment=environment, output=file.fileno())
        )


async def test_the_server_is_started_once_with_all_that_jobs_need(state: StateFolder) -> None:
    said: list[str] = []
    plane = LocalControlPlane(state, report=said.append)
    endpoint = await plane.ensure_server()
    assert "Starting the Temporal server" in said[0]
    assert endpoint.is_local_default
    assert await LocalControlPlane(state).ensure_server() == endpoint
    server = plane.status().server
    assert server is not None
    process = server.process
    assert process is not None
    assert {"frontend.namespaceCount=20000", "history.maxInFlightUpdates=500"} <= set(process.cmdline())
    assert server.port > FIRST_PORT, "that one is for the user's own folder"
    assert os.getsid(server.pid) == server.pid, "a session of its own: Ctrl-C must not reach it"
    assert not await missing_search_attributes(await connect(endpoint))


def test_all_search_attributes_of_jobs_are_registered() -> None:
    keys = [value for value in vars(search_attributes).values() if isinstance(value, SearchAttributeKey)]
    assert {key.name for key in keys} == set(SEARCH_ATTRIBUTES)


async def test_several_commands_at_once_start_one_server(state: StateFolder, tmp_path: Path) -> None:
    answers = [tmp_path / str(number) for number in range(2)]
    commands = [start_command(answer) for answer in answers]
    assert [command.wait() for command in commands] == [0, 0]
    assert len({answer.read_text() for answer in answers}) == 1


async def test_servers_of_several_folders_that_start_at_once_find_ports_of_their_own(tmp_path: Path) -> None:
    planes = [LocalControlPlane(StateFolder(tmp_path / str(number))) for number in range(3)]
    try:
        endpoints = await asyncio.gather(*(plane.ensure_server() for plane in planes))
        assert len({endpoint.address for endpoint in endpoints}) == len(planes)
        for plane, endpoint in zip(planes, endpoints, strict=True):
            server = plane.status().server
            assert server is not None
            assert server.alive
            assert server.address == endpoint.address
    finally:
        for plane in planes:
            await plane.stop_server()


async def test_a_killed_or_stopped_server_comes_back_where_it_was_with_what_it_knew(state: StateFolder) -> None:
    plane = LocalControlPlane(state)
    endpoint = await plane.ensure_server()
    temporal = await connect(endpoint)
    workflow_id = f"kept-{uuid.uuid4()}"
    await temporal.start_workflow("Anything", id=workflow_id, task_queue=WORKER_TASK_QUEUE)
    plane.kill_server()
    assert plane.status().server is None
    with pytest.raises(ControlPlaneUnreachable, match="connection refused"):
        await connect(endpoint)
    assert await plane.ensure_server() == endpoint
    assert await plane.stop_server()
    assert not await plane.stop_server()
    assert await plane.ensure_server() == endpoint
    description = await (await connect(endpoint)).get_workflow_handle(workflow_id).describe()
    assert description.workflow_type == "Anything"


async def test_a_taken_port_is_explained(state: StateFolder) -> None:
    plane = LocalControlPlane(state)
    await plane.ensure_server()
    server = plane.status().server
    assert server is not None
    plane.kill_server()
    with socket.socket() as other:
        other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        other.bind(("127.0.0.1", server.port))
        other.listen()
        with pytest.raises(ControlPlaneUnreachable, match=f"port {server.port}.* taken by another process") as refused:
            await plane.ensure_server()
    assert "server.json" in refused.value.remedy


async def test_a_server_of_another_machine_that_shares_the_folder_is_left_alone(state: StateFolder) -> None:
    plane = LocalControlPlane(state)
    await plane.ensure_server()
    server = plane.status().server
    assert server is not None
    # As another machine sees it: no process of its own has this ID and start time.
    state.write(state.server_record, server.model_copy(update={"created": 0.0, "host": "login1"}).model_dump_json())
    with pytest.raises(ControlPlaneUnreachable, match="runs on login1") as refused:
        await plane.ensure_server()
    assert "PERDURE_STATE" in refused.value.remedy
    state.write(state.server_record, server.model_dump_json())
    assert plane.status().server == server
    plane.kill_server()
    state.write(state.server_record, server.model_copy(update={"host": "login1"}).model_dump_json())
    with pytest.raises(ControlPlaneUnreachable) as unreachable:
        await connect(find_endpoint(state=state))
    assert "started on login1" in unreachable.value.remedy
    await plane.ensure_server()


async def test_a_server_that_cannot_start_says_why(state: StateFolder) -> None:
    plane = LocalControlPlane(state)
    (state.temporal / "temporal.db").mkdir()
    with pytest.raises(ControlPlaneUnreachable, match=r"ended while starting: .*database"):
        await plane.ensure_server()


def test_a_process_id_that_was_given_to_another_is_not_the_daemon() -> None:
    created = psutil.Process().create_time()
    assert DaemonRecord(pid=os.getpid(), created=created).alive
    assert not DaemonRecord(pid=os.getpid(), created=created - 100).alive


async def test_a_worker_deletes_old_nodes_serves_is_found_again_comes_back_and_is_replaced_by_one_of_newer_code(
    state: StateFolder,
) -> None:
    said: list[str] = []
    days = [timedelta(days=8 + index) for index in range(KEPT_JOBS + 2)]
    nodes = [LocalJob(state.path).ended(ago=ago) for ago in days]
    plane = LocalControlPlane(state, report=said.append)
    await plane.ensure()
    worker = await plane.ensure_worker()
    await eventually(lambda: not any(node.exists for node in nodes[KEPT_JOBS:]))
    assert all(node.exists for node in nodes[:KEPT_JOBS])
    server = plane.status().server
    assert server is not None
    assert plane.status().worker == worker
    assert plane.status().worker_is_current
    async with Client() as client, Client(endpoint=await plane.ensure_server()) as told:
        assert await client.list() == await told.list() == []
        assert told.endpoint.workflow_page("job/a/b").startswith(server.ui)
    plane.kill_worker()
    assert plane.status().worker is None
    await plane.ensure_worker()
    record = json.loads(state.worker_record.read_text())
    assert record["pid"] != worker.pid
    state.write(state.worker_record, json.dumps({**record, "code": "99.0.0+other"}))
    assert (await plane.ensure_worker()).pid == record["pid"]
    assert "newer release" in said[-1]
    assert check_worker_code(state).verdict is Verdict.OK
    state.write(state.worker_record, json.dumps({**record, "code": "0.0.9+other"}))
    assert not plane.status().worker_is_current
    worker = await plane.ensure_worker()
    assert worker.pid != record["pid"]
    assert worker.code == code_version()
    assert not WorkerRecord.model_validate(record).alive
    assert any("Restarting the worker" in line for line in said)
    assert await plane.stop_worker()
    assert plane.status().worker is None
    assert "stopping" in (state.worker / "worker.log").read_text()


async def test_a_server_is_killed_though_the_command_that_started_it_lives_on(
    state: StateFolder, tmp_path: Path
) -> None:
    """Its parent does not reap it: dead all the same."""
    answer = tmp_path / "answer"
    parent = start_command(answer, "waits")
    await eventually(answer.read_text)
    plane = LocalControlPlane(state)
    plane.kill_server()
    assert plane.status().server is None
    parent.kill()
    parent.wait()
