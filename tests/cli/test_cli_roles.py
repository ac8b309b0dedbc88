"""Tests of how a terminal shows the roles of a job: by value."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any, cast

import pytest
from rich.console import Console

from perdure.base.errors import Refused
from perdure.cli import inspect, text
from perdure.cli.check import check
from perdure.cli.common import ReadingSession, Session
from perdure.cli.explain import explanation, with_role_named
from perdure.cli.inspect import only_role
from perdure.cli.live import View, _lines
from perdure.cli.shell import shell
from perdure.client import client as client_module
from perdure.client.client import Client
from perdure.client.views import JobSnapshot, JobSummary
from perdure.contract import FailureClass, IncidentView, JobPhase, NodePhase, NodeView, ResourceUse, RoleStatus, Suspend
from tests.client.test_log_order import STATUS

NOW = datetime(2026, 1, 1, tzinfo=UTC)
ROLES = (
    RoleStatus(name="trainer", phase=JobPhase.RUNNING, generation=2, nodes=2, nodes_max=2, restarts=1),
    RoleStatus(name="ps", phase=JobPhase.RUNNING, generation=1, nodes=2, nodes_max=2, restarts=0),
)
SEVERAL = STATUS.replace(roles=("trainer", "ps"), by_role=ROLES)


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


def live(**status: Any) -> View:
    incident = IncidentView(
        number=1,
        role="ps",
        title="node 1 has failed",
        started_at=NOW,
        noticed_at=NOW,
        generation_before=1,
        nodes_before=2,
        culprit=1,
    )
    snapshot = JobSnapshot(time=NOW, status=SEVERAL.replace(**status))
    return View(name="job", flag="", page="", snapshot=snapshot, incidents={1: incident}, panel="explain")


def test_the_live_view_of_a_job_of_several_roles_shows_each_of_them():
    console = Console(width=120)
    with console.capture() as shown:
        console.print(live())
    lines = [line.rstrip() for line in shown.get().splitlines()]
    assert "├─ trainer  RUNNING, 2 nodes, generation 2, 1 restart" in lines
    assert "└─ ps  RUNNING, 2 nodes, generation 1" in lines
    assert any(line.startswith("NODES trainer") for line in lines)
    assert any(line.startswith("LAST") and "ps: node 1 has failed" in line for line in lines)
    assert any(line.startswith("#1 ps: node 1 has failed") for line in lines)
    with console.capture() as shown:
        console.print(live(by_role=()))
    assert "ps" not in shown.get()


def test_lines_about_a_job_of_several_roles_tell_when_one_of_them_changes(capsys: pytest.CaptureFixture[str]):
    view = live()
    with _lines(view) as update:
        update()
        update()
        changed = ROLES[1].replace(phase=JobPhase.RECOVERING)
        view.snapshot = JobSnapshot(time=NOW, status=SEVERAL.replace(by_role=(ROLES[0], changed)))
        update()
    lines = [line.partition(" ")[2] for line in capsys.readouterr().out.splitlines()]
    assert [line for line in lines if line.startswith(("trainer ", "ps "))] == [
        "trainer RUNNING, 2 nodes, generation 2, 1 restart",
        "ps RUNNING, 2 nodes, generation 1",
        "ps RECOVERING, 2 nodes, generation 1",
    ]
    assert sum("ps: node 1 has failed" in line for line in lines) == 1


@dataclass
class PlayedSession:
    """A session whose client finds a job of two roles, without a server."""

    client: Any
    json: bool = False
    flag: str = ""

    def run(self, call: Callable[[Any], Coroutine[Any, Any, Any]]) -> Any:
        return asyncio.run(call(self.client))

    read = run

    def hint(self, *commands: str) -> None:
        pass


@pytest.fixture
def session(monkeypatch: pytest.MonkeyPatch) -> ReadingSession:
    async def status(*_: Any, role: str | None = None, **__: Any):
        return SEVERAL.replace(role=role or "trainer")

    async def describe(*_: Any):
        return JobSummary(name="job", namespace="default", workflow_id="", run_id="", started_at=NOW)

    async def incidents(*_: Any):
        return []

    async def nodes(*_: Any, role: str | None = None, **__: Any):
        cores = (0.1, 3.7) if role == "ps" else (0.0, 0.0)
        return tuple(
            NodeView(
                rank=rank, incarnation=1, phase=NodePhase.READY, since=NOW, metrics=ResourceUse(cpu_cores=cores[rank])
            )
            for rank in range(2)
        )

    for name, played in (("status", status), ("describe", describe), ("incidents", incidents), ("nodes", nodes)):
        monkeypatch.setattr(Client, name, played)

    async def read_nodes(*_: Any):
        return ()

    monkeypatch.setattr(client_module, "read_nodes", read_nodes)
    return cast("ReadingSession", PlayedSession(Client()))


@pytest.mark.parametrize(
    ("role", "told"), [(None, True), ("ps", True), ("trainer", False)], ids=["all", "its own", "another one"]
)
def test_a_hot_node_is_named_where_a_job_is_explained(
    session: ReadingSession, capsys: pytest.CaptureFixture[str], role: str | None, told: bool
):
    inspect.explain("job", None, role, here=session)
    assert ("NOW   ps node 1 is hot: it uses 3.7 cores" in capsys.readouterr().out) == told


@pytest.mark.parametrize(
    "command",
    [
        lambda here: check("job", None, here=here),
        lambda here: check("job", None, replay=True, here=here),
        lambda here: shell("job", None, print_=True, here=here),
    ],
    ids=["check", "check --replay", "shell"],
)
def test_a_command_for_nodes_of_one_role_asks_which_of_several_is_meant(
    session: Session, command: Callable[[Session], None]
):
    with pytest.raises(Refused, match="job has several roles: trainer, ps") as refused:
        command(session)
    assert "--role trainer" in refused.value.remedy
