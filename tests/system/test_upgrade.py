"""Tests of a worker of this release that takes over an earlier one's jobs while they train: nothing restarts or
fails."""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path

import pytest
from temporalio.api.enums.v1 import EventType

from tests.support.releases import EARLIER, checked_out
from tests.system.site import WALK, Job, Site

START = """
import asyncio
from pathlib import Path
from perdure.base.services import leave
from perdure.base.state_folder import StateFolder
from perdure.local.control_plane import LocalControlPlane
print(asyncio.run(LocalControlPlane(StateFolder(Path({state!r}))).ensure_worker()).code)
leave(0)
"""


@pytest.fixture(params=EARLIER)
def release(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """The code of an earlier release, in a folder of its own."""
    return checked_out(request.param, tmp_path)


async def start_worker_of(release: Path, site: Site) -> None:
    """As `perdure run` of that release does; its nodes have that release's agents and launchers."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", START.format(state=str(site.state.path))),
        env={**os.environ, "PYTHONPATH": str(release)},
        cwd=release,
    )
    assert await process.wait() == 0


async def task_failures(job: Job, group: str) -> list[str]:
    """Workflow tasks that have failed since the job began."""
    temporal = await job.client.connect()
    histories = [await temporal.get_workflow_handle(name).fetch_history() for name in (job.workflow_id, group)]
    return [
        event.workflow_task_failed_event_attributes.failure.message
        for history in histories
        for event in history.events
        if event.event_type == EventType.EVENT_TYPE_WORKFLOW_TASK_FAILED
    ]


@pytest.mark.long("survival")
async def test_a_job_that_an_earlier_release_began_goes_on_under_this_one(own_site: Site, release: Path):
    await own_site.control_plane.stop_worker()
    await start_worker_of(release, own_site)
    began = own_site.control_plane.status().worker
    assert began is not None
    assert began.process is not None
    assert began.process.environ()["PYTHONPATH"] == str(release)
    job = await own_site.submit(script=WALK)
    known = await job.running(nodes=2)
    job.signal(0, "rank")
    known = await job.running(nodes=2, after=known.generation)

    await own_site.start()
    worker = own_site.control_plane.status().worker
    assert worker is not None
    assert worker.pid != began.pid
    await job.undisturbed(ranks=2, seconds=3)
    job.signal(1, "rank")
    known = await job.running(nodes=2, after=known.generation)
    await job.stepping(generation=known.generation, ranks=2)
    assert {node.incarnation for node in await own_site.client.nodes(job.name)} == {1}
    assert [incident.culprit for incident in await job.incidents()] == [0, 1]
    assert await own_site.client.task_failures(job.name) == ()
    assert await task_failures(job, known.groups[0]) == []
    assert (await job.status()).generation == known.generation
    job.finish()
    assert (await own_site.client.wait(job.name)).exit_code == 0
    await job.wound_down()
