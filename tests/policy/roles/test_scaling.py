"""Tests of the numbers of nodes that a role of several may have."""

from __future__ import annotations

import pytest
from temporalio.exceptions import ApplicationError

from perdure.contract import ScaleRequest
from perdure.workflows.requests import check_scale
from tests.policy.job_of_roles import Roles


def test_a_role_has_no_more_nodes_than_there_are_ports_before_those_of_another():
    job = Roles(trainer={}, ps={"ready": {"port": 6000}}, reward={"ready": {"port": 6003}})
    for role, nodes in (("ps", "3"), ("reward", "100"), ("trainer", "2:9")):
        check_scale(job.state, job.job, ScaleRequest(role=role, nodes=nodes))
    words = "node 3 would serve at 127.0.0.1:6003, as a node of reward does; ask for at most 3"
    with pytest.raises(ApplicationError, match=words):
        check_scale(job.state, job.job, ScaleRequest(role="ps", nodes="2:4"))
