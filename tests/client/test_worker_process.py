"""Tests of the worker process: it starts, serves metrics, and stops without a crash."""

from __future__ import annotations

import asyncio
import signal
import urllib.request
from pathlib import Path
from uuid import uuid4

import pytest
from temporalio.api.enums.v1 import TaskQueueType

from perdure.client.workers import pollers, worker_identity
from perdure.contract.names import watch_task_queue
from tests.support.command_line import CommandLine
from tests.support.temporal_server import DevServer, free_port
from tests.support.waiting import eventually


async def until_it_polls(server: DevServer, process: int, task_queue: str) -> None:
    client = await server.client()
    identity = worker_identity(process)
    queues = (
        (task_queue, TaskQueueType.TASK_QUEUE_TYPE_WORKFLOW),
        (watch_task_queue(task_queue), TaskQueueType.TASK_QUEUE_TYPE_ACTIVITY),
    )

    async def polls() -> bool:
        return all([identity in await pollers(client, queue, kind) for queue, kind in queues])

    await eventually(polls)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_it_serves_both_queues_is_probed_and_scraped_and_stops_cleanly(
    temporal_server: DevServer, tmp_path: Path, number: signal.Signals
) -> None:
    metrics, health = free_port(), free_port()
    task_queue = f"site-{uuid4().hex[:8]}"
    environment = {**temporal_server.environment, "PERDURE_STATE": str(tmp_path), "PERDURE_TASK_QUEUE": task_queue}
    worker = CommandLine(tmp_path, environment).start(
        *("worker", "--metrics-port", str(metrics), "--health-port", str(health))
    )
    assert worker.stdout
    printed = asyncio.create_task(asyncio.to_thread(worker.stdout.read))
    try:
        await eventually(lambda: asyncio.to_thread(get, f"http://127.0.0.1:{health}/healthz"))
        await until_it_polls(temporal_server, worker.pid, task_queue)
        assert "temporal_worker" in (await asyncio.to_thread(get, f"http://127.0.0.1:{metrics}/metrics") or "")
        worker.send_signal(number)
        await eventually(lambda: worker.poll() is not None, what="the worker stops")
    finally:
        worker.kill()
        log = await printed
        worker.stdout.close()
    assert worker.returncode == 0, log
    assert f"serving {task_queue} and {task_queue}-watch" in log


def get(address: str) -> str | None:
    """Returns the answer of an HTTP server; None while there is none."""
    try:
        with urllib.request.urlopen(address, timeout=10) as answer:
            return answer.read().decode()
    except OSError:
        return None
