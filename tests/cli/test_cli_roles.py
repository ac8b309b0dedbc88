"""Tests of how a terminal shows the roles of a job: by value."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pytest

from perdure.cli import text
from perdure.cli.explain import explanation, with_role_named
from perdure.cli.inspect import only_role
from perdure.contract import FailureClass, IncidentView, JobPhase, RoleStatus, Suspend
from tests.client.test_log_order import STATUS

NOW = datetime(2026, 1, 1, tzinfo=UTC)


@pytest.mark.parametrize(
    ("status", "shown"),
    [
        (
            RoleStatus(name="ps", phase=JobPhase.RUNNING, generation=3, nodes=2, nodes_max=2, restarts=1),
            "RUNNING, 2 nodes, generation 3, 1 restart",
        ),
        (
            RoleStatus(
                name="trainer",
                phase=JobPhase.STARTING,
                reason="waits for ps to be ready",
                generation=0,
                nodes=0,
                nodes_max=2,
                restarts=0,
            ),
            "STARTING, 0/2 nodes, generation 0: waits for ps to be ready",
        ),
    ],
)
def test_a_role_is_shown_with_its_phase_and_what_it_waits_for(status: RoleStatus, shown: str):
    assert text.role(status) == shown


@pytest.mark.parametrize(("alone", "lost"), [(True, timedelta()), (False, timedelta(hours=1))])
def test_a_role_that_a_user_has_suspended_alone_costs_the_job_no_time(alone: bool, lost: timedelta):
    incident = IncidentView(
        number=1,
        role="evaluator",
        title="suspended by a user",
        started_at=NOW,
        noticed_at=NOW,
        generation_before=1,
        nodes_before=1,
        actions=(Suspend(alone=alone),),
    )
    assert text.lost_time([incident], NOW + timedelta(hours=1)) == lost


def test_the_story_of_an_incident_names_its_role_where_a_job_has_several():
    incident = IncidentView(
        number=2,
        role="ps",
        title="node 1 has failed",
        started_at=NOW,
        noticed_at=NOW,
        generation_before=1,
        nodes_before=2,
        culprit=1,
        failure=FailureClass.USER_CODE,
    )
    several = explanation(with_role_named(incident), job="j", flag="", several_roles=True).plain
    assert several.startswith("#2 ps: node 1 has failed")
    assert "--node 1 --role ps" in several
    assert "--role" not in explanation(incident, job="j", flag="").plain


def test_the_status_of_one_role_has_its_own_phase_and_reason():
    roles = tuple(
        RoleStatus(name=name, phase=phase, reason=f"of {name}", generation=1, nodes=1, nodes_max=1, restarts=0)
        for name, phase in (("trainer", JobPhase.RUNNING), ("ps", JobPhase.SUSPENDED))
    )
    known = STATUS.replace(roles=("trainer", "ps"), by_role=roles, role="ps")
    shown = only_role(known, "ps")
    assert (shown.phase, shown.reason, shown.by_role) == (JobPhase.SUSPENDED, "of ps", roles[1:])
    assert only_role(STATUS, "trainer") == STATUS, "of a job with one role"
