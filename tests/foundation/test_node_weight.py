"""Tests that processes of which there is one for each node import only what a node needs.

How much memory that is tells `make bench-recovery`.
"""

from __future__ import annotations

import subprocess
import sys

import pytest

from perdure import contract
from perdure.agent import server
from perdure.base import http_server

_AGENT = "perdure.agent.__main__"

_AIOHTTP = {"aiohttp", "attr", "multidict", "yarl"}
"""A fifth of what an agent would have, for a server of one socket and a few clients."""
_OF_JOBS = {
    f"perdure.contract.{name}"
    for name in ("actions", "archive", "backends", "cluster", "groups", "history", "incidents", "joining")
} | {f"perdure.contract.{name}" for name in ("notifications", "transitions", "users", "views")}
"""What only jobs, their groups and their users say to each other."""
_OF_SPECIFICATIONS = {f"perdure.spec.{name}" for name in ("job", "load", "roles", "scaling", "validate")}
_OF_FEW_NODES = {
    "cryptography",  # where payloads are encrypted
    "fsspec",  # where something is stored
    "http.client",
    "opentelemetry",
    "perdure.agent.metrics",
    "prometheus_client",
    "psutil",
    "pynvml",
    "urllib.request",
}
_OF_OTHERS = {"grpc", "jinja2", "perdure.activities", "perdure.client", "rich", "torch", "typer", "yaml"}


def loaded(module: str) -> set[str]:
    """What a process has imported when it has imported a module."""
    program = f"import sys, {module}; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    return set(done.stdout.split())


@pytest.fixture(scope="module")
def agent() -> set[str]:
    return loaded(_AGENT)


@pytest.mark.parametrize(
    "heavy",
    [_AIOHTTP, _OF_JOBS, _OF_SPECIFICATIONS, _OF_FEW_NODES, _OF_OTHERS],
    ids=["aiohttp", "jobs", "specifications", "few-nodes", "others"],
)
def test_an_agent_does_not_import_what_its_node_may_not_need(agent: set[str], heavy: set[str]) -> None:
    assert agent & heavy == set()
    assert {"temporalio.worker", server.__name__, http_server.__name__} <= agent


def test_a_worker_does_not_import_what_its_site_may_not_have() -> None:
    few = {"alembic", "grpc", "kubernetes", "matplotlib", "perdure.base.ui_proxy", "rich", "sqlalchemy", "typer"}
    assert loaded("perdure.worker") & few == set()


def test_what_needs_grpcio_has_it_beside_the_sdk() -> None:
    program = "import sys, perdure.base.sdk; assert 'grpc' not in sys.modules; import grpc; print(grpc.__name__)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout == "grpc\n"


def test_the_contract_is_loaded_when_a_name_of_it_is_asked_for() -> None:
    assert "perdure.contract.views" not in loaded("perdure.contract.names")
    assert all(hasattr(contract, name) for name in ("JobStatus", "World", "identity_of"))
    with pytest.raises(AttributeError, match="has no attribute 'Nothing'"):
        _ = getattr(contract, "Nothing")  # noqa: B009
