"""Tests of the numbers of nodes that a role of several may have."""

from __future__ import annotations

import pytest
from temporalio.exceptions import ApplicationError

from perdure.contract import JobPhase, ScaleRequest
from perdure.workflows.policy.facts.events import ForRole, ScaleRequested
from perdure.workflows.requests import check_scale
from tests.policy.job_of_roles import Roles


def test_a_role_has_no_more_nodes_than_there_are_ports_before_those_of_another():
    job = Roles(trainer={}, ps={"ready": {"port": 6000}}, reward={"ready": {"port": 6003}})
    for role, nodes in (("ps", "3"), ("reward", "100"), ("trainer", "2:9")):
        check_scale(job.state, job.job, ScaleRequest(role=role, nodes=nodes))
    words = "node 3 would serve at 127.0.0.1:6003, as a node of reward does; ask for at most 3"
    with pytest.raises(ApplicationError, match=words):
        check_scale(job.state, job.job, ScaleRequest(role="ps", nodes="2:4"))


@pytest.mark.parametrize("restarts", [[], ["trainer"]], ids=["alone", "with those that must know"])
def test_a_role_is_scaled_while_another_one_recovers(restarts: list[str]):
    job = Roles(trainer={}, ps={"ready": {"port": 6000}, "restart_on_scale": restarts}).runs("ps", "trainer")
    job.lost("trainer", 0)
    job.take(ForRole("ps", ScaleRequested(minimum=3, maximum=3))).ready("ps", 2).steps("ps")
    assert (job.view("ps").phase, len(job.view("ps").members)) == (JobPhase.RUNNING, 3)
    assert job.view("trainer").phase is not JobPhase.RUNNING
    job.runs("trainer").wait(3600)
    assert (job.view("trainer").phase, job.view("trainer").generation) == (JobPhase.RUNNING, 2), "it restarts once"
    job.lost("ps", 0)
    job.take(ForRole("trainer", ScaleRequested(minimum=1, maximum=1))).left("trainer").ready("trainer").steps("trainer")
    assert (job.view("trainer").phase, len(job.view("trainer").members)) == (JobPhase.RUNNING, 1)
    assert len(job.runs("ps").view("ps").members) == 3
    assert job.state.open_incident is None
