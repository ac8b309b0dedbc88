"""The kind `rl`: the job of `examples/09-reinforcement-learning`, on this machine."""

from __future__ import annotations

import asyncio
import tempfile
import time
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager, suppress
from itertools import cycle
from pathlib import Path

from examples.demo.learning import REWARD, ROLLOUT, TRAINER, Learning
from examples.demo.trajectories import read_made
from perdure.client.client import Client

from .records import Case

KIND = "rl"
ENDLESS = 1_000_000
SETTLE = 3.0
"""Seconds between two faults of the cases."""
FAULT_EVERY = 20.0
FAULTS = 6
"""Each role's rank and node, while the effective time is measured."""
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


async def cases(client: Client, say: Callable[[str], None], *, rounds: int) -> list[Case]:
    """Kills each role's rank and node, one after another."""
    found: list[Case] = []
    async with learning(client, "cases") as job:
        for role, whole_node in VICTIMS * rounds:
            await asyncio.sleep(SETTLE)
            case = Case(backend="local", kind=KIND, role=role, fault="node" if whole_node else "rank")
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
            say(f"{role} {case.fault}: {case.recovered_s} s {case.problem}")
            found.append(case)
    return found


async def effective_time(client: Client, say: Callable[[str], None], *, seconds: float) -> float:
    """Returns the steps that are made at a fault each 20 seconds, as a share of those without faults."""
    async with learning(client, "undisturbed") as job:
        await asyncio.sleep(SETTLE)
        alone = await _rate(job, seconds / 2)
        say(f"{alone:.2f} steps a second without faults")
    async with learning(client, "disturbed") as job:
        await asyncio.sleep(SETTLE)
        faults = asyncio.create_task(_disturb(job, say))
        try:
            disturbed = await _rate(job, seconds)
        finally:
            faults.cancel()
        say(f"{disturbed:.2f} steps a second at a fault each {FAULT_EVERY:.0f} s")
    return disturbed / alone


async def _disturb(job: Learning, say: Callable[[str], None]) -> None:
    for role, whole_node in cycle(VICTIMS):
        began = time.monotonic()
        # Half of the interval is before the first fault and after the last one.
        await asyncio.sleep(FAULT_EVERY / 2)
        with suppress(TimeoutError, LookupError):
            fault = await job.kill(role, 0, whole_node=whole_node)
            say(f"{role} {fault.fault} works again after {fault.recovered_s} s")
        await asyncio.sleep(max(FAULT_EVERY - (time.monotonic() - began), 0))


async def _rate(job: Learning, seconds: float) -> float:
    """Returns the different steps that are made in each second."""
    began = time.time()
    await asyncio.sleep(seconds)
    # A step that is made again counts once.
    return len({made.step for made in read_made(job.out) if made.time >= began} - _before(job, began)) / seconds


def _before(job: Learning, began: float) -> set[int]:
    return {made.step for made in read_made(job.out) if made.time < began}
