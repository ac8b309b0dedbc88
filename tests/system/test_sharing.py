"""Two real jobs that share this machine: what one has in excess goes to the other, over a worker that is killed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from perdure.client.cluster import read_clusters
from perdure.contract import ClusterJob, ClusterView, IncidentView, JobPhase, JobStatus
from perdure.spec.job import Backend
from tests.support.command_line import CommandLine
from tests.support.waiting import eventually
from tests.system.site import WALK, Job, Site

pytestmark = [pytest.mark.long("workflows"), pytest.mark.timeout(600)]

PATIENCE = 180


@pytest.fixture(autouse=True)
def watched(monkeypatch: pytest.MonkeyPatch) -> None:
    """The worker of the test watches its machine."""
    monkeypatch.setenv("PERDURE_CLUSTER", "on")


async def sharing(site: Site, *, name: str, nodes: str = "1:4") -> Job:
    role = {"nodes": nodes, "scaling": {"share": True, "settle": "3s"}}
    out = site.folder / name
    command = ["python", str(WALK), str(out)]
    return await site.submit(
        name=name, out=out, recovery={"warm_starts": False}, roles={"worker": role | {"command": command}}
    )


async def until(job: Job, nodes: int) -> JobStatus:
    status: Any = None

    async def found() -> JobStatus | None:
        nonlocal status
        status = await job.status()
        return status if (status.phase, status.nodes) == (JobPhase.RUNNING, nodes) else None

    return await eventually(found, within=PATIENCE, what=lambda: f"{status}")


async def cluster(site: Site) -> ClusterView:
    [view] = await read_clusters(site.client, [Backend.LOCAL])
    return view


async def shares(job: Job) -> list[IncidentView]:
    return [one for one in await job.incidents() if one.observation is not None and one.observation.shared]


async def test_jobs_share_a_machine_and_each_change_names_the_other(own_site: Site, tmp_path: Path) -> None:
    (own_site.state.path / "capacity").write_text("4")
    first = await sharing(own_site, name="first")
    await until(first, 4)
    second = await sharing(own_site, name="second")
    # Who advises is away, and who trains goes on.
    own_site.control_plane.kill_worker()
    await first.undisturbed(ranks=4, seconds=4)
    await own_site.control_plane.ensure()
    await until(second, 2)
    status = await until(first, 2)
    assert status.scaling is not None
    assert status.scaling.advised is not None
    [given] = await shares(first)
    assert "2 to second" in given.title
    [taken] = await shares(second)
    assert "2 from first" in taken.title

    async def seen() -> dict[str, ClusterJob] | None:
        view = await cluster(own_site)
        found = {job.job: job for job in view.jobs}
        return found if {name: job.nodes for name, job in found.items()} == {"first": 2, "second": 2} else None

    jobs = await eventually(seen, within=60)
    assert {job.shares for job in jobs.values()} == {True}
    perdure = CommandLine.local(tmp_path, own_site.state.path)
    shown = perdure.run("cluster")
    assert shown.out.count("2 of 1:4") == 2, shown.err
    [view] = json.loads(perdure.run("cluster", "--backend", "local", "-o", "json").out)
    [machine] = view["machines"]
    assert {one["job"]: one["nodes"] for one in machine["held"]} == {"first": 2, "second": 2}
    assert machine["free"]["nodes"] == 0

    # A user's word counts, and the other job gets what is left.
    accepted = await own_site.client.scale("second", "1")
    assert "sharing" not in accepted.message
    await until(second, 1)
    await until(first, 3)
    assert "sharing of the cluster chooses" in (await own_site.client.scale("second", "1:2")).message
