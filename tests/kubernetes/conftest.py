"""Fixtures of the tests' cluster: the one that `KUBECONFIG` names, else the machine's own, which is started if
necessary."""

from __future__ import annotations

import os
import tempfile
from collections.abc import AsyncIterator, Iterator, Mapping
from pathlib import Path

import pytest
from temporalio.client import Client
from temporalio.contrib.pydantic import pydantic_data_converter

from perdure.activities.nodes.kubernetes import KubernetesBackend
from scripts.cluster.cluster import Cluster
from tests.kubernetes.pods import PodJob, TestCluster, job_in_a_namespace
from tests.support.temporal_server import DevServer


@pytest.fixture(scope="session")
def cluster(cluster_programs: Mapping[str, Path]) -> Iterator[TestCluster]:
    """A real cluster with the agent's image of this checkout on its nodes."""
    if kubeconfig := os.environ.get("KUBECONFIG"):
        image = os.environ.get("PERDURE_KUBERNETES_AGENT_IMAGE")
        if not image:
            pytest.skip("KUBECONFIG is set: set PERDURE_KUBERNETES_AGENT_IMAGE to an image that this cluster can pull")
        yield TestCluster(kubeconfig=kubeconfig, agent_image=image, own=None)
        return
    with Cluster().use(print) as own:
        yield TestCluster(kubeconfig=str(own.kubeconfig), agent_image=own.load_perdure_image().reference, own=own)


@pytest.fixture
async def temporal_client(temporal_server: DevServer) -> Client:
    """A client of the namespace that operators use by default: one process runs all tests of the cluster."""
    return await Client.connect(temporal_server.address, data_converter=pydantic_data_converter)


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


@pytest.fixture
def results() -> Iterator[Path]:
    """A folder for the ranks' results, whose path exists in their containers as well."""
    with tempfile.TemporaryDirectory(prefix="perdure-results-") as folder:
        yield Path(folder)
