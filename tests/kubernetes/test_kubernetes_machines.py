"""The machines of a real cluster: what they have, which nodes use it, what waits, and what a worker may not see."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable

import pytest
from aiohttp import web

from perdure.activities.nodes.kubernetes import KubernetesBackend
from perdure.activities.nodes.kubernetes.machines import follow
from perdure.activities.nodes.machines import Machines, MachinesUnknown, Owner, Use
from tests.kubernetes.pods import PodJob, role
from tests.support.played_api import played_api, refusal

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
