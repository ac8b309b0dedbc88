"""Tests of the worker process: it starts, serves metrics, stops without a crash, and says why it cannot start."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import urllib.request
from collections.abc import Mapping
from uuid import uuid4

import pytest
from temporalio.api.enums.v1 import TaskQueueType

from perdure.base.errors import ExitCode
from perdure.client.workers import pollers, worker_identity
from perdure.contract.names import watch_task_queue
from tests.support.temporal_server import DevServer, free_port
from tests.support.waiting import eventually


async def start(environment: Mapping[str, str], *arguments: str) -> asyncio.subprocess.Process:
    return await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "perdure.cli.main", "worker", *arguments),
        env={**os.environ, **environment},
        stderr=asyncio.subprocess.PIPE,
    )


async def until_it_polls(server: DevServer, process: asyncio.subprocess.Process, task_queue: str) -> None:
    client = await server.client()
    identity = worker_identity(process.pid)
    queues = (
        (task_queue, TaskQueueType.TASK_QUEUE_TYPE_WORKFLOW),
        (watch_task_queue(task_queue), TaskQueueType.TASK_QUEUE_TYPE_ACTIVITY),
    )

    async def polls() -> bool:
        assert process.returncode is None
        return all([identity in await pollers(client, queue, kind) for queue, kind in queues])

    await eventually(polls)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_it_serves_both_queues_is_probed_and_scraped_and_stops_cleanly(
    temporal_server: DevServer, number: signal.Signals
) -> None:
    metrics, health = free_port(), free_port()
    task_queue = f"site-{uuid4().hex[:8]}"
    ports = ("--metrics-port", str(metrics), "--health-port", str(health))
    process = await start({**temporal_server.environment, "PERDURE_TASK_QUEUE": task_queue}, *ports)
    try:
        await eventually(lambda: asyncio.to_thread(get, f"http://127.0.0.1:{health}/healthz"))
        await until_it_polls(temporal_server, process, task_queue)
        assert "temporal_worker" in (await asyncio.to_thread(get, f"http://127.0.0.1:{metrics}/metrics") or "")
        process.send_signal(number)
        async with asyncio.timeout(30):
            _, log = await process.communicate()
    finally:
        if process.returncode is None:
            process.kill()
    assert process.returncode == 0, log
    assert f"serving {task_queue} and {task_queue}-watch".encode() in log


def get(address: str) -> str | None:
    """Returns the answer of an HTTP server; None while there is none."""
    try:
        with urllib.request.urlopen(address, timeout=10) as answer:
            return answer.read().decode()
    except OSError:
        return None


async def test_a_dead_server_is_exit_code_6() -> None:
    process = await start({"TEMPORAL_ADDRESS": f"127.0.0.1:{free_port()}"})
    async with asyncio.timeout(30):
        _, log = await process.communicate()
    assert process.returncode == ExitCode.UNREACHABLE
    assert b"does not answer: connection refused" in log
