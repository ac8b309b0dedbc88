"""Tests of jobs of several roles on real nodes: pods prepare, serve, train, and call the servers by their names."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from perdure.activities.nodes.kubernetes.merge import merge
from perdure.base.kubernetes import core_path
from perdure.contract import JobPhase, JobStatus
from scripts.cluster.cluster import Cluster
from scripts.cluster.host_programs import with_host_programs
from scripts.cluster.images import BARE_IMAGE
from tests.kubernetes.name_server import POD_TEMPLATE, name_server
from tests.kubernetes.pods import PodJob, TestCluster
from tests.kubernetes.site import perdure, start
from tests.support.waiting import eventually
from tests.system.site import SCRIPT, Job

pytestmark = [pytest.mark.long("cluster-faults"), pytest.mark.timeout(440)]

OVER_OR_RUNNING = (JobPhase.RUNNING, JobPhase.SUCCEEDED)
PROGRAMS = Path(__file__).with_name("role_programs.py")


def roles(results: Path) -> dict[str, dict[str, Any]]:
    def pods(nodes: int, *command: str, **fields: Any) -> dict[str, Any]:
        template = merge(with_host_programs(results), POD_TEMPLATE)
        return {"nodes": nodes, "command": [*command], "image": BARE_IMAGE, "pod_template": template, **fields}

    def program(name: str, nodes: int, **fields: Any) -> dict[str, Any]:
        return pods(nodes, sys.executable, str(PROGRAMS), name, str(results), **fields)

    return {
        "trainer": pods(2, "torchrun", str(SCRIPT), str(results), depends_on={"ps": "ready"}),
        "ps": program("serve", 2, ready={"port": 6000}, depends_on={"init": "completed"}),
        "init": program("prepare", 1),
        "caller": program("call", 1, depends_on={"ps": "ready"}, on_failure="ignore"),
    }


def notes(job: Job, kind: str) -> list[list[str]]:
    path = job.out / "notes"
    lines = path.read_text().splitlines() if path.exists() else []
    return [line.split()[1:] for line in lines if line.split()[0] == kind]


def generations(status: JobStatus) -> dict[str, int]:
    return {one.name: one.generation for one in status.by_role}


async def pods_of(job: PodJob, role: str = "") -> dict[str, str]:
    """The uids of the pods of a role, or of all, by their names; no pod that is being deleted."""
    labels = f"perdure.dev/role={role}" if role else ""
    found = [one["metadata"] for one in await job.api.list(job.pods_path, labels=labels)]
    return {one["name"]: one["uid"] for one in found if "deletionTimestamp" not in one}


async def test_a_pod_of_each_role_is_replaced_alone_and_servers_keep_their_names(
    own_cluster: Cluster, cluster: TestCluster, job: PodJob, results: Path
) -> None:
    async with name_server(job.api), perdure(cluster, job.namespace) as (_, client):
        training = await start(client, {}, results, roles=roles(results))

        # The initializer is killed before anything else has started.
        await training.until(lambda status: generations(status)["init"] == 1)
        await eventually(lambda: len(notes(training, "prepare")) == 1, what="the initializer")
        assert not await pods_of(job, "ps")
        (first,) = await pods_of(job, "init")
        await job.api.delete(f"{job.pods_path}/{first}")
        await eventually(lambda: len(notes(training, "prepare")) == 2, what="the initializer again")
        assert not await pods_of(job, "ps")
        (results / "go").touch()

        await training.until(lambda status: status.by_role[1].phase is JobPhase.RUNNING)
        await training.until(lambda status: all(one.phase in OVER_OR_RUNNING for one in status.by_role))
        await training.stepping(generation=1, ranks=2)
        await eventually(lambda: len(notes(training, "call")) == 2, what="answers of both servers")
        servers = {f"ps-{rank}.perdure-{training.name}-{training.uid}.{job.namespace}.svc:6000" for rank in "01"}
        assert {address for address, _ in notes(training, "call")} == servers
        started = generations(await training.status())
        assert started == {"trainer": 1, "ps": 1, "init": 2, "caller": 1}

        for role in ("ps", "trainer", "caller"):
            before, others = await pods_of(job, role), await pods_of(job)
            victim = next(iter(before))
            await job.api.delete(f"{job.pods_path}/{victim}")
            started[role] += 1
            again = await training.until(
                lambda status: (
                    generations(status) == started and all(one.phase in OVER_OR_RUNNING for one in status.by_role)
                )
            )
            assert generations(again) == started
            others.pop(victim)
            assert others.items() <= (await pods_of(job)).items(), "no other pod was replaced"
        # The server's successor answers under the address that the caller was started with.
        replaced = [address for rank, address in notes(training, "serve") if rank == "0"][-1]
        await eventually(lambda: replaced in [pod for _, pod in notes(training, "call")], what=lambda: replaced)
        assert {address for address, _ in notes(training, "call")} == servers
        await training.stepping(generation=started["trainer"], ranks=2)

        training.finish()
        result = await client.wait(training.name)
        assert result.phase is JobPhase.SUCCEEDED
        assert [incident.role for incident in await training.incidents()] == ["init", "ps", "trainer", "caller"]
        await eventually(job.nothing_left)

        async def no_service_left() -> bool:
            return not await job.api.list(core_path(job.namespace, "services"))

        await eventually(no_service_left)
