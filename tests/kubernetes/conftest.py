"""The tests' cluster: the one that `KUBECONFIG` names, else the machine's own, started here where it does not run."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest

from activities.nodes.kubernetes import KubernetesBackend
from scripts.cluster import binaries
from scripts.cluster.binaries import BinariesMissing
from scripts.cluster.cluster import Cluster, why_not
from tests.kubernetes.pods import PodJob, TestCluster, job_in_a_namespace


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Makes the cluster's programs before the first test, since a cold build takes longer than a test may."""
    folder = Path(__file__).parent
    if os.environ.get("KUBECONFIG") or why_not() or not any(item.path.is_relative_to(folder) for item in items):
        return
    terminal: Any = config.pluginmanager.getplugin("terminalreporter")
    try:
        binaries.ensure(terminal.write_line)
    except BinariesMissing as missing:
        if os.environ.get("CI"):
            raise
        config.stash[_MISSING] = str(missing)


_MISSING = pytest.StashKey[str]()


@pytest.fixture(scope="session")
def cluster(pytestconfig: pytest.Config) -> Iterator[TestCluster]:
    """A real cluster with the agent's image of this checkout on its nodes."""
    if kubeconfig := os.environ.get("KUBECONFIG"):
        image = os.environ.get("PERDURE_KUBERNETES_AGENT_IMAGE")
        if not image:
            pytest.skip("KUBECONFIG is set: set PERDURE_KUBERNETES_AGENT_IMAGE to an image that this cluster can pull")
        yield TestCluster(kubeconfig=kubeconfig, agent_image=image, own=None)
        return
    if reason := why_not() or pytestconfig.stash.get(_MISSING, ""):
        pytest.skip(f"no Kubernetes cluster can run here: {reason}; set KUBECONFIG to use another one")
    with Cluster().used(print) as own:
        yield TestCluster(kubeconfig=str(own.kubeconfig), agent_image=own.load_agent_image(), own=own)


@pytest.fixture
def own_cluster(cluster: TestCluster) -> Cluster:
    """For tests that need this machine's programs in pods, or that hurt the cluster."""
    if cluster.own is None:
        pytest.skip("needs the machine's own cluster, and KUBECONFIG names another one")
    return cluster.own


@pytest.fixture
async def backend(cluster: TestCluster) -> AsyncIterator[KubernetesBackend]:
    backend = cluster.backend()
    yield backend
    await backend.close()


@pytest.fixture
async def job(cluster: TestCluster, tmp_path: Path) -> AsyncIterator[PodJob]:
    """A job whose nodes sleep, in a namespace that is gone with the test."""
    async with job_in_a_namespace(cluster, tmp_path if cluster.own else None) as job:
        yield job
