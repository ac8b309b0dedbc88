"""Tests of a job's page in the Temporal UI, on values only."""

from __future__ import annotations

from perdure.contract import JobPhase
from perdure.workflows.policy.record.page import details_of
from tests.policy.job_of_roles import Roles
from tests.policy.scenario import Scenario


def lines_of(job: Scenario | Roles, phase: JobPhase | None = None) -> list[str]:
    state = job.state if isinstance(job, Roles) else job.whole
    text = details_of(state, job.job, phase or state.phase, job.now)
    return text.replace("\N{NO-BREAK SPACE}", "").splitlines()


def test_a_running_job_says_how_many_train_and_what_it_waits_for() -> None:
    lines = lines_of(Scenario("2:3").running())
    assert lines[0].startswith("**RUNNING**")
    assert "- **World**: nodes 3, ranks 3, generation 1; nodes desired: 2 to 3" in lines
    assert lines[-3].startswith("| 0.1 | READY | 0 |")


def test_a_failed_job_names_the_incident_that_stopped_it_and_nothing_that_follows() -> None:
    job = Scenario("1", retry={"max_restarts": 0}).running()
    job.rank_killed(0)
    lines = lines_of(job, JobPhase.FAILED)
    assert lines[0].startswith("**FAILED**: ")
    assert any(
        line.startswith("- **Last incident**: #1 ") and line.endswith("(it has stopped the job)") for line in lines
    )
    assert not any("**Next**" in line for line in lines)


def test_each_role_has_its_phase_its_world_and_its_nodes() -> None:
    lines = lines_of(Roles().runs("trainer"))
    assert any(line.startswith("- **trainer** RUNNING") for line in lines)
    assert any(line.startswith("- **evaluator** ") for line in lines)
    assert sum(line.startswith("  - **World**: ") for line in lines) == 2
    assert [line for line in lines if line.startswith("| Node of ")] == [
        "| Node of trainer | State | Group rank | Host | Why |",
        "| Node of evaluator | State | Group rank | Host | Why |",
    ]


def test_what_training_said_is_no_markup_on_the_page() -> None:
    job = Scenario("2").running().rank_raised(1, "TypeError: __init__() got <b>x</b> | y")
    assert any(r"\_\_init\_\_() got \<b\>x\</b\> \| y" in line for line in lines_of(job)), lines_of(job)
