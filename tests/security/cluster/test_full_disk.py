"""Training code that fills the folders that it may write to: its pod is evicted before the machine's disk is full."""

from __future__ import annotations

import asyncio
import shutil
from contextlib import aclosing
from pathlib import Path

import pytest

from perdure.activities.nodes.kubernetes.site_policy import SitePolicy
from perdure.contract import JobPhase
from scripts.cluster.cluster import Cluster
from tests.kubernetes.pods import PodJob, TestCluster
from tests.kubernetes.site import perdure, start
from tests.support.waiting import eventually

pytestmark = [pytest.mark.timeout(400), pytest.mark.long("cluster-faults")]

GIB = 1 << 30
FILL = """
fill() {
  python3 -c 'import os; os.posix_fallocate(os.open("'$1'", os.O_RDWR | os.O_CREAT), 0, '$2')'
}
fill /dev/shm/fill 100000000 2>&1 | tail -1
case "$HOSTNAME" in
*-worker-0-*1) fill "$HOME/fill" 100000000 ;;
*-worker-1-*1) fill /perdure/run/fill 9663676416 ;;
esac
exec sleep 600
"""
"""All fill their memory; the first incarnations also a folder each. The space is allocated and not written."""


async def test_a_pod_that_fills_a_folder_is_evicted_and_replaced_and_others_go_on(
    own_cluster: Cluster, cluster: TestCluster, job: PodJob, tmp_path: Path
) -> None:
    """The kubelet measures folders once a minute. The folder that agent and training share has its default limit."""
    if shutil.disk_usage("/var").free < 20 * GIB:
        pytest.skip("9 GB have to be allocated, and this machine has less than 20 GB free in /var")
    role = {
        "nodes": 2,
        "image": cluster.agent_image,
        "rendezvous": "env",
        "nproc_per_node": 1,
        "resources": {"shm": "64Mi"},
    }
    small = {"spec": {"volumes": [{"name": "home", "emptyDir": {"sizeLimit": "64Mi"}}]}}
    async with perdure(cluster, job.namespace, policy=SitePolicy()) as (_, client):
        other = await start(client, role | {"command": ["sleep", "600"]}, tmp_path)
        await other.running(nodes=2)
        filling = await start(client, role | {"command": ["sh", "-c", FILL], "pod_template": small}, tmp_path)
        async with asyncio.timeout(60), aclosing(client.logs(filling.name, follow=True)) as log:
            assert "No space left on device" in (await anext(log)).text

        async def both_replaced() -> bool:
            return [node.incarnation for node in await client.nodes(filling.name)] == [2, 2]

        await eventually(both_replaced, within=280)
        events = await job.api.list(f"/api/v1/namespaces/{job.namespace}/events")
        said = " ".join(event["message"] for event in events if event["reason"] == "Evicted")
        for folder, limit in (("home", "64Mi"), ("perdure", "8Gi")):
            assert f'Usage of EmptyDir volume "{folder}" exceeds the limit "{limit}"' in said
        assert [node.incarnation for node in await client.nodes(other.name)] == [1, 1]
        assert await other.incidents() == []
        machines = await job.api.list("/api/v1/nodes")
        pressed = [one for machine in machines for one in machine["status"]["conditions"] if one["type"] != "Ready"]
        assert {one["status"] for one in pressed} == {"False"}
        for name in (filling.name, other.name):
            await client.cancel(name)
            assert (await client.wait(name)).phase is JobPhase.CANCELLED
