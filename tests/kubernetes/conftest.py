"""Fixtures of the tests' cluster: the one that `KUBECONFIG` names, else the machine's own, which is started if
necessary."""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest

from perdure.activities.nodes.kubernetes import KubernetesBackend
from scripts.cluster import binaries
from scripts.cluster.binaries import BinariesMissing
from scripts.cluster.cluster import Cluster, why_not
from tests.kubernetes.pods import PodJob, TestCluster, job_in_a_namespace


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Makes the programs that are needed before the first test, since a cold build takes longer than a test may."""
    asked = {name for item in items for name in getattr(item, "fixturenames", ())}
    sources = tuple(source for name, source in _TOOLS.items() if name in asked)
    if "cluster" in asked and not (os.environ.get("KUBECONFIG") or why_not()):
        sources += binaries.SOURCES
    capture: Any = config.pluginmanager.getplugin("capturemanager")
    try:
        # Of several processes that run tests one makes them; none has a terminal but its standard error.
        with capture.global_and_fixture_disabled():
            binaries.ensure(lambda line: print(line, file=sys.stderr, flush=True), sources)
    except BinariesMissing as missing:
        if os.environ.get("CI"):
            raise
        config.stash[_MISSING] = str(missing)


_MISSING = pytest.StashKey[str]()
_TOOLS = {"helm": binaries.HELM_SOURCE, "kubectl": binaries.KUBECTL_SOURCE}
"""Programs that only some tests need, by the names of their fixtures."""


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
    with Cluster().use(print) as own:
        yield TestCluster(kubeconfig=str(own.kubeconfig), agent_image=own.load_perdure_image().reference, own=own)


@pytest.fixture(scope="session")
def helm(pytestconfig: pytest.Config) -> Path:
    return _tool("helm", pytestconfig)


@pytest.fixture(scope="session")
def kubectl(pytestconfig: pytest.Config) -> Path:
    return _tool("kubectl", pytestconfig)


def _tool(name: str, config: pytest.Config) -> Path:
    if reason := config.stash.get(_MISSING, ""):
        pytest.skip(reason)
    return binaries.ensure(print, (_TOOLS[name],))[name]


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
