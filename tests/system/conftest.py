from __future__ import annotations

import sys
import tempfile
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from perdure.base.state_folder import StateFolder
from perdure.client.connection import payload_encryption
from perdure.local.control_plane import LocalControlPlane
from scripts.cluster import binaries
from scripts.cluster.binaries import BinariesMissing
from scripts.redis_server import ensure_redis
from tests.support.programs import Programs, report
from tests.system.joined import Machines, machines
from tests.system.ray_cluster import RayCluster
from tests.system.site import Site

_PROGRAMS = Programs(
    {
        "object_store_program": lambda: binaries.ensure(report, (binaries.OBJECT_STORE_SOURCE,))["versitygw"],
        "redis": lambda: ensure_redis(report),
    }
)
_MISSING = pytest.StashKey[str]()


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Builds programs before the first test where a test that is left needs them: that takes longer than a test may."""
    _PROGRAMS.make(config, items)
    if not any("prometheus_programs" in getattr(item, "fixturenames", ()) for item in items):
        return
    capture: Any = config.pluginmanager.getplugin("capturemanager")
    try:
        # Of several processes that run tests one builds it; none has a terminal but its standard error.
        with capture.global_and_fixture_disabled():
            _prometheus()
    except BinariesMissing as missing:
        config.stash[_MISSING] = str(missing)


def _prometheus() -> dict[str, Path]:
    return binaries.ensure(lambda line: print(line, file=sys.stderr, flush=True), (binaries.PROMETHEUS_SOURCE,))


@pytest.fixture(scope="session")
def prometheus_programs(pytestconfig: pytest.Config) -> dict[str, Path]:
    """`prometheus` and `promtool`; the test fails where there are none, since no other test shows what it shows."""
    if reason := pytestconfig.stash.get(_MISSING, ""):
        pytest.fail(reason, pytrace=False)
    return _prometheus()


@pytest.fixture(scope="session")
def object_store_program() -> Path:
    """An S3 server."""
    return _PROGRAMS.path("object_store_program")


@pytest.fixture
async def site(tmp_path: Path, control_plane: LocalControlPlane) -> AsyncIterator[Site]:
    """The shared server and worker, which such tests leave alone, and jobs of the test's own."""
    async with _started(Site(tmp_path, control_plane)) as site:
        yield site


@pytest.fixture
async def own_site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Site]:
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


@pytest.fixture(scope="session")
def redis() -> Path:
    """The program of a Redis server."""
    return _PROGRAMS.path("redis")


@pytest.fixture
async def cluster() -> AsyncIterator[RayCluster]:
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
