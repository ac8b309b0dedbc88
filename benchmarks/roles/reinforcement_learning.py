"""The kind `rl`: the job of `examples/09-reinforcement-learning`, on this machine."""

from __future__ import annotations

import asyncio
import tempfile
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from itertools import cycle
from pathlib import Path

from benchmarks.recovery.perdure_job import compose_incident
from examples.demo.learning import REWARD, ROLLOUT, TRAINER, Fault, Learning
from examples.demo.trajectories import read_made
from perdure.client.client import Client
from perdure.contract import IncidentView

from .records import ENDLESS, Case

KIND = "rl"
SETTLE = 3.0
"""Seconds between two faults of the cases."""
FAULT_EVERY = 20.0
FAULTS = 6
"""Each role's rank and node, while the effective time is measured."""
_COMPOSITION = ("noticed", "decided", "commanded", "entered")
VICTIMS = [(role, whole_node) for whole_node in (False, True) for role in (ROLLOUT, REWARD, TRAINER)]


@asynccontextmanager
async def learning(client: Client, name: str) -> AsyncGenerator[Learning]:
    """Provides a job that learns, and ends it."""
    with tempfile.TemporaryDirectory(prefix="pl-", ignore_cleanup_errors=True) as folder:
        job = Learning(client, Path(folder) / "out", steps=ENDLESS, name=f"{name}-{int(time.time()) % 100_000}")
        try:
            await job.start()
            yield job
        finally:
            await job.end()


async def cases(job: Learning, say: Callable[[str], None], *, backend: str, rounds: int) -> list[Case]:
    """Kills each role's rank and node, one after another."""
    found: list[Case] = []
    for role, whole_node in VICTIMS * rounds:
        await asyncio.sleep(SETTLE)
        case = Case(backend=backend, kind=KIND, role=role, fault="node" if whole_node else "rank")
        try:
            fault = await job.kill(role, 0, whole_node=whole_node)
            case = case.model_copy(
                update={
                    "recovered_s": fault.recovered_s,
                    "other_restarts": fault.other_restarts,
                    "lost": fault.lost,
                    "doubled": fault.doubled,
                }
            )
        except (TimeoutError, LookupError) as problem:
            case = case.model_copy(update={"problem": str(problem)})
        say(f"{backend}, {role} {case.fault}: {case.recovered_s} s {case.problem}")
        found.append(case)
    return found


async def effective_time(client: Client, say: Callable[[str], None], *, seconds: float) -> float:
    """Returns the share of its steps that the job still makes at a fault each 20 seconds.

    It is the number of different steps per second under faults, divided by that of the same job without faults, which
    runs before it in the same place. A step that is made again counts once, so what is lost and repeated is not
    effective. Time in which the trainer continues counts whatever other role is being repaired: the steps that it makes
    from the queue are steps. Each fault is printed with what it cost: `works again` is the killed part's own time,
    `paused` that between two new steps of the job, and the composition is the job's own record of the repair.
    """
    async with learning(client, "undisturbed") as job:
        await asyncio.sleep(SETTLE)
        alone = await _rate(job, seconds / 2)
        say(f"{alone:.2f} steps a second without faults")
    async with learning(client, "disturbed") as job:
        await asyncio.sleep(SETTLE)
        found: list[Fault] = []
        faults = asyncio.create_task(_disturb(job, found))
        try:
            disturbed = await _rate(job, seconds)
        finally:
            faults.cancel()
        incidents = await client.incidents(job.name)
        for fault in found:
            say(describe(fault, incidents))
        paused = sum(fault.paused_s for fault in found)
        say(
            f"{disturbed:.2f} steps a second at {len(found)} faults in {seconds:.0f} s, which paused it for "
            f"{paused:.1f} s in all"
        )
    return disturbed / alone


def describe(fault: Fault, incidents: Sequence[IncidentView]) -> str:
    """Returns what a fault cost, and how the job's repair is composed, in seconds since the kill."""
    ours = [one for one in incidents if one.role == fault.role and one.noticed_at.timestamp() > fault.began]
    parts: list[str] = []
    if ours:
        times = compose_incident(min(ours, key=lambda one: one.noticed_at), fault.began).model_dump()
        parts = [f"{name} {times[name]:.1f}" for name in _COMPOSITION if times[name] is not None]
    return f"{fault.role} {fault.fault}: works again {fault.recovered_s}, paused {fault.paused_s}; {', '.join(parts)}"


async def _disturb(job: Learning, found: list[Fault]) -> None:
    for role, whole_node in cycle(VICTIMS):
        began = time.monotonic()
        # Half of the interval is before the first fault and after the last one.
        await asyncio.sleep(FAULT_EVERY / 2)
        with suppress(TimeoutError, LookupError):
            found.append(await job.kill(role, 0, whole_node=whole_node))
        await asyncio.sleep(max(FAULT_EVERY - (time.monotonic() - began), 0))


async def _rate(job: Learning, seconds: float) -> float:
    """Returns the different steps that are made in each second."""
    began = time.time()
    await asyncio.sleep(seconds)
    # A step that is made again counts once.
    return len({made.step for made in read_made(job.out) if made.time >= began} - _before(job, began)) / seconds


def _before(job: Learning, began: float) -> set[int]:
    return {made.step for made in read_made(job.out) if made.time < began}
