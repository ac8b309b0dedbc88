"""Tests of commands that bound their own time by `timeout`: the end of that time ends the job."""

from __future__ import annotations

from typing import Any

import pytest

from perdure.contract import RankExit
from perdure.workflows.policy.behavior import Behavior
from perdure.workflows.policy.repair.rungs.own_timeout import duration_of_timeout
from tests.policy.scenario import Scenario

ENDED = (RankExit(local_rank=0, global_rank=0, signal=15),)
"""`timeout` ends torchrun, which ends its ranks."""


def job_of(*command: str) -> Scenario:
    return Scenario(roles={"worker": {"nodes": "2", "command": list(command)}}).running()


@pytest.mark.parametrize("report", [{}, {"ranks": ENDED}], ids=["torchrun", "torchrun-and-ranks"])
def test_the_end_of_a_commands_own_time_ends_the_job(report: dict[str, Any]):
    job = job_of("timeout", "-k", "30", "8h", "torchrun", "train.py").command_exited(0, 124, **report)
    assert job.state.outcome is not None
    assert job.state.outcome.exit_code == 5
    assert "the command's own `timeout 8h` has ended it" in job.state.outcome.reason
    assert job.incident.rule.startswith("own-timeout/1")
    assert job.generation == 1


def test_a_rank_that_bounds_its_own_time_ends_the_job_likewise():
    job = job_of("timeout", "90", "python", "train.py").rank_raised(0, None, exit_code=124)
    # Another rank may report the cause.
    job.wait(60)
    assert job.state.outcome is not None
    assert job.state.outcome.exit_code == 5


def test_a_rule_of_the_job_decides_first():
    retry = {"rules": [{"match": {"exit_codes": [124]}, "action": "restart"}]}
    worker = {"nodes": "2", "command": ["timeout", "8h", "torchrun", "train.py"]}
    job = Scenario(roles={"worker": worker}, retry=retry).running().command_exited(0, 124)
    assert job.state.outcome is None


@pytest.mark.parametrize("exit_code", [1, 137, 143])
def test_other_ends_of_such_a_command_are_failures_as_of_any_other(exit_code: int):
    assert job_of("timeout", "8h", "torchrun", "train.py").command_exited(0, exit_code).state.outcome is None


def test_the_same_exit_code_of_another_command_is_the_scripts_own():
    assert job_of("torchrun", "train.py").command_exited(0, 124).state.outcome is None


def test_a_run_that_an_older_release_began_is_restarted():
    job = job_of("timeout", "8h", "torchrun", "train.py")
    job.whole = job.whole.replace(behavior=Behavior.RELEASE_0_3)
    assert job.command_exited(0, 124).state.outcome is None


@pytest.mark.parametrize(
    ("command", "duration"),
    [
        (["timeout", "1h", "torchrun", "train.py"], "1h"),
        (["/usr/bin/timeout", "--signal=INT", "-k", "10", "1.5d", "torchrun", "train.py"], "1.5d"),
        (["env", "A=b", "gtimeout", "--foreground", "3600", "python", "train.py"], "3600"),
        (["sh", "-c", "set -e; (timeout 1h torchrun train.py)"], "1h"),
        (["torchrun", "--no-python", "timeout", "1h", "./train"], "1h"),
        (["torchrun", "train.py", "timeout", "1h"], ""),
        (["torchrun", "-m", "train", "--timeout", "30"], ""),
        (["./train", "timeout", "never"], ""),
        (["timeout"], ""),
        ([], ""),
    ],
)
def test_the_time_that_a_command_gives_itself(command: list[str], duration: str):
    assert duration_of_timeout(command) == duration
