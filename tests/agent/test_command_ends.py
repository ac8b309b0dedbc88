"""Tests of the end of a command, and what the node reports and starts then."""

from __future__ import annotations

import pytest

from perdure.contract import (
    Failure,
    FailureKind,
    Finished,
    Ready,
)
from perdure_training.node_api.bodies import (
    FinishedReport,
    LeavingReport,
    ReadyReport,
    SupersededReport,
)
from tests.agent.bench import NOW, Bench, rank


@pytest.mark.parametrize("code", [0, 1, 143])
def test_a_node_that_is_ended_from_outside_is_lost_however_its_command_ends(bench: Bench, code: int) -> None:
    bench.apply(1)
    bench.node.on_leaving(LeavingReport(reason="the launcher received SIGTERM"))
    bench.start()
    bench.node.on_ready(ReadyReport(after_generation=1, ranks=(rank(),)))
    bench.node.on_finished(FinishedReport(generation=1, time=NOW.timestamp()))
    bench.exit(generation=1, code=code)
    [failure] = bench.job.of(Failure)
    assert (failure.kind, failure.message) == (FailureKind.NODE, "node 3 lost: the launcher received SIGTERM")
    assert bench.job.of(Finished) == []
    assert bench.group.of(Ready) == []


def test_a_failure_quotes_no_secret_of_the_command(bench: Bench) -> None:
    bench.apply(1)
    bench.enter(1)
    quoted = "error: unrecognized arguments: --token hunter2"
    bench.exit(generation=1, code=1, log_tail=quoted, ranks=(rank(error=quoted, traceback=quoted),), message=quoted)
    [failure] = bench.job.of(Failure)
    shown = "error: unrecognized arguments: --token [redacted]"
    assert (failure.log_tail, failure.ranks[0].error, failure.ranks[0].traceback) == (shown, shown, shown)
    assert "hunter2" not in str(failure)


def test_a_node_that_its_job_ends_is_no_failure(bench: Bench) -> None:
    bench.apply(1)
    bench.node.leave("the job is over")
    bench.node.on_leaving(LeavingReport(reason="the launcher received SIGTERM"))
    bench.exit(generation=1, code=1)
    assert bench.job.of(Failure) == []


def test_a_superseded_command_runs_again_at_once(bench: Bench) -> None:
    bench.apply(1)
    bench.enter(1)
    bench.node.on_finished(FinishedReport(generation=1, time=NOW.timestamp()))
    bench.apply(2)
    bench.exit(generation=1, code=87, superseded=True)
    assert bench.node.state.desired.attempt == 2
    assert not bench.job.of(Failure)


def test_leaving_the_barrier_of_a_generation_that_is_over_is_no_end(bench: Bench) -> None:
    bench.apply(1)
    bench.enter(1)
    bench.apply(2)
    bench.exit(generation=1, code=0)
    assert bench.node.state.desired.attempt == 2
    assert not bench.job.of(Finished)


@pytest.mark.parametrize("world_first", [True, False], ids=["world, then exit", "exit, then world"])
@pytest.mark.parametrize("how", [{"code": 1}, {"signal": 9}, {"code": 137}])
def test_a_command_that_ends_runs_again_for_a_newer_world_and_is_reported(
    bench: Bench, how: dict[str, int], world_first: bool
) -> None:
    bench.apply(1)
    bench.enter(1)
    if world_first:
        bench.apply(2)
    bench.exit(generation=1, **how)
    if not world_first:
        bench.apply(2)
    assert bench.node.state.desired.attempt == 2
    [failure] = bench.job.of(Failure)
    assert (failure.kind, failure.generation, failure.starts_again) == (FailureKind.COMMAND, 1, world_first)


def test_a_command_that_ends_before_its_rendezvous_runs_again_once_for_each_newer_world(bench: Bench) -> None:
    bench.apply(1)
    bench.exit(attempt=1, generation=0, code=1)
    assert bench.node.state.desired.attempt == 2
    bench.exit(attempt=2, generation=0, code=1)
    assert bench.node.state.desired.attempt == 2
    first, second = bench.job.of(Failure)
    assert (first.generation, first.starts_again) == (0, True)
    assert (second.generation, second.starts_again) == (1, False)
    assert second.message == "the command exited with 1 before it entered generation 1"
    bench.apply(2)
    assert bench.node.state.desired.attempt == 3


def test_a_command_that_leaves_before_it_enters_its_world_has_not_finished(bench: Bench) -> None:
    bench.apply(1)
    bench.enter(1)
    bench.exit(attempt=1, generation=1, signal=9)
    bench.apply(2)
    bench.exit(attempt=2, generation=1, code=0)
    assert not bench.job.of(Finished)
    failure = bench.job.of(Failure)[-1]
    assert (failure.generation, failure.exit_code, failure.starts_again) == (2, 0, False)


def test_a_command_that_cannot_be_started_is_not_tried_again_for_a_newer_world(bench: Bench) -> None:
    bench.apply(1)
    bench.exit(generation=0, code=127)
    assert bench.node.state.desired.attempt == 1
    [failure] = bench.job.of(Failure)
    assert (failure.generation, failure.starts_again) == (1, False)


def test_a_command_without_a_rendezvous_finishes_by_ending_well(bench: Bench) -> None:
    bench.exit(generation=0, code=0)
    [finished] = bench.job.of(Finished)
    assert finished.generation == 0
    assert bench.node.state.desired.attempt == 1


def test_the_end_of_torchrun_and_the_end_of_its_command_are_reported_apart(bench: Bench) -> None:
    bench.apply(1)
    bench.enter(1)
    bench.node.on_finished(FinishedReport(generation=1, time=NOW.timestamp()))
    bench.desire(complete_generation=1, stages_complete=1)
    assert bench.node.state.summary == "its command runs without ranks"
    for _ in range(2):
        bench.exit(generation=1, code=0)
    assert [(told.generation, told.command_runs) for told in bench.job.of(Finished)] == [(1, True), (1, False)]
    assert not bench.job.of(Failure)
    assert bench.node.state.desired.attempt == 1


@pytest.mark.parametrize("how", [{"code": 7}, {"signal": 9}])
def test_a_command_that_fails_after_its_torchrun_is_a_failure_and_starts_again_when_asked(
    bench: Bench, how: dict[str, int]
) -> None:
    bench.apply(1)
    bench.enter(1)
    bench.node.on_finished(FinishedReport(generation=1, time=NOW.timestamp()))
    bench.desire(complete_generation=1, stages_complete=1)
    bench.exit(generation=1, **how)
    [failure] = bench.job.of(Failure)
    assert (failure.kind, failure.generation, failure.starts_again) == (FailureKind.COMMAND, 1, False)
    assert bench.node.state.desired.attempt == 1
    for _ in range(2):
        assert bench.desire(command_restarts=1).accepted
        assert bench.node.state.desired.attempt == 2


def test_an_exit_code_of_0_does_not_hide_ranks_that_have_not_finished(bench: Bench) -> None:
    bench.apply(1)
    bench.enter(1)
    bench.exit(generation=1, code=0)
    assert not bench.job.of(Finished)
    [failure] = bench.job.of(Failure)
    assert failure.message == "the command exited with 0 although its ranks had not finished generation 1"


def test_a_job_that_ends_its_nodes_hears_nothing_of_how_they_end(bench: Bench) -> None:
    bench.apply(1)
    bench.enter(1)
    bench.node.leave("the job was cancelled")
    bench.exit(generation=1, signal=15)
    assert not bench.job.messages


def test_a_superseded_exit_barrier_has_the_command_started_again_once(bench: Bench) -> None:
    bench.apply(1)
    bench.enter(1)
    bench.node.on_superseded(SupersededReport(generation=1))
    assert bench.node.state.desired.attempt == 1
    bench.apply(2)
    for _ in range(2):
        bench.node.on_superseded(SupersededReport(generation=1))
        assert bench.node.state.desired.attempt == 2
    bench.exit(attempt=1, generation=1, code=87, superseded=True)
    assert bench.node.state.desired.attempt == 2
    assert not bench.job.of(Failure)


def test_a_command_that_could_not_be_started_says_why(bench: Bench) -> None:
    bench.exit(generation=0, code=127, log_tail="perdure: torchrunn: command not found\n")
    [failure] = bench.job.of(Failure)
    assert (failure.kind, failure.exit_code, failure.generation) == (FailureKind.COMMAND, 127, 0)
    assert failure.message == "the command exited with 127"
    assert "not found" in failure.log_tail
