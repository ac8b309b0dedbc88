"""Tests of the environment variables of one role of a job."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from perdure.activities.nodes.configurations import launcher_configuration
from perdure.spec.validate import parse_spec
from tests.activities.local_nodes import LocalJob


def environment(folder: Path, worker: dict[str, Any]) -> dict[str, str]:
    """The variables of the worker's second node in a job that also has a parameter server."""
    server = {"nodes": 1, "command": ["python", "ps.py"], "ready": {"port": 2222}}
    worker = {"nodes": 2, "command": ["python", "train.py"], "ready": {"port": 2223}, **worker}
    job = {"name": "a", "env": {"SHARED": "job", "OWN": "job"}, "roles": {"ps": server, "worker": worker}}
    request = LocalJob(folder).request(rank=1).model_copy(update={"spec": parse_spec(job)})
    return launcher_configuration(request, address="127.0.0.1")["env"]


def test_a_role_has_the_variables_of_the_job_and_its_own(tmp_path: Path) -> None:
    variables = environment(tmp_path, {"env": {"OWN": "role"}})
    assert (variables["SHARED"], variables["OWN"]) == ("job", "role")
