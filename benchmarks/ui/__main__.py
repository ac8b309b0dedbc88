"""`make bench-ui`: how soon the page shows what there is and what changes, and its cost; ends with one line of JSON.

The browser, the page's server, and the commands are real. 500 jobs are played to the page; its cost to worker and
server is measured on a real job.
"""

from __future__ import annotations

import asyncio
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from contextlib import AsyncExitStack
from pathlib import Path
from statistics import median
from typing import Any

import aiohttp
import psutil

from benchmarks.history.__main__ import quieten
from perdure.base.state_folder import StateFolder
from perdure.client.client import Client
from perdure.local.control_plane import LocalControlPlane
from perdure.page import looks
from perdure.page.server import serve_pages
from scripts.browser import ensure_browser
from tests.page.played import PlayedClient, PlayedJob, interrupted
from tests.support.command_line import end_nodes
from tests.support.devtools import open_tab
from tests.support.waiting import eventually

JOBS = 500
PAGES = 10
SECONDS = 20.0
TRIES = 5

SCRIPT = """
import time
from perdure_training import report
for step in range(1, 100_000):
    report(step=step, loss=1 / step)
    time.sleep(0.1)
"""


async def _no_spec(*_: object, **__: object) -> Mapping[str, Any]:
    return {}


async def in_browser() -> dict[str, float]:
    """The time to the first picture of 500 jobs, and from an event of a job to its picture."""
    looks.recorded_spec = _no_spec
    client = PlayedClient(*(PlayedJob(interrupted(), name=f"job-{number}") for number in range(JOBS)))
    paints: list[float] = []
    latencies: list[float] = []
    async with serve_pages(client, port=0) as link, open_tab(ensure_browser(print)) as tab:
        await tab.open(link)
        for _ in range(TRIES):
            await tab.open(f"{link.partition('?')[0]}?again={time.monotonic()}")
            paint = "performance.getEntriesByName('first-contentful-paint')[0]?.startTime"
            paints.append(float(await eventually(lambda paint=paint: tab.ask(paint))) / 1000)
        await tab.open(f"{link.partition('?')[0]}jobs/default/job-0/")
        job = client.jobs["default", "job-0"]
        for number in range(2, 2 + TRIES):
            seen = (
                "new Promise(done => new MutationObserver((_, observer) => {"
                f" if (document.getElementById('incident-{number}'))"
                " { observer.disconnect(); requestAnimationFrame(() => done(Date.now())); }"
                " }).observe(document.body, {childList: true, subtree: true}))"
            )
            watching = asyncio.create_task(tab.ask(seen))
            await asyncio.sleep(0.3)
            began = time.time()
            job.scenario.rank_killed(0)
            latencies.append(float(await watching) - began * 1000)
            job.scenario.wait(3).steps()
    return {"first_paint_s": round(median(paints), 2), "event_to_pixel_ms": round(median(latencies))}


async def on_a_job(plane: LocalControlPlane, folder: Path) -> dict[str, float]:
    """The processor time that ten pages of one job take, of one core; and that of commands."""
    endpoint = await plane.ensure()
    (folder / "train.py").write_text(SCRIPT)
    async with Client(endpoint=endpoint) as client:
        job = await client.submit(
            {
                "name": "bench",
                "backend": "local",
                "roles": {"worker": {"nodes": 1, "command": [sys.executable, str(folder / "train.py")]}},
            }
        )

        async def steps() -> bool:
            return any(node.progress for node in await client.nodes(job.name))

        await eventually(steps)
        environment = {**os.environ, "PERDURE_STATE": str(plane.state.path), "TEMPORAL_ADDRESS": ""}
        measured = {
            "status_s": command(environment, "status", job.name),
            "list_s": command(environment, "list"),
            "help_s": command(environment, "--help"),
        }
        status = plane.status()
        assert status.server
        assert status.worker
        parts = [psutil.Process(), psutil.Process(status.server.pid), psutil.Process(status.worker.pid)]
        idle = await usage(parts)
        async with AsyncExitStack() as stack:
            link = await stack.enter_async_context(serve_pages(client, port=0))
            jar = aiohttp.CookieJar(unsafe=True)
            session = await stack.enter_async_context(
                aiohttp.ClientSession(cookie_jar=jar, timeout=aiohttp.ClientTimeout(total=None))
            )
            await (await session.get(link)).read()
            home = link.partition("?")[0]
            for number in range(PAGES):
                path = "events" if number % 2 else f"jobs/default/{job.name}/events"
                await stack.enter_async_context(session.get(home + path))
            await asyncio.sleep(2)
            busy = await usage(parts)
        await client.cancel(job.name)
        await client.wait(job.name)
    return measured | {"ten_pages_cpu_pct": round(busy - idle, 1)}


async def usage(parts: list[psutil.Process]) -> float:
    """The percentage of a core that these processes take."""

    def total() -> float:
        return sum(times.user + times.system for times in (part.cpu_times() for part in parts))

    before, began = total(), time.monotonic()
    await asyncio.sleep(SECONDS)
    return 100 * (total() - before) / (time.monotonic() - began)


def command(environment: Mapping[str, str], *arguments: str) -> float:
    """Seconds of processor time of a command, the least of some tries."""
    taken: list[float] = []
    for _ in range(TRIES):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        subprocess.run(
            [sys.executable, "-P", "-m", "perdure.cli.main", *arguments],
            env=dict(environment),
            stdout=subprocess.DEVNULL,
            check=True,
        )
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        taken.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
    return round(min(taken), 2)


async def measure() -> dict[str, float]:
    """Measures everything."""
    measured = await in_browser()
    with tempfile.TemporaryDirectory(prefix="perdure-bench-", ignore_cleanup_errors=True) as name:
        plane = LocalControlPlane(StateFolder(Path(name) / "state"))
        try:
            return measured | await on_a_job(plane, Path(name))
        finally:
            plane.kill_worker()
            plane.kill_server()
            end_nodes(plane.state.path)


def main() -> None:
    """Runs the benchmark."""
    quieten()
    print(json.dumps(asyncio.run(measure())))


if __name__ == "__main__":
    main()
