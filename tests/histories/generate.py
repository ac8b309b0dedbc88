"""Records the histories that later releases must be able to replay.

`python -m tests.histories.generate` runs each scenario once, on a server of its own, and writes the histories of the
jobs and their groups into `recorded/<release>/`. Those of the release in work are replaced each time; a release that is
frozen is never recorded again.
"""

from __future__ import annotations

import asyncio
import shutil
import sys
import tempfile
from collections.abc import Awaitable, Callable
from contextlib import suppress
from datetime import timedelta
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Any

import typer
from temporalio.client import Client, WorkflowFailureError, WorkflowHandle, WorkflowHistory

from perdure.contract import (
    JobPhase,
    ReasonRequest,
    RelaunchRequest,
    ScaleRequest,
    StalledRank,
    StallEvidence,
    StallLook,
)
from tests.histories.recorded import MANIFEST, RECORDED, freeze, write
from tests.support.temporal_server import dev_server
from tests.support.waiting import eventually
from tests.workflows.fleet import Fleet, job_spec, running_fleet, submit
from tests.workflows.jobs import node, running, status, until
from tests.workflows.joiners import WAITING, asks, join, joined_spec
from tests.workflows.played_node import now

Job = WorkflowHandle[Any, Any]

CONTINUE_AFTER_EVENTS = 80
"""Small enough that the longer scenarios continue as new."""


async def rank_dies(fleet: Fleet) -> Job:
    """A rank is killed, another raises, and the job succeeds."""
    job = await submit(fleet, job_spec("2"))
    await running(job, nodes=2)
    await (await node(fleet, job, 1)).rank_dies()
    await running(job, nodes=2, generation=2)
    await (await node(fleet, job, 0)).rank_dies(signal=None, error="ValueError: bad batch")
    await running(job, nodes=2, generation=3)
    return await finished(fleet, job, {0: 1, 1: 1})


async def node_is_lost(fleet: Fleet) -> Job:
    """A node is lost and replaced; an agent goes away and comes back."""
    job = await submit(fleet, job_spec("2"))
    await running(job, nodes=2)
    await fleet.lose(await node(fleet, job, 1))
    await running(job, nodes=2, generation=2)
    agent = await node(fleet, job, 0)
    await agent.die()
    await until(job, lambda known: known.unreachable == (0,))
    await agent.restart()
    await until(job, lambda known: not known.unreachable)
    return await finished(fleet, job, {0: 1, 1: 2})


async def is_scaled(fleet: Fleet) -> Job:
    """A user scales down and up again, restarts, and replaces a node."""
    job = await submit(fleet, job_spec("3"))
    await running(job, nodes=3)
    await job.execute_update("scale", ScaleRequest(nodes="2"))
    await running(job, nodes=2)
    await job.execute_update("scale", ScaleRequest(nodes="3"))
    await running(job, nodes=3)
    await job.execute_update("restart", ReasonRequest(reason="new config"))
    await running(job, nodes=3, generation=4)
    await job.execute_update("relaunch_node", RelaunchRequest(rank=1))
    await running(job, nodes=3, generation=5)
    return await finished(fleet, job, {0: 1, 1: 2, 2: 2})


async def is_suspended(fleet: Fleet) -> Job:
    """A user suspends the job and resumes it."""
    job = await submit(fleet, job_spec("2"))
    await running(job, nodes=2)
    await job.execute_update("suspend", ReasonRequest(reason="maintenance"))
    await until(job, lambda known: known.phase is JobPhase.SUSPENDED)
    await job.execute_update("resume", ReasonRequest())
    await running(job, nodes=2)
    return await finished(fleet, job, {0: 2, 1: 2})


async def is_cancelled(fleet: Fleet) -> Job:
    """A user cancels a job that runs."""
    job = await submit(fleet, job_spec("2"))
    await running(job, nodes=2)
    await job.cancel()
    return job


async def makes_no_progress(fleet: Fleet) -> Job:
    """A script fails at once every time."""
    job = await submit(fleet, job_spec("1"))
    for generation in range(1, 5):
        await running(job, nodes=1, generation=generation)
        await (await node(fleet, job, 0)).rank_dies(signal=None, error="ValueError: no data")
    return job


async def is_joined(fleet: Fleet) -> Job:
    """Machines join by themselves; one is lost and comes again, another one is released."""
    fleet.pending = dict.fromkeys(range(2), WAITING)
    job = await submit(fleet, joined_spec("1:2"))
    first, lost = [await join(fleet, job, asks(name)) for name in ("a", "b")]
    await running(job, nodes=2)
    await lost.die()
    await join(fleet, job, asks("b", 2))
    await until(job, lambda known: known.phase is JobPhase.RUNNING and known.nodes == 2 and known.generation > 1)
    await job.execute_update("scale", ScaleRequest(nodes="1"))
    await running(job, nodes=1)
    await first.finish()
    fleet.pending = {}
    return job


async def faults_overlap(fleet: Fleet) -> Job:
    """A node is lost, and before the next world steps a rank dies on another; a third is lost beside both."""
    job = await submit(fleet, job_spec("3"))
    await running(job, nodes=3)
    survivors = [await node(fleet, job, rank) for rank in (0, 2)]
    for survivor in survivors:
        survivor.silent = True
    await fleet.lose(await node(fleet, job, 1))
    await eventually(lambda: survivors[0].generation == 2, what="the next world is handed out")
    await survivors[0].rank_dies()
    await fleet.lose(survivors[1])
    survivors[0].silent = False
    await until(job, lambda known: known.phase is JobPhase.RUNNING and known.nodes == 3 and known.generation > 2)
    return await finished(fleet, job, {0: 1, 1: 2, 2: 2})


async def group_ends(fleet: Fleet) -> Job:
    """The job's group is terminated by hand; a node that is lost then is replaced by the group that follows."""
    job = await submit(fleet, job_spec("2"))
    known = await running(job, nodes=2)
    await fleet.client.get_workflow_handle(known.groups[0]).terminate("by hand")
    await (await node(fleet, job, 1)).rank_dies()
    await until(job, lambda known: known.phase is JobPhase.RUNNING and known.generation > 1)
    await job.cancel()
    return job


async def rank_hangs(fleet: Fleet) -> Job:
    """A rank is stopped while the other waits for it: both are restarted in place."""
    job = await submit(fleet, job_spec("2"))
    await running(job, nodes=2)
    since = now() - timedelta(seconds=30)
    for rank in range(2):
        await (await node(fleet, job, rank)).stall(since)
    stopped = StalledRank(rank=1, state="T", steady=True)
    look = StallLook(generation=1, since=since, taken_at=now(), usual_steps=100, ranks=(stopped,), early=True)
    await (await node(fleet, job, 1)).to_group("stall_evidence", StallEvidence, look=look)
    await running(job, nodes=2, generation=2)
    return await finished(fleet, job, {0: 1, 1: 1})


SCENARIOS: tuple[Callable[[Fleet], Awaitable[Job]], ...] = (
    rank_dies,
    node_is_lost,
    is_scaled,
    is_suspended,
    is_cancelled,
    makes_no_progress,
    is_joined,
    faults_overlap,
    group_ends,
    rank_hangs,
)


async def finished(fleet: Fleet, job: Job, incarnations: dict[int, int]) -> Job:
    for rank, incarnation in incarnations.items():
        await (await node(fleet, job, rank, incarnation)).finish()
    return job


async def record(fleet: Fleet, scenario: Callable[[Fleet], Awaitable[Job]], folder: Path) -> int:
    """Plays one scenario and writes every run of its job and its group."""
    job = await scenario(fleet)
    group_id = (await status(job)).groups[0]
    with suppress(WorkflowFailureError):
        await fleet.client.get_workflow_handle(job.id).result()
    await fleet.client.get_workflow_handle(group_id).result()
    files = 0
    for what, workflow_id in (("job", job.id), ("group", group_id)):
        for number, history in enumerate(await histories(fleet.client, workflow_id), start=1):
            write(folder / f"{scenario.__name__}.{what}-{number}.json.gz", history)
            files += 1
    return files


async def histories(client: Client, workflow_id: str) -> list[WorkflowHistory]:
    """The histories of all runs of a workflow, oldest first."""
    found: list[WorkflowHistory] = []
    run_id = (await client.get_workflow_handle(workflow_id).describe()).run_id
    while run_id:
        history = await client.get_workflow_handle(workflow_id, run_id=run_id).fetch_history()
        found.insert(0, history)
        run_id = history.events[0].workflow_execution_started_event_attributes.continued_execution_run_id
    return found


async def generate(release: Path) -> int:
    """Plays all scenarios into the folder of the release in work, which is replaced as a whole."""
    suggest = ("--dynamic-config-value", f"limit.historyCount.suggestContinueAsNew={CONTINUE_AFTER_EVENTS}")
    with tempfile.TemporaryDirectory(prefix="perdure-recording-") as name:
        folder = Path(name)
        async with dev_server(options=suggest) as server, running_fleet(await server.client()) as fleet:
            files = sum([await record(fleet, scenario, folder) for scenario in SCENARIOS])
        shutil.rmtree(release, ignore_errors=True)
        shutil.copytree(folder, release)
    return files


def main(
    freeze_them: Annotated[
        bool, typer.Option("--freeze", help="Make them the release's recordings for good, as its last step.")
    ] = False,
) -> None:
    """Records the histories of the release in work: two minutes, a Temporal server of its own."""
    release = RECORDED / version("perdure")
    if (release / MANIFEST).exists():
        sys.exit(
            f"{release} is frozen: the recordings of a release are never replaced. A release in work has a number of "
            "its own: see `Making a release` in docs/development.md."
        )
    print(f"{asyncio.run(generate(release))} histories in {release}")
    if freeze_them:
        freeze(release)


if __name__ == "__main__":
    typer.run(main)
