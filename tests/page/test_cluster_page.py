"""Tests of the page of machines: what it shows, and to whom."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import aclosing
from datetime import UTC, datetime, timedelta
from html import unescape

import pytest

from perdure.base.errors import NoWorker
from perdure.contract import ClusterJob, ClusterView, Holding, JobPhase, Machine, MachineShape
from perdure.page import clusters
from perdure.page.access import Right
from tests.page.conftest import Visitor
from tests.page.played import HOSTILE, PlayedClient
from tests.page.site import PlayedApi, visitor_of
from tests.page.test_pages import stream

GPUS = {"nvidia.com/gpu": 8.0, "cpu": 96.0, "memory": 2.0**40}
PATHS = ("/cluster/", "/cluster/events")


def job(name: str, namespace: str, **fields: object) -> ClusterJob:
    given = {"namespace": namespace, "job": name, "uid": name, "role": "worker", "phase": JobPhase.RUNNING}
    return ClusterJob.model_validate(given | {"started_at": datetime.now(UTC), "most": 4} | fields)


def view(**fields: object) -> ClusterView:
    """Two machines, a job of each namespace on one of them, and a job that waits."""
    held = tuple(
        Holding(namespace=namespace, job=name, role="worker", nodes=nodes)
        for namespace, name, nodes in (("default", "llama", 2), ("vision", "resnet", 3))
    )
    machines = (
        Machine(name="gpu-7", capacity=GPUS, free={"cpu": 12.0}, held=held, others=1),
        Machine(name="gpu-8", capacity=GPUS, free=GPUS, problem=f"cordoned {HOSTILE}", taints=("spot",)),
    )
    jobs = (
        job("llama", "default", nodes=2, fewest=2, most=8, gain=0.31, room=1, shares=True),
        job("gpt", "default", phase=JobPhase.WAITING, waiting=2, waits_for="0/2 nodes have 8 free gpu"),
        job("resnet", "vision", nodes=3),
    )
    given = {"backend": "kubernetes", "seen_at": datetime.now(UTC), "machines": machines, "machines_total": 2}
    return ClusterView.model_validate(given | {"jobs": jobs, "jobs_total": 3} | fields)


class Watched:
    """What the workers have seen."""

    def __init__(self) -> None:
        self.views = [view()]
        self.away = False

    async def read(self, _: object) -> list[ClusterView]:
        if self.away:
            raise NoWorker("no worker watches machines")
        return self.views


@pytest.fixture(autouse=True)
def watched(monkeypatch: pytest.MonkeyPatch) -> Watched:
    found = Watched()
    monkeypatch.setattr(clusters, "read_clusters", found.read)
    monkeypatch.setattr(clusters, "INTERVAL", timedelta(seconds=0.05))
    return found


@pytest.fixture
def api() -> PlayedApi:
    return PlayedApi()


@pytest.fixture
async def site(client: PlayedClient, api: PlayedApi) -> AsyncIterator[Visitor]:
    async with visitor_of(client, api) as visitor:
        yield visitor


async def signed_in(visitor: Visitor, name: str) -> Visitor:
    await visitor.post("/sign-in", {"token": name, "back": ""})
    return visitor


async def test_the_page_has_what_is_free_who_holds_it_who_waits_and_what_a_node_would_bring(visitor: Visitor) -> None:
    assert '<a href="cluster/">Machines</a>' in await visitor.get("/")
    source = await visitor.get("/cluster/")
    assert source.count("<script") == 1, "that of the page itself"
    assert "\x1b" not in source
    page = unescape(source)
    assert "2 machines, " in page
    for shown in (
        "8 gpu, 96 cpu, 1.0 Ti memory",
        "0 gpu, 12 cpu, 0.0 Mi memory",
        '<a href="../jobs/default/llama/">llama</a> 2, others 4',
        "2 of 2:8",
        "+31% speed",
        "2 nodes: 0/2 nodes have 8 free gpu",
        "cordoned",
        "spot",
    ):
        assert shown in page
    assert 'id="shape-' not in page, "one kind of machines is told by the machines themselves"


async def test_of_jobs_of_another_namespace_only_their_number_is_shown(visitor: Visitor) -> None:
    page = await visitor.get("/cluster/")
    assert "resnet" not in page
    assert "vision" not in page
    assert "1 job of other namespaces" in page
    await visitor.get("/jobs/default/llama/")


async def test_many_machines_are_summed_by_kind(visitor: Visitor, watched: Watched) -> None:
    shapes = (MachineShape(machines=900, capacity=GPUS, free=17), MachineShape(machines=100, unusable=3))
    watched.views = [view(machines_total=1000, shapes=shapes, jobs_total=30)]
    page = await visitor.get("/cluster/")
    assert "1,000 machines, 3 on which no node can start" in page
    assert "998 machines more than are listed" in page
    assert "27 jobs more than this view has room for" in page
    assert '<td class="number">900</td>' in page


@pytest.mark.parametrize(("user", "seen", "hidden"), [("ben", "llama", "resnet"), ("cleo", "resnet", "llama")])
async def test_users_see_the_jobs_of_their_namespaces_on_the_machines(
    site: Visitor, user: str, seen: str, hidden: str
) -> None:
    await signed_in(site, user)
    for shown in (await site.get("/cluster/"), str(await anext(stream(site, "/cluster/events")))):
        assert "gpu-7" in shown
        assert seen in shown
        assert hidden not in shown


@pytest.mark.parametrize("path", PATHS)
async def test_machines_are_shown_to_no_stranger_and_no_user_without_a_namespace(
    site: Visitor, api: PlayedApi, path: str
) -> None:
    assert "gpu-7" not in await site.get(path, status=401)
    api.rights["eve"] = {"elsewhere": {Right.READ}}
    await signed_in(site, "eve")
    refused = await site.get(path, status=403)
    assert "gpu-7" not in refused
    assert "the right to list trainingjobs.perdure.dev" in refused


async def test_a_site_s_own_namespaces_bound_the_jobs_on_machines(client: PlayedClient, api: PlayedApi) -> None:
    api.rights["ana"]["vision"] = {Right.READ}
    async with visitor_of(client, api, namespaces=["default"]) as visitor:
        await signed_in(visitor, "ana")
        assert "resnet" not in await visitor.get("/cluster/")


async def test_changes_of_machines_arrive_as_events(visitor: Visitor, watched: Watched) -> None:
    async with aclosing(stream(visitor, "/cluster/events")) as coming:
        first = await anext(coming)
        assert list(first["lists"]["machines-kubernetes"]["items"]) == [
            "machine-kubernetes-gpu-7",
            "machine-kubernetes-gpu-8",
        ]
        watched.views = [view(machines=view().machines[:1], machines_total=1)]
        async for event in coming:
            if change := event["lists"].get("machines-kubernetes"):
                assert change == {"items": {}, "order": ["machine-kubernetes-gpu-7"]}
                break


async def test_a_worker_that_is_away_hides_no_machines(visitor: Visitor, watched: Watched) -> None:
    assert "gpu-7" in await visitor.get("/cluster/")
    watched.away = True
    async with aclosing(stream(visitor, "/cluster/events")) as coming:
        async for event in coming:
            if "no worker watches machines" in event["parts"].get("problem", ""):
                break
    assert "gpu-7" in await visitor.get("/cluster/")
    watched.away = False
    watched.views = [view(seen_at=datetime.now(UTC) - timedelta(minutes=3))]
    async with aclosing(stream(visitor, "/cluster/events")) as coming:
        async for event in coming:
            if "no worker has looked at them since" in event["parts"].get("cluster-kubernetes", ""):
                break
