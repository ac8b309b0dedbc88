"""Tests of what another job of the same Ray cluster can do to a job, and what it cannot: docs/security.md says both."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path

import psutil
import pytest

from tests.support.command_line import PERDURE
from tests.support.waiting import eventually
from tests.system.ray_cluster import RayCluster
from tests.system.ray_jobs import asked, incarnations, nothing_is_left, trained
from tests.system.site import Job, Site

pytestmark = [pytest.mark.long("ray"), pytest.mark.timeout(600)]

READ = """
from ray.experimental import internal_kv
keys = [key for key in internal_kv._internal_kv_list("perdure/code/")]
@ray.remote(num_cpus=0)
def variables():
    import pathlib
    found = []
    for path in pathlib.Path("/proc").glob("[0-9]*/environ"):
        try:
            found += path.read_bytes().split(b"\\0")
        except OSError:
            pass
    return [one.decode(errors="replace") for one in found]
found = [sum(len(internal_kv._internal_kv_get(key)) for key in keys), ray.get(variables.remote())]
"""
IMITATE = """
import os
class Gift:
    def __reduce__(self):
        return (exec, (f"import os; open({path!r}, 'w').write(' '.join([str(os.getppid()), *os.environ]))",))
@ray.remote(num_cpus=0)
class Imitation:
    async def describe_node(self):
        return Gift()
    async def leave(self, *_):
        pass
    async def wait(self):
        import asyncio
        await asyncio.Event().wait()
@ray.remote(num_cpus=0)
class Half:
    def describe_node(self):
        return {}
ray.get(Half.options(name={half!r}, lifetime="detached").remote().__ray_ready__.remote())
ray.get(Imitation.options(name={name!r}, lifetime="detached").remote().__ray_ready__.remote())
found = True
"""
"""Actors with names of nodes: one that imitates a node, with an answer that runs code where it is read, and one with a
part of a node's methods."""


async def names(cluster: RayCluster) -> list[str]:
    """The names of all actors, in the order of the ranks."""
    return sorted(
        one["name"] for one in await asked(cluster, "found = ray.util.list_named_actors(all_namespaces=True)")
    )


async def cancelled(cluster: RayCluster, site: Site, job: Job) -> None:
    await site.end_jobs()
    await job.wound_down()
    await nothing_is_left(cluster, job)


async def test_a_job_outlives_another_one_that_ends_its_nodes(cluster: RayCluster, ray_site: Site):
    job = await trained(cluster, ray_site, 2)
    first, second = await names(cluster)
    call = f"ray.get(ray.get_actor({second!r}).leave.remote('another job says so', False))\nfound = True"
    assert await asked(cluster, call)
    known = await job.running(nodes=2, after=1)
    assert await asked(cluster, f"ray.kill(ray.get_actor({first!r}))\nfound = True")
    await job.running(nodes=2, after=known.generation)
    assert await incarnations(ray_site, job) == [2, 2]
    assert "another job says so" in str(await job.incidents())
    await cancelled(cluster, ray_site, job)


async def test_another_job_reads_the_code_of_a_job_and_what_its_agents_were_given(cluster: RayCluster, ray_site: Site):
    job = await trained(cluster, ray_site, 2)
    size, variables = await asked(cluster, READ)
    assert size > 0
    # No gateway is set here, so agents connect to Temporal itself.
    endpoint = await ray_site.control_plane.ensure()
    assert f"TEMPORAL_ADDRESS={endpoint.address}" in variables
    await cancelled(cluster, ray_site, job)


async def test_a_node_whose_name_another_job_has_taken_gets_the_next_one(cluster: RayCluster, ray_site: Site):
    job = await trained(cluster, ray_site, 2)
    _, second = await names(cluster)
    taken = second.removesuffix("1") + "2"
    take = (
        "@ray.remote(num_cpus=0)\nclass Other:\n    pass\n"
        f"ray.get(Other.options(name={taken!r}, lifetime='detached').remote().__ray_ready__.remote())\nfound = True"
    )
    assert await asked(cluster, take)
    assert await asked(cluster, f"ray.kill(ray.get_actor({second!r}))\nfound = True")
    await job.running(nodes=2, after=1)
    assert await incarnations(ray_site, job) == [1, 3]
    assert taken in await names(cluster)
    assert await asked(cluster, f"ray.kill(ray.get_actor({taken!r}))\nfound = True")
    await cancelled(cluster, ray_site, job)


async def test_imitated_nodes_run_code_in_the_bridge_and_change_nothing_of_the_job(
    cluster: RayCluster, ray_site: Site, tmp_path: Path
):
    job = await trained(cluster, ray_site, 2)
    ran, half = tmp_path / "ran", f"{job.name}-worker-8-{job.uid}1"
    values = {"path": str(ran), "name": f"{job.name}-worker-7-{job.uid}1", "half": half}
    code = IMITATE
    for name, value in values.items():
        code = code.replace(f"{{{name}!r}}", repr(value))
    assert await asked(cluster, code)
    await eventually(lambda: ran.exists() and ran.read_text(), what="code in the bridge")
    parent, *variables = ran.read_text().split()
    assert "perdure.cli.main worker" in " ".join(psutil.Process(int(parent)).cmdline())
    assert not [name for name in variables if name.startswith(("TEMPORAL_", "PERDURE_"))]
    await job.undisturbed(ranks=2, seconds=5)
    assert (await job.status()).restarts_total == 0
    # The job still learns what happens to its own nodes.
    _, second, *_ = await names(cluster)
    assert await asked(cluster, f"ray.kill(ray.get_actor({second!r}))\nfound = True")
    await job.running(nodes=2, after=1)
    # It ends the one that it takes for its node, and leaves the other one alone.
    await ray_site.end_jobs()
    await job.wound_down()
    assert await names(cluster) == [half]
    assert await asked(cluster, f"ray.kill(ray.get_actor({half!r}))\nfound = True")
    await nothing_is_left(cluster, job)


TAKE = """
@ray.remote(num_cpus=0, resources={{"nowhere": 1}})
class Other:
    pass
kept = [Other.options(name=name, lifetime="detached").remote() for name in {names!r}]
found = sorted(one["name"] for one in ray.util.list_named_actors(all_namespaces=True))
"""
"""Actors that Ray never starts, and that have their names nevertheless."""


async def printed(*arguments: str) -> str:
    """What a command prints."""
    process = await asyncio.create_subprocess_exec(*PERDURE, *arguments, stdout=asyncio.subprocess.PIPE)
    return (await process.communicate())[0].decode()


async def test_a_job_names_the_actor_that_has_the_name_of_its_node_and_what_ends_that(
    cluster: RayCluster, ray_site: Site
):
    job = await trained(cluster, ray_site, 2)
    _, second = await names(cluster)
    taken = [second.removesuffix("1") + str(number) for number in range(2, 60)]
    assert set(taken) <= set(await asked(cluster, TAKE.format(names=taken)))
    assert await asked(cluster, f"ray.kill(ray.get_actor({second!r}))\nfound = True")
    known = await job.until(lambda status: bool(status.refusal))
    said = (
        rf"an actor {second.removesuffix('1')}\d+ that is no node exists in Ray's namespace perdure; remove it, or give"
    )
    assert known.uncreated == (1,)
    assert re.match(said, known.refusal)
    assert re.search(said, known.next_action)
    for command in ("status", "explain"):
        assert re.search(said, await printed(command, job.name)), command
    # Cancelled meanwhile, it leaves nothing but what is not its own.
    await ray_site.end_jobs()
    await job.wound_down()
    assert await names(cluster) == sorted(taken)
    assert await asked(cluster, f"for name in {taken!r}:\n    ray.kill(ray.get_actor(name))\nfound = True")
    await nothing_is_left(cluster, job)
