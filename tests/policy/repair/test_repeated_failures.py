"""Tests of failures that are certain to come again: one more try, on another machine where there is one, then the
end."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest

from perdure.contract import FailureClass, LossCause, NodePhase, RankExit, Restore, RestoreSource
from perdure.contract.transitions import NodeJoined, NodeRestoredCheckpoint
from perdure.workflows.policy.record.projections import result_of
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


TRACEBACK = """Traceback (most recent call last):
  File "/code/train.py", line {line}, in <module>
    train()
  File "/usr/lib/python3.11/site-packages/torch/nn/functional.py", line 3059, in cross_entropy
"""


def raised(
    job: Scenario, rank: int = 1, error: str = "ValueError: batch 7", *, line: int = 12, **fields: Any
) -> Scenario:
    exits = (RankExit(local_rank=0, global_rank=rank, exit_code=1, error=error, traceback=TRACEBACK.format(line=line)),)
    return job.take(job.failure(rank, ranks=exits, log_tail=f"the output of node {rank}", **fields))


@pytest.mark.parametrize("progress", [None, reported(50), counted(50)])
def test_the_same_error_at_the_same_line_with_no_step_gained_stops_the_job(progress: Any):
    job = raised(Scenario("2").running(), progress=progress).steps()
    assert not is_over(job)
    raised(job, error="ValueError: batch 8", progress=progress)
    assert job.state.outcome is not None
    assert job.state.outcome.reason == (
        "it failed again after a restart (ValueError at train.py:12): rank 1 exit code 1: ValueError: batch 8"
    )
    assert (job.state.outcome.exit_code, job.incident.rule[:12]) == (1, "same-error/1")
    result = result_of(job.state, job.now)
    assert result.log_tail == "the output of node 1"


@pytest.mark.parametrize(
    ("second", "what"),
    [
        ({"line": 13}, "another line"),
        ({"error": "KeyError: 7"}, "another type"),
        ({"progress": reported(60)}, "a later step"),
    ],
)
def test_another_error_or_a_later_one_is_tried_as_often_as_the_job_says(second: dict[str, Any], what: str):
    job = raised(Scenario("2").running(), progress=reported(50)).steps()
    raised(job, **dict[str, Any](progress=reported(50)) | second)
    assert not is_over(job), what


@pytest.mark.parametrize("error", [*MAY_PASS.values(), "TimeoutError: read timed out", "OSError: [Errno 9] Bad file"])
def test_an_error_that_may_pass_is_not_compared(error: str):
    job = Scenario("2").running()
    for _ in range(2):
        raised(job, error=error).steps()
    assert not is_over(job)


def test_a_failure_of_another_kind_in_between_begins_anew():
    job = raised(Scenario("2").running()).steps().rank_killed(0).steps()
    assert not is_over(raised(job))


def test_an_error_without_a_traceback_is_not_compared():
    job = Scenario("2").running()
    for _ in range(2):
        job.rank_raised(1).steps()
    assert not is_over(job)


def test_an_error_that_one_machine_alone_shows_replaces_it_and_ends_the_job_where_another_one_shows_it_too():
    job = raised(Scenario("2", **KUBERNETES).running()).steps()
    assert job.incarnations == {0: 1, 1: 1}
    raised(job)
    assert job.incident.rule.startswith("same-error/2")
    assert (job.incarnations, job.node(1).avoids) == ({0: 1, 1: 2}, ("host-1",))
    job.removed(1).transition(1, NodeJoined, address="10.0.0.9", host="host-9").ready(1).steps()
    raised(job)
    assert job.state.outcome is not None
    assert job.state.outcome.reason.startswith("it failed again on 2 machines (ValueError at train.py:12): ")


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_an_error_of_all_machines_replaces_none_although_the_first_report_decides(order: tuple[int, int]):
    job = Scenario("2", **KUBERNETES).running()
    for _ in range(2):
        generation = job.generation
        for rank in order:
            raised(job, rank, generation=generation)
        if not is_over(job):
            job.steps()
    assert job.incarnations == {0: 1, 1: 1}
    assert job.state.outcome is not None
    assert "on 2 machines" in job.state.outcome.reason


def test_a_replacement_for_it_uses_up_restarts():
    job = raised(Scenario("2", retry={"max_restarts": 1}, **KUBERNETES).running()).steps()
    raised(job)
    assert job.state.outcome is not None
    assert "retry.max_restarts" in job.state.outcome.reason


def test_a_world_that_continued_from_a_checkpoint_may_have_failed_because_of_it():
    job = raised(Scenario("2").running(), progress=reported(50))
    restored = Restore(step=40, source=RestoreSource.MEMORY)
    job.transition(0, NodeRestoredCheckpoint, restored=restored, generation=job.generation).steps()
    assert not is_over(raised(job, progress=reported(50)))


def test_the_output_of_the_cause_is_kept_and_not_that_of_the_victim_that_reported_first():
    job = Scenario("2").running().peer_failed(0, log_tail="connection closed")
    raised(job)
    assert job.incident.log_tail == "the output of node 1"
