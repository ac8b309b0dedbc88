"""A job of many nodes on this machine with all telemetry, and the same without: processor time and memory of each part.

Server, worker, agents and launchers are real processes, and the nodes' ranks step once a second. With telemetry, the
worker has a port that is scraped and writes the events of jobs; events and traces of worker, agents and ranks go to a
collector as well.
"""

from __future__ import annotations

import asyncio
import os
import sys
import tempfile
import time
import urllib.request
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import psutil

from benchmarks.events.collector import ROOT, collecting
from benchmarks.recovery.perdure_job import node_processes
from benchmarks.recovery.steady import MEGABYTE, cpu_seconds, role_of
from perdure.base.errors import NoWorker
from perdure.client.client import Client
from perdure.contract import JobPhase
from perdure.contract.names import uid_of
from tests.support.temporal_server import DevServer, free_port
from tests.support.waiting import eventually

RANK = Path(__file__).with_name("fleet_rank.py")
PARTS = ("server", "worker", "agents", "launchers", "ranks")
_SCRAPED_EVERY = 15.0
"""Seconds; Prometheus' operator has 30 by default."""
_SETTLES = 60.0
"""Seconds after all nodes step: imports, first polls and first metrics belong to the start, and agents first write the
figures of their machine a minute after it."""
_FORMS_WITHIN = 900.0


@dataclass(frozen=True)
class Usage:
    """The usage of all processes of one part."""

    cpu_percent: float
    """The share of one core."""
    megabytes: float


@dataclass(frozen=True)
class Side:
    """The job with or without telemetry."""

    seconds: float
    parts: Mapping[str, Usage]
    scrape_ms: float | None
    scrape_bytes: int
    collected: int
    """Bytes that the collector got."""


async def measure_side(*, telemetry: bool, nodes: int, seconds: float, say: Callable[[str], None]) -> Side:
    """Runs the job, and measures it while nothing happens but steps.

    Args:
        telemetry: Whether everything is exported, or nothing that can be turned off.
        nodes: The number of nodes.
        seconds: The time for which it is measured.
        say: Prints a line.
    """
    # Its path is short: sockets live in it.
    with tempfile.TemporaryDirectory(prefix="pb-") as name, collecting() as collector:
        folder, port = Path(name), free_port() if telemetry else None
        server = DevServer(folder / "temporal.db")
        otlp = {"OTEL_EXPORTER_OTLP_ENDPOINT": collector} if telemetry else {}
        environment = {**server.environment, "PERDURE_STATE": str(folder / "state"), **otlp}
        await server.start()
        try:
            async with _worker(folder, environment, port) as worker, Client(address=server.address) as client:
                uid = await _submit(client, nodes, {"PERDURE_EVENTS": "file,otlp" if telemetry else "off"} | otlp)
                try:
                    say(f"{nodes} nodes step {await _formed(client, nodes):.0f} s after the start")
                    await asyncio.sleep(_SETTLES)
                    processes = {
                        "server": [one for one in psutil.process_iter() if str(server.database) in _words(one)],
                        "worker": [psutil.Process(worker.pid)],
                        **_of_nodes(uid),
                    }
                    found = await _measure(processes, seconds, port, collector)
                    status = await client.status("fleet")
                    assert (status.phase, status.nodes, status.restarts_total) == (JobPhase.RUNNING, nodes, 0), status
                    return found
                finally:
                    await client.cancel("fleet")
                    with suppress(TimeoutError):
                        await asyncio.wait_for(client.wait("fleet"), 120)
                    for process in node_processes(f"{uid}/"):
                        with suppress(psutil.NoSuchProcess):
                            process.kill()
        finally:
            server.kill()


async def _submit(client: Client, nodes: int, environment: Mapping[str, str]) -> str:
    role = {"nodes": nodes, "nproc_per_node": 1, "command": [sys.executable, str(RANK)]}
    recovery = {"warm_starts": False}
    spec = {"name": "fleet", "roles": {"worker": role}, "env": dict(environment), "recovery": recovery}
    return uid_of((await client.submit(spec)).run_id)


async def _formed(client: Client, nodes: int) -> float:
    began = time.monotonic()

    async def formed() -> bool:
        # The worker may be busy, or still starting.
        with suppress(NoWorker):
            status = await client.status("fleet")
            return status.phase is JobPhase.RUNNING and status.nodes == nodes
        return False

    await eventually(formed, within=_FORMS_WITHIN, what="all nodes step")
    return time.monotonic() - began


def _of_nodes(uid: str) -> dict[str, list[psutil.Process]]:
    found: dict[str, list[psutil.Process]] = {"agents": [], "launchers": [], "ranks": []}
    for process in node_processes(f"{uid}/"):
        found[{"agent": "agents", "launcher": "launchers"}.get(role_of(process) or "", "ranks")].append(process)
    return found


def _words(process: psutil.Process) -> list[str]:
    try:
        return process.cmdline()
    except psutil.Error:
        return []


async def _measure(
    processes: Mapping[str, list[psutil.Process]], seconds: float, port: int | None, collector: str
) -> Side:
    before = {part: sum(map(cpu_seconds, group)) for part, group in processes.items()}
    began, collected = time.monotonic(), int(await asyncio.to_thread(_read, collector))
    scrapes = await _scrape(port, began + seconds)
    elapsed = time.monotonic() - began
    parts = {
        part: Usage(
            cpu_percent=100 * (sum(map(cpu_seconds, group)) - before[part]) / elapsed,
            megabytes=sum(process.memory_info().rss for process in group) / MEGABYTE,
        )
        for part, group in processes.items()
    }
    return Side(
        seconds=elapsed,
        parts=parts,
        scrape_ms=median(took for took, _ in scrapes) * 1000 if scrapes else None,
        scrape_bytes=max((size for _, size in scrapes), default=0),
        collected=int(await asyncio.to_thread(_read, collector)) - collected,
    )


async def _scrape(port: int | None, until: float) -> list[tuple[float, int]]:
    """Returns the seconds and bytes of each scrape."""
    found = list[tuple[float, int]]()
    while (left := until - time.monotonic()) > 0:
        began = time.monotonic()
        if port is not None:
            size = len(await asyncio.to_thread(_read, f"http://127.0.0.1:{port}/metrics"))
            found.append((time.monotonic() - began, size))
        await asyncio.sleep(min(max(_SCRAPED_EVERY - (time.monotonic() - began), 0), left))
    return found


def _read(address: str) -> bytes:
    with urllib.request.urlopen(address, timeout=30) as answer:
        return answer.read()


@asynccontextmanager
async def _worker(
    folder: Path, environment: dict[str, str], port: int | None
) -> AsyncIterator[asyncio.subprocess.Process]:
    exporting = () if port is None else ("--metrics-port", str(port), "--events", str(folder / "events.jsonl"))
    with (folder / "worker.log").open("wb") as log:
        worker = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "perdure.cli.main", "worker", *exporting),
            cwd=ROOT,
            env=_without_telemetry() | environment,
            stdout=log,
            stderr=log,
        )
    try:
        yield worker
    finally:
        worker.terminate()
        await worker.wait()


def _without_telemetry() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if not name.startswith(("OTEL_", "TEMPORAL_"))}
