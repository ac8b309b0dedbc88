"""Jobs on a Ray cluster of this machine, and what Ray says of them."""

from __future__ import annotations

import asyncio
import json
import subprocess
from pathlib import Path
from typing import Any

import psutil

from perdure.contract import FailureClass, IncidentView
from scripts.ray_environment import interpreter
from tests.support.waiting import eventually
from tests.system.ray_cluster import RayCluster
from tests.system.site import WALK, Job, Site

_ANSWER = "answer: "


def ask(cluster: RayCluster, code: str) -> Any:
    """Runs code with Ray, connected to the cluster as the backend is; returns what it assigns to `found`."""
    program = (
        f"import json, ray\nray.init({cluster.address!r}, namespace='perdure', logging_level='ERROR')\n{code}\n"
        f"print('\\n{_ANSWER}' + json.dumps(found))"
    )
    answer = subprocess.run(
        [str(interpreter()), "-c", program], capture_output=True, text=True, timeout=60, check=False
    )
    assert answer.returncode == 0, answer.stderr
    # Ray prints what its workers print, at any time.
    (found,) = (line for line in answer.stdout.splitlines() if line.startswith(_ANSWER))
    return json.loads(found.removeprefix(_ANSWER))


ACTORS = "found = ray.util.list_named_actors(all_namespaces=True)"
GROUPS = "found = [g['state'] for g in ray.util.placement_group_table().values() if g['state'] != 'REMOVED']"

KEYS = (
    "from ray.experimental import internal_kv\n"
    "found = [key.decode() for key in internal_kv._internal_kv_list('perdure/')]"
)


async def asked(cluster: RayCluster, code: str) -> Any:
    return await asyncio.to_thread(ask, cluster, code)


async def submitted(site: Site, *arguments: str, nodes: str = "2", script: Path = WALK, **spec: Any) -> Job:
    return await site.submit(*arguments, nodes=nodes, script=script, backend="ray", **spec)


async def waits_for_room(cluster: RayCluster, site: Site) -> Job:
    """A job of two nodes on a cluster with room for one."""
    await cluster.start(machines=1)
    job = await submitted(site)
    await job.until(lambda status: 'it demands 2 x {"CPU": 1}' in str(status))
    assert await asked(cluster, GROUPS) == ["PENDING"]
    return job


async def group_removed(cluster: RayCluster) -> None:
    """Removes all placement groups, as a user of the cluster may."""
    remove = (
        "for one in ray.util.placement_group_table().values():\n"
        "    ray.util.remove_placement_group(ray.util.get_placement_group(one['name']))\nfound = True"
    )
    assert await asked(cluster, remove)


async def evicted(cluster: RayCluster, site: Site) -> Job:
    """A job of which Ray's memory monitor has killed an actor, and kills more."""
    await cluster.start(machines=1)
    # This machine kills what runs on it every 20 s, which leaves the job time to train.
    await cluster.add(RAY_memory_usage_threshold="0.001", RAY_memory_monitor_refresh_ms="20000")
    job = await submitted(site)

    async def evictions() -> list[IncidentView]:
        return [incident for incident in await job.incidents() if incident.failure is FailureClass.EVICTED]

    found = await eventually(evictions, what="an eviction", within=200)
    assert "running low on memory" in str(found)
    return job


async def nothing_is_left(cluster: RayCluster, job: Job) -> None:
    """Nothing of a job is left: no process, and nothing in Ray's tables, which no other job uses."""
    assert not job.processes()
    assert await asked(cluster, ACTORS) == []
    assert await asked(cluster, GROUPS) == []
    assert await asked(cluster, KEYS) == []


async def trained(cluster: RayCluster, site: Site, machines: int, *arguments: str, **spec: Any) -> Job:
    """A job of two nodes that trains."""
    await cluster.start(machines=machines)
    job = await submitted(site, *arguments, **spec)
    await job.running(nodes=2)
    return job


def actor_of(job: Job, node: int) -> psutil.Process:
    """The process in which Ray runs the actor of a node."""
    launcher = job.processes(node, kind="launcher")[0]
    return next(one for one in launcher.parents() if "ray::" in " ".join(one.cmdline()[:1]))


async def incarnations(site: Site, job: Job) -> list[int]:
    return [node.incarnation for node in await site.client.nodes(job.name)]
