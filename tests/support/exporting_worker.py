"""A worker with a port for Prometheus."""

from __future__ import annotations

import asyncio
import sys
import urllib.request
from pathlib import Path

from tests.support.temporal_server import free_port

PERDURE = Path(sys.executable).with_name("perdure")


async def start_worker(environment: dict[str, str]) -> tuple[asyncio.subprocess.Process, int]:
    """Starts a worker, and returns its port; another process may take a port that is free between two moments."""
    async with asyncio.timeout(120):
        while True:
            port = free_port()
            worker = await asyncio.create_subprocess_exec(
                *(PERDURE, "worker", "--metrics-port", str(port)), env=environment, stderr=asyncio.subprocess.PIPE
            )
            assert worker.stderr is not None
            async for line in worker.stderr:
                if b"serving" in line:
                    return worker, port
            await worker.wait()


def scrape(port: int) -> str:
    """Returns what the worker exports."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
        return answer.read().decode()
