"""Fixtures of what a bare machine lacks: programs that are not in the package registry, and the rights of root."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from tests.support import programs


@pytest.fixture(scope="session")
def actionlint() -> Path:
    """The checker of GitHub's workflows."""
    return programs.paths("actionlint")["actionlint"]


@pytest.fixture(scope="session")
def browser() -> Path:
    """A real browser."""
    return programs.paths("browser")["browser"]


@pytest.fixture(scope="session")
def cluster_programs() -> Mapping[str, Path]:
    """The programs of a Kubernetes cluster; none where `KUBECONFIG` names another cluster."""
    return programs.paths("cluster_programs")


@pytest.fixture(scope="session")
def helm() -> Path:
    """The package manager of Kubernetes."""
    return programs.paths("helm")["helm"]


@pytest.fixture(scope="session")
def object_store_program() -> Path:
    """An S3 server."""
    return programs.paths("object_store_program")["versitygw"]


@pytest.fixture(scope="session")
def prometheus_programs() -> Mapping[str, Path]:
    """`prometheus` and `promtool`."""
    return programs.paths("prometheus_programs")


@pytest.fixture(scope="session")
def redis() -> Path:
    """The program of a Redis server."""
    return programs.paths("redis")["redis"]


@pytest.fixture(scope="session")
def temporal_program() -> Path:
    """Temporal's server, which can ask for credentials; the dev server cannot."""
    return programs.paths("temporal_program")["temporal-server"]


@pytest.fixture(scope="session")
def temporal_programs() -> Mapping[str, Path]:
    """Temporal's server, and the tool that makes its tables in PostgreSQL."""
    return programs.paths("temporal_programs")


@pytest.fixture(scope="session")
def kubectl() -> Path:
    """The client of Kubernetes, which the registry has as a wheel for Linux."""
    places = os.pathsep.join((str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)))
    if found := shutil.which("kubectl", path=places):
        return Path(found)
    pytest.skip("no kubectl on PATH, and the package registry has none for this system")


@pytest.fixture(scope="session")
def root() -> None:
    """Asked for by tests that only root can do: they act as another user, or mount a file system."""
    if os.geteuid() != 0:
        pytest.skip("only root can do that")
