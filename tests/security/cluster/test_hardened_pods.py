"""Ordinary pods of jobs under the strictest level that Kubernetes has, and what training code may do inside."""

from __future__ import annotations

import asyncio
from contextlib import aclosing

import pytest

from perdure.activities.nodes.kubernetes.site_policy import SitePolicy
from perdure.base.kubernetes_errors import KubernetesError
from perdure.contract import JobPhase
from tests.kubernetes.pods import PodJob, TestCluster
from tests.kubernetes.site import perdure

PROBE = """
set -u
echo "user $(id -u) group $(id -g)"
touch /usr/probe 2>/dev/null && echo "root writable"
touch "$HOME/probe" /tmp/probe && echo "home and tmp writable"
touch "$PERDURE_MEMORY_DIR/probe" && echo "memory writable"
python3 -c 'import os; memory = os.statvfs("/dev/shm"); print("memory", memory.f_blocks * memory.f_frsize >> 20)'
test -e /var/run/secrets/kubernetes.io && echo "service account mounted"
test -r /perdure-agent/agent.json && echo "token readable"
env | grep -c '^TEMPORAL_' | sed 's/^/temporal variables /'
python3 -c 'import getpass, os; print("named", getpass.getuser(), os.path.expanduser("~"))'
"""


@pytest.fixture
async def restricted(job: PodJob) -> PodJob:
    """A job whose namespace enforces PodSecurity's level `restricted`."""
    labels = {"pod-security.kubernetes.io/enforce": "restricted"}
    await job.api.patch(f"/api/v1/namespaces/{job.namespace}", {"metadata": {"labels": labels}})
    return job


async def test_an_ordinary_job_runs_restricted(cluster: TestCluster, restricted: PodJob) -> None:
    role = {
        "nodes": 1,
        "image": cluster.agent_image,
        "rendezvous": "env",
        "nproc_per_node": 1,
        "resources": {"shm": "24Mi"},
    }
    spec = {
        "name": "restricted",
        "namespace": restricted.namespace,
        "backend": "kubernetes",
        "limits": {"termination_grace_period": "2s"},
        "roles": {"worker": {**role, "command": ["sh", "-c", f"{PROBE}\nsleep 600"]}},
    }
    said: list[str] = []
    async with perdure(cluster, restricted.namespace, policy=SitePolicy()) as (_, client):
        await client.submit(spec)
        async with asyncio.timeout(60), aclosing(client.logs("restricted", follow=True)) as log:
            async for line in log:
                said.append(line.text)
                if line.text.startswith("named"):
                    break
        await client.cancel("restricted")
        assert (await client.wait("restricted")).phase is JobPhase.CANCELLED
    assert said == [
        "user 1000 group 1000",
        "home and tmp writable",
        "memory writable",
        "memory 24",
        "temporal variables 0",
        "named perdure /home/perdure",
    ]


async def test_the_namespace_would_refuse_a_pod_that_is_not_hardened(restricted: PodJob) -> None:
    """Otherwise the test above would prove nothing."""
    pod = {"metadata": {"name": "soft"}, "spec": {"containers": [{"name": "x", "image": "localhost/none"}]}}
    with pytest.raises(KubernetesError, match='violates PodSecurity "restricted'):
        await restricted.api.create(restricted.pods_path, pod)
