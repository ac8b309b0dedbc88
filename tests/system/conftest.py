from __future__ import annotations

import tempfile
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from perdure.base.state_folder import StateFolder
from perdure.client.connection import payload_encryption
from perdure.local.control_plane import LocalControlPlane
from tests.system.joined import Machines, machines
from tests.system.ray_cluster import RayCluster
from tests.system.site import Site


@pytest.fixture
async def site(tmp_path: Path, control_plane: LocalControlPlane, ranks: None) -> AsyncIterator[Site]:
    """The shared server and worker, which such tests leave alone, and jobs of the test's own."""
    async with _started(Site(tmp_path, control_plane)) as site:
        yield site


@pytest.fixture
async def own_site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ranks: None) -> AsyncIterator[Site]:
    """A Perdure of the test's own, which it may kill; nothing of it is left."""
    monkeypatch.delenv("TEMPORAL_ADDRESS", raising=False)
    async with _alone(tmp_path) as site:
        yield site


@pytest.fixture
async def here(site: Site, tmp_path: Path) -> AsyncIterator[Machines]:
    """Machines of a scheduler, on which `perdure join` is started."""
    endpoint = site.client.endpoint
    # Machines have state folders of their own, and are given the keys as those of a configured server would be.
    keys = payload_encryption(endpoint).environment
    async with machines(tmp_path, {"TEMPORAL_ADDRESS": endpoint.address, "OMP_NUM_THREADS": "1", **keys}) as here:
        yield here


@pytest.fixture
async def cluster(ranks: None) -> AsyncIterator[RayCluster]:
    """A head without processors, and machines as a test adds them."""
    # Ray's sockets lie in the folder, whose path must be short.
    with tempfile.TemporaryDirectory(prefix="ray-", dir="/tmp", ignore_cleanup_errors=True) as folder:
        cluster = RayCluster(Path(folder))
        try:
            yield cluster
        finally:
            await cluster.stop()


@pytest.fixture
async def ray_site(cluster: RayCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Site]:
    """A Perdure of the test's own, whose worker serves the cluster."""
    monkeypatch.delenv("TEMPORAL_ADDRESS", raising=False)
    for name, value in cluster.variables.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("PERDURE_STATE", str(tmp_path / "state"))
    async with _alone(tmp_path) as site:
        yield site


@asynccontextmanager
async def _alone(folder: Path) -> AsyncGenerator[Site]:
    """Starts a server and a worker for one test, and ends them."""
    plane = LocalControlPlane(StateFolder(folder / "state"))
    try:
        async with _started(Site(folder, plane)) as site:
            yield site
    finally:
        await plane.stop_worker()
        await plane.stop_server()


@asynccontextmanager
async def _started(site: Site) -> AsyncGenerator[Site]:
    await site.start()
    try:
        yield site
    finally:
        await site.end_jobs()
