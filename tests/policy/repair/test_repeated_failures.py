"""Tests of failures that are certain to come again: one more try, on another machine where there is one, then the
end."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest

from perdure.contract import FailureClass, LossCause, NodePhase
from perdure.contract.transitions import NodeJoined
from perdure.workflows.policy.timers import next_deadline
from tests.policy.scenario import Scenario, counted, reported

CANNOT_RUN = {
    "a module": "ModuleNotFoundError: No module named 'wandb'",
    "a library": "ImportError: libcudart.so.12: cannot open shared object file: No such file or directory",
    "a file": "FileNotFoundError: [Errno 2] No such file or directory: 'data/train.bin'",
    "syntax": "SyntaxError: invalid syntax (train.py, line 7)",
    "indentation": "IndentationError: unexpected indent (train.py, line 7)",
    "a name": "NameError: name 'modle' is not defined",
    "an argument": "TypeError: train() got an unexpected keyword argument 'lr'",
}
MAY_PASS = {
    "a server": "requests.exceptions.ConnectionError: HTTPSConnectionPool(host='hub', port=443): Max retries exceeded",
    "a device": "RuntimeError: CUDA error: uncorrectable ECC error encountered",
    "a mount": "OSError: [Errno 116] Stale file handle: '/data'",
}
KUBERNETES: dict[str, Any] = {
    "backend": "kubernetes",
    "roles": {"worker": {"nodes": "2", "command": ["torchrun", "train.py"], "image": "x"}},
}


def is_over(job: Scenario) -> bool:
    return job.state.outcome is not None


@pytest.mark.parametrize("error", CANNOT_RUN.values(), ids=CANNOT_RUN)
def test_a_script_that_cannot_run_is_tried_once_more(error: str):
    job = Scenario("2").ready(0, 1)
    job.rank_raised(1, error)
    assert not is_over(job)
    assert job.incident.failure is FailureClass.CANNOT_RUN
    job.runs().rank_raised(0, error)
    assert job.state.outcome is not None
    assert error in job.state.outcome.reason
    assert job.state.outcome.exit_code == 1
    assert job.incident.rule.startswith("same-failure/1")
    assert job.generation == 2


@pytest.mark.parametrize("error", MAY_PASS.values(), ids=MAY_PASS)
def test_what_may_pass_is_tried_as_often_as_the_job_says(error: str):
    job = Scenario("2").ready(0, 1)
    for _ in range(3):
        job.rank_raised(1, error).runs()
    assert not is_over(job)
    job.rank_raised(1, error)
    assert job.state.outcome is not None
    assert job.state.outcome.reason.startswith("no progress over 3 restarts")


def test_the_one_try_is_made_on_another_machine_where_the_backend_chooses_them():
    job = Scenario("2", **KUBERNETES).ready(0, 1)
    job.rank_raised(1, CANNOT_RUN["a module"])
    assert job.incident.rule.startswith("cannot-run/1")
    assert (job.node(1).incarnation, job.node(1).phase) == (2, NodePhase.REQUESTED)
    assert job.node(1).avoids == ("host-1",)


def test_no_other_machine_is_taken_where_several_have_failed_alike():
    job = Scenario("2", **KUBERNETES).ready(0, 1)
    job.rank_raised(1, CANNOT_RUN["a module"])
    job.rank_raised(0, CANNOT_RUN["a module"])
    assert job.incarnations == {0: 1, 1: 2}
    assert not is_over(job)


def test_the_same_type_of_error_after_a_step_is_the_scripts_own_and_says_nothing_about_a_machine():
    job = Scenario("2", **KUBERNETES).running()
    for _ in range(2):
        job.rank_raised(1, CANNOT_RUN["an argument"], progress=counted(7)).steps()
    assert job.incident.failure is FailureClass.USER_CODE
    assert not is_over(job)
    assert job.incarnations == {0: 1, 1: 1}


@pytest.mark.parametrize("progress", [reported(50), counted(50)])
def test_memory_that_runs_out_twice_at_the_same_step_ends_the_job(progress: Any):
    error = "torch.OutOfMemoryError: CUDA out of memory."
    job = Scenario("2").running().rank_raised(1, error, progress=progress)
    assert not is_over(job)
    job.steps().rank_raised(1, error, progress=progress)
    assert job.state.outcome is not None
    assert error in job.state.outcome.reason


def test_memory_that_runs_out_at_later_steps_or_after_another_failure_does_not():
    error = "torch.OutOfMemoryError: CUDA out of memory."
    job = Scenario("2").running()
    for step in (50, 80, 120):
        job.rank_raised(1, error, progress=reported(step)).steps()
    job.rank_raised(1, "ValueError: bad batch", progress=reported(120)).steps()
    job.rank_raised(1, error, progress=reported(120)).steps()
    assert not is_over(job)


def test_a_command_that_fails_before_any_world_is_tried_once_more_and_avoids_the_machine():
    job = Scenario("1")
    for tries in range(2):
        assert not is_over(job)
        job.transition(0, NodeJoined, address="10.0.0.0", host="host-0")
        job.command_exited(0, 1, generation=0, error=CANNOT_RUN["a module"])
        if not tries:
            assert job.state.nodes[0].loss_cause is LossCause.MACHINE or job.node(0).incarnation == 2
            deadline = next_deadline(job.whole, job.job, job.now)
            job.wait(deadline - job.now if deadline else timedelta())
    assert job.state.outcome is not None
    assert CANNOT_RUN["a module"] in job.state.outcome.reason


def test_a_gpu_that_is_lost_replaces_its_node_and_the_next_one_avoids_the_machine():
    job = Scenario("2", **KUBERNETES).running().rank_raised(1, "pynvml.NVMLError_GpuIsLost: GPU is lost")
    assert job.incident.failure is FailureClass.HARDWARE
    assert job.incident.title == "node 1 has a GPU that failed, replacement requested"
    assert (job.incarnations, job.node(1).avoids) == ({0: 1, 1: 2}, ("host-1",))
