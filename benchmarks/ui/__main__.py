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
from rich.console import Console
from rich.table import Table

from benchmarks.history.__main__ import quieten
from benchmarks.recovery.perdure_job import node_processes
from perdure.base.state_folder import StateFolder
from perdure.client.client import Client
from perdure.contract.names import job_workflow_id, uid_of
from perdure.local.control_plane import LocalControlPlane
from perdure.page import looks
from perdure.page.server import serve_pages
from scripts.browser import ensure_browser
from tests.page.played import PlayedClient, PlayedJob, interrupted
from tests.support.command_line import end_nodes
from tests.support.devtools import Tab, open_tab
from tests.support.waiting import eventually

JOBS = 500
PAGES = 10
SECONDS = 20.0
TRIES = 5
KILLS = 12

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
    """The time to the first picture of 500 jobs, and from an event of one of them to its picture."""
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
            watching = asyncio.create_task(seen(tab, f"incident-{number}"))
            await asyncio.sleep(0.3)
            began = time.time()
            job.scenario.rank_killed(0)
            await client.tell()
            latencies.append(await watching - began)
            job.scenario.wait(3).steps()
    return {"first_paint_s": round(median(paints), 2), "played_event_to_pixel_ms": round(1000 * median(latencies))}


async def seen(tab: Tab, element: str) -> float:
    """When an element is on the page, in seconds since the epoch."""
    at = await tab.ask(
        "new Promise(done => new MutationObserver((_, observer) => {"
        f" if (document.getElementById('{element}'))"
        " { observer.disconnect(); requestAnimationFrame(() => done(Date.now())); }"
        " }).observe(document.body, {childList: true, subtree: true}))"
    )
    return float(at) / 1000


async def event_to_pixel(client: Client, name: str) -> dict[str, float]:
    """Milliseconds from a kill of a job's rank until it is on its page, and of them those that each part takes."""
    parts: dict[str, list[float]] = {}
    async with serve_pages(client, port=0) as link, open_tab(ensure_browser(print)) as tab:
        await tab.open(link)
        await tab.open(f"{link.partition('?')[0]}jobs/default/{name}/")
        for number in range(1, KILLS + 1):
            watching = asyncio.create_task(seen(tab, f"incident-{number}"))
            await stepping(client, name)
            killed = time.time()
            kill_rank(uid_of((await client.describe(name)).run_id))
            pixel = await watching
            incident = (await client.incidents(name))[number - 1]
            signal = await signalled(client, name, after=killed)
            noticed = incident.noticed_at.timestamp()
            for part, seconds in {
                "kill_to_signal_ms": signal - killed,
                "signal_to_decision_ms": noticed - signal,
                "event_to_pixel_ms": pixel - signal,
            }.items():
                parts.setdefault(part, []).append(1000 * seconds)
    found: dict[str, float] = {part: round(median(values)) for part, values in parts.items()}
    return found | {"event_to_pixel_worst_ms": round(max(parts["event_to_pixel_ms"]))}


async def signalled(client: Client, name: str, *, after: float) -> float:
    """When the job's history received the first signal after a time, in seconds since the epoch."""
    temporal = await client.connect()
    history = await temporal.get_workflow_handle(job_workflow_id("default", name)).fetch_history()
    signals = [one for one in history.events if one.HasField("workflow_execution_signaled_event_attributes")]
    return min(at for one in signals if (at := one.event_time.ToNanoseconds() / 1e9) > after)


async def stepping(client: Client, name: str) -> None:
    """Waits until the job's current world steps, with no incident open."""

    async def steps() -> bool:
        status, nodes = await client.look(name)
        is_over = all(incident.over_at for incident in await client.incidents(name))
        known = [node.progress.generation for node in nodes if node.progress]
        return is_over and status.generation in known

    await eventually(steps)


def kill_rank(uid: str) -> None:
    """Kills the job's rank: the youngest process that runs the script."""
    ranks = [one for one in node_processes(f"{uid}/") if any(word.endswith("train.py") for word in one.cmdline())]
    max(ranks, key=lambda one: one.create_time()).kill()


async def on_a_job(plane: LocalControlPlane, folder: Path) -> dict[str, float]:
    """The processor time that ten pages of one job take, of one core; and that of commands."""
    endpoint = await plane.ensure()
    (folder / "train.py").write_text(SCRIPT)
    async with Client(endpoint=endpoint) as client:
        job = await client.submit(
            {
                "name": "bench",
                "backend": "local",
                "retry": {"max_restarts": 100},
                "roles": {"worker": {"nodes": 1, "command": [sys.executable, str(folder / "train.py")]}},
            }
        )

        await stepping(client, job.name)
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
        pixel = await event_to_pixel(client, job.name)
        await client.cancel(job.name)
        await client.wait(job.name)
    names = ("page_server", "temporal_server", "worker")
    shares = [after - before for before, after in zip(idle, busy, strict=True)]
    by_part = {f"{name}_cpu_pct": round(share, 1) for name, share in zip(names, shares, strict=True)}
    return measured | by_part | {"ten_pages_cpu_pct": round(sum(shares), 1)} | pixel


async def usage(parts: list[psutil.Process]) -> list[float]:
    """The percentage of a core that each of these processes takes."""

    def total() -> list[float]:
        return [times.user + times.system for times in (part.cpu_times() for part in parts)]

    before, began = total(), time.monotonic()
    await asyncio.sleep(SECONDS)
    seconds = time.monotonic() - began
    return [100 * (after - at_first) / seconds for at_first, after in zip(before, total(), strict=True)]


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


GOALS = {
    "first_paint_s": ("First picture of the list, 500 jobs", "1 s"),
    "event_to_pixel_ms": ("From an event in a job's history to its picture", "200 ms"),
    "event_to_pixel_worst_ms": ("  the longest", ""),
    "signal_to_decision_ms": ("  of it until the job has decided", ""),
    "kill_to_signal_ms": ("  before it, from the kill of a rank", ""),
    "played_event_to_pixel_ms": ("The same without server and worker, 500 jobs", "200 ms"),
    "ten_pages_cpu_pct": ("Ten open pages, of a core", "2 %"),
    "page_server_cpu_pct": ("  of it the page's server", ""),
    "temporal_server_cpu_pct": ("  of it the Temporal server", ""),
    "worker_cpu_pct": ("  of it the worker", ""),
    "status_s": ("perdure status, processor time", "0.7 s"),
    "list_s": ("perdure list", "0.7 s"),
    "help_s": ("perdure --help", "0.3 s"),
}
"""What is measured, and its goal."""


def main() -> None:
    """Runs the benchmark."""
    quieten()
    measured = asyncio.run(measure())
    table = Table("", "measured", "goal")
    for key, (title, goal) in GOALS.items():
        unit = {"s": " s", "ms": " ms", "pct": " %"}[key.rpartition("_")[2]]
        table.add_row(title, f"{measured[key]:g}{unit}", goal)
    Console().print(table)
    print(json.dumps(measured))


if __name__ == "__main__":
    main()
