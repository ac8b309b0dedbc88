"""Jobs on a Ray cluster of this machine, and what Ray says of them."""

from __future__ import annotations

import asyncio
import json
import subprocess
from pathlib import Path
from typing import Any

import psutil

from scripts.ray_environment import interpreter
from tests.system.ray_cluster import RayCluster
from tests.system.site import WALK, Job, Site


def ask(cluster: RayCluster, code: str) -> Any:
    """Runs code with Ray, connected to the cluster as the backend is; returns what it assigns to `found`."""
    program = (
        f"import json, ray\nray.init({cluster.address!r}, namespace='perdure', logging_level='ERROR')\n{code}\n"
        "print('\\n' + json.dumps(found))"
    )
    answer = subprocess.run(
        [str(interpreter()), "-c", program], capture_output=True, text=True, timeout=60, check=False
    )
    assert answer.returncode == 0, answer.stderr
    return json.loads(answer.stdout.splitlines()[-1])


ACTORS = "found = ray.util.list_named_actors(all_namespaces=True)"
GROUPS = "found = [g['state'] for g in ray.util.placement_group_table().values() if g['state'] != 'REMOVED']"


async def asked(cluster: RayCluster, code: str) -> Any:
    return await asyncio.to_thread(ask, cluster, code)


async def submitted(site: Site, *arguments: str, nodes: str = "2", script: Path = WALK, **spec: Any) -> Job:
    return await site.submit(*arguments, nodes=nodes, script=script, backend="ray", **spec)


async def nothing_is_left(cluster: RayCluster, job: Job) -> None:
    assert not job.processes()
    assert await asked(cluster, ACTORS) == []
    assert await asked(cluster, GROUPS) == []


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
