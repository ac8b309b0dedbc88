"""The worker as a process: it starts, is scraped, stops without a crash, and says what keeps it from starting."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import urllib.request
from collections.abc import Mapping

import pytest
from temporalio.api.enums.v1 import TaskQueueType

from perdure.errors import ExitCode
from perdure.local.control_plane import pollers, worker_identity
from tests.support.temporal_server import DevServer, free_port
from workflows.names import WATCH_TASK_QUEUE, WORKER_TASK_QUEUE


async def start(environment: Mapping[str, str], *arguments: str) -> asyncio.subprocess.Process:
    return await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "perdure.worker", *arguments),
        env={**os.environ, **environment},
        stderr=asyncio.subprocess.PIPE,
    )


async def until_it_polls(server: DevServer, process: asyncio.subprocess.Process) -> None:
    client = await server.client()
    identity = worker_identity(process.pid)
    queues = (
        (WORKER_TASK_QUEUE, TaskQueueType.TASK_QUEUE_TYPE_WORKFLOW),
        (WATCH_TASK_QUEUE, TaskQueueType.TASK_QUEUE_TYPE_ACTIVITY),
    )
    async with asyncio.timeout(60):
        for queue, kind in queues:
            while identity not in await pollers(client, queue, kind):
                assert process.returncode is None
                await asyncio.sleep(0.1)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_it_serves_both_queues_is_scraped_and_stops_cleanly(
    temporal_server: DevServer, number: signal.Signals
) -> None:
    port = free_port()
    process = await start(temporal_server.environment, "--metrics-port", str(port))
    try:
        await until_it_polls(temporal_server, process)

        def scrape() -> str:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
                return answer.read().decode()

        assert "temporal_worker" in await asyncio.to_thread(scrape)
        process.send_signal(number)
        async with asyncio.timeout(30):
            _, log = await process.communicate()
    finally:
        if process.returncode is None:
            process.kill()
    assert process.returncode == 0, log
    assert b"serving perdure and perdure-watch" in log


async def test_a_dead_server_is_exit_code_6() -> None:
    process = await start({"TEMPORAL_ADDRESS": f"127.0.0.1:{free_port()}"})
    async with asyncio.timeout(30):
        _, log = await process.communicate()
    assert process.returncode == ExitCode.UNREACHABLE
    assert b"does not answer: connection refused" in log
