"""The machines of a real cluster: what they have, which nodes use it, what waits, and what a worker may not see."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
from collections.abc import Callable
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from typer.testing import CliRunner

from perdure.activities.cluster.activities import watching_clusters
from perdure.activities.nodes.kubernetes import KubernetesBackend
from perdure.activities.nodes.kubernetes.machines import follow
from perdure.activities.nodes.kubernetes.resources import requests_of
from perdure.activities.nodes.machines import Machines, MachinesUnknown, Owner, Use
from perdure.cli.main import app
from tests.kubernetes.pods import PodJob, TestCluster, role
from tests.kubernetes.site import perdure, start
from tests.support.command_line import CommandLine
from tests.support.played_api import played_api, refusal
from tests.support.waiting import eventually

PATIENCE = 60


async def until(backend: KubernetesBackend, is_so: Callable[[Machines], bool]) -> Machines:
    """Returns the machines once they are so."""
    found = Machines()
    async with contextlib.aclosing(backend.machines()) as followed:
        try:
            async with asyncio.timeout(PATIENCE):
                async for found in followed:
                    if is_so(found):
                        return found
        except TimeoutError:
            pass
    raise AssertionError(f"{found}")


async def test_nodes_use_machines_wait_for_them_and_leave_them(backend: KubernetesBackend, job: PodJob) -> None:
    large = PodJob(job.api, job.namespace, role(resources={"cpu": 4000}))
    owners = Owner(job.uid, "worker"), Owner(large.uid, "worker")
    await asyncio.gather(backend.create(job.request()), backend.create(large.request()))

    def ours(found: Machines) -> dict[str, Use]:
        known = [(use.owner, use) for use in found.uses.values()]
        return {owner.uid: use for owner, use in known if owner is not None and owner in owners}

    def one_waits(found: Machines) -> bool:
        known = ours(found)
        return len(known) == 2 and bool(known[job.uid].machine and known[large.uid].reason)

    found = await until(backend, one_waits)
    machine = ours(found)[job.uid].machine
    assert not found.machines[machine].problem
    assert found.free(machine)["pods"] < found.machines[machine].capacity["pods"]
    waiting = ours(found)[large.uid]
    assert waiting in found.waiting
    assert "Insufficient cpu" in waiting.reason
    assert (found.room(waiting, at_most=5), found.room(ours(found)[job.uid], at_most=2)) == (0, 2)
    await asyncio.gather(backend.delete(job.ref()), backend.delete(large.ref()))
    await until(backend, lambda found: not ours(found))


async def test_a_cordoned_machine_has_no_room(backend: KubernetesBackend, job: PodJob) -> None:
    found = await until(backend, lambda found: bool(found.machines))
    name = next(iter(found.machines))
    await job.api.patch(f"/api/v1/nodes/{name}", {"spec": {"unschedulable": True}})
    try:
        await until(backend, lambda found: found.machines[name].problem == "cordoned")
    finally:
        await job.api.patch(f"/api/v1/nodes/{name}", {"spec": {"unschedulable": None}})
    await until(backend, lambda found: not found.machines[name].problem)


@pytest.mark.long("cluster-faults")
async def test_a_worker_that_may_not_list_machines_learns_what_it_needs() -> None:
    async def answer(_: web.Request) -> web.Response:
        return refusal(403, "Forbidden", 'nodes is forbidden: User "perdure" cannot list resource "nodes"')

    async with played_api(answer) as api:
        with pytest.raises(MachinesUnknown, match="grant it list and watch of nodes and pods"):
            async for _ in follow(api):
                pass


@pytest.mark.long("cluster-faults")
async def test_the_command_shows_who_has_and_who_waits_for_what_on_a_real_cluster(
    cluster: TestCluster, job: PodJob, tmp_path: Path
) -> None:
    async with perdure(cluster, job.namespace) as (server, client):
        backend = cluster.backend()
        temporal, queue = await client.connect(), client.endpoint.task_queue

        async def command(*options: str) -> str:
            given = ["cluster", "-n", job.namespace, "--address", server.address, *options]
            result = await asyncio.to_thread(CliRunner().invoke, app, given)
            return result.output if result.exit_code == 0 else ""

        async def told() -> str | None:
            text = await command()
            return text if "2 of 1:2" in text and "Insufficient cpu" in text else None

        async with watching_clusters(temporal, [backend], task_queue=queue, sharing=None):
            running = await start(client, role(nodes="1:2", resources={"cpu": "100m"}), tmp_path)
            large = await start(client, role(resources={"cpu": 4000}), tmp_path)
            await eventually(told, within=PATIENCE)
            [view] = json.loads(await command("-o", "json"))
            given = ("cluster", "-n", job.namespace, "--address", server.address)
            terminal = CommandLine.local(tmp_path, tmp_path).on_terminal(*given, columns=80)
            assert await asyncio.to_thread(terminal.leave, within=PATIENCE) == 0, terminal.text
        await backend.close()
    text = terminal.text.replace("\r", "")
    assert max(map(len, text.splitlines())) <= 80
    for name in (running.name, large.name, *(machine["name"] for machine in view["machines"])):
        assert name in text
    jobs = {one["job"]: one for one in view["jobs"]}
    assert (jobs[running.name]["nodes"], jobs[running.name]["waiting"]) == (2, 0)
    assert jobs[running.name]["room"] > 0
    assert (jobs[large.name]["nodes"], jobs[large.name]["waiting"], jobs[large.name]["room"]) == (0, 1, 0)
    held = [one for machine in view["machines"] for one in machine["held"]]
    assert {one["job"] for one in held} == {running.name}
    assert sum(one["nodes"] for one in held) == 2
    if folder := os.environ.get("PERDURE_PICTURES"):
        (Path(folder) / "cluster.txt").write_text(text)


@pytest.mark.parametrize("condition", ["DiskPressure", "PIDPressure", "NetworkUnavailable"])
async def test_a_machine_that_kubernetes_gives_no_pods_is_not_free(condition: str) -> None:
    cluster = LargeCluster(2)
    one = Use("", {"nvidia.com/gpu": 8.0}, None)
    assert (await listed(cluster)).room(one, at_most=10) == 2
    cluster.conditions = [{"type": condition, "status": "True"}]
    found = await listed(cluster)
    assert found.room(one, at_most=10) == 0
    assert all(machine.problem for machine in found.machines.values())


def test_the_overhead_of_a_runtime_class_counts() -> None:
    spec = {"containers": [{"resources": {"requests": {"cpu": "1"}}}], "overhead": {"cpu": "250m", "memory": "64Mi"}}
    assert requests_of(spec) == {"cpu": Decimal("1.25"), "memory": Decimal(64 * 2**20)}


@pytest.mark.parametrize(
    ("of_pod", "expected"),
    [
        ({"requests": {"cpu": "6", "memory": "8Gi"}}, {"cpu": "6.5", "memory": 8 * 2**30, "nvidia.com/gpu": 1}),
        ({"requests": {"cpu": "6"}}, {"cpu": "6.5", "memory": 2**30, "nvidia.com/gpu": 1}),
        (
            {"requests": {"hugepages-2Mi": "4Mi", "nvidia.com/gpu": "8"}},
            {"cpu": "2.5", "memory": 2**30, "hugepages-2Mi": 4 * 2**20, "nvidia.com/gpu": 1},
        ),
        # The API server writes this request itself.
        (
            {"limits": {"cpu": "6", "hugepages-2Mi": "4Mi"}},
            {"cpu": "2.5", "memory": 2**30, "hugepages-2Mi": 4 * 2**20, "nvidia.com/gpu": 1},
        ),
    ],
)
def test_what_a_pod_requests_as_a_whole_counts_in_place_of_its_containers(of_pod: Any, expected: dict[str, Any]):
    requests = {"cpu": "2", "memory": "1Gi", "nvidia.com/gpu": "1"}
    spec = {
        "containers": [{"name": "main", "resources": {"requests": requests}}, {"name": "sidecar"}],
        "resources": of_pod,
        "overhead": {"cpu": "500m"},
    }
    assert requests_of(spec) == {name: Decimal(number) for name, number in expected.items()}


LABELS = 100
"""Labels of 100 bytes that each machine of a large cluster has."""


class LargeCluster:
    """An API server with many machines, which answers in pages, as the real one does.

    Args:
        machines: How many there are.
        expire_at: Pages after which it has forgotten the version that is listed, once.
    """

    def __init__(self, machines: int, *, expire_at: int | None = None) -> None:
        self.machines = machines
        self.expire_at = expire_at
        self.pages: list[int] = []
        self.conditions: list[dict[str, str]] = []
        """Of each machine, besides that it is ready."""

    async def answer(self, request: web.Request) -> web.StreamResponse:
        if request.query.get("watch"):
            response = web.StreamResponse()
            await response.prepare(request)
            await asyncio.Event().wait()
            return response
        if request.path.endswith("pods"):
            return web.json_response({"metadata": {"resourceVersion": "9"}, "items": []})
        begin, limit = int(request.query.get("continue", 0)), int(request.query.get("limit", self.machines))
        if self.expire_at is not None and len(self.pages) == self.expire_at:
            self.expire_at = None
            return refusal(410, "Expired", "The provided continue parameter is too old")
        self.pages.append(begin)
        end = min(begin + limit, self.machines)
        listed = {"resourceVersion": "9"} | ({"continue": str(end)} if end < self.machines else {})
        body = json.dumps({"metadata": listed, "items": [self.machine(number) for number in range(begin, end)]})
        return web.Response(text=body, content_type="application/json")

    def machine(self, number: int) -> dict[str, Any]:
        labels = {f"acme.example/label-{label}": f"{number}-{label}-".ljust(63, "x") for label in range(LABELS)}
        capacity = {"cpu": "96", "memory": "1Ti", "pods": "110", "nvidia.com/gpu": "8"}
        return {
            "metadata": {"name": f"gpu-{number:05}", "labels": labels | {"zone": f"z{number % 3}"}},
            "status": {"allocatable": capacity, "conditions": [{"type": "Ready", "status": "True"}, *self.conditions]},
        }


async def listed(cluster: LargeCluster) -> Machines:
    async with played_api(cluster.answer) as api, contextlib.aclosing(follow(api)) as followed:
        return await anext(followed)


async def test_many_machines_with_many_labels_are_listed_in_pages_and_found_by_any_label() -> None:
    cluster = LargeCluster(1200)
    found = await listed(cluster)
    assert len(found.machines) == 1200
    assert cluster.pages == [0, 500, 1000]
    one = Use("", {"nvidia.com/gpu": 8.0}, None, selector=(("zone", "z1"),))
    assert found.room(one, at_most=10_000) == 400
    for selector in (("zone", "z9"), ("zones", "z1"), ("", "")):
        assert found.room(one._replace(selector=(selector,)), at_most=10_000) == 0
    label = next(iter(cluster.machine(7)["metadata"]["labels"].items()))
    assert found.room(one._replace(selector=(label,)), at_most=10_000) == 1


async def test_a_list_that_expires_between_two_pages_begins_again() -> None:
    cluster = LargeCluster(1200, expire_at=2)
    found = await listed(cluster)
    assert len(found.machines) == 1200
    assert cluster.pages == [0, 500, 0, 500, 1000]
