"""Tests of the node's decisions, event by event."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import pytest

from perdure.agent.progress import ProgressReader
from perdure.agent.telemetry import Telemetry
from perdure.contract import (
    Failure,
    FailureKind,
    Finished,
    Leaving,
    Ready,
    StopRequest,
)
from perdure.spec.checkpoint import Checkpoint
from perdure_training.node_api.bodies import (
    CommandExit,
    FinishedReport,
    HandlerHello,
    LauncherHello,
    LeavingReport,
    ReadyReport,
    UnmanagedReport,
    WorldAnswer,
)
from tests.agent.bench import NOW, Bench, rank


def test_the_culprit_named_is_who_died_of_a_signal(bench: Bench) -> None:
    bench.node.on_handler_hello(HandlerHello(pid=1, min_nodes=2, max_nodes=4, processes=2))
    bench.apply(1)
    victim = rank(error="RuntimeError: Connection closed by peer", time=NOW.replace(second=0).timestamp())
    culprit = rank(
        local_rank=1, global_rank=5, pid=11, exit_code=None, signal=11, time=NOW.replace(second=1).timestamp()
    )
    bench.node.on_ready(ReadyReport(after_generation=1, ranks=(victim, culprit), store_ports=(1,)))
    [failure] = bench.job.of(Failure)
    assert failure.message == "rank 5 was ended by SIGSEGV (and 1 more)"
    assert failure.progress.step == 7
    assert failure.time == NOW.replace(second=0)


def test_a_failure_is_told_once_over_restarts_too(bench: Bench) -> None:
    bench.apply(1)
    body = ReadyReport(after_generation=1, ranks=(rank(),))
    bench.node.on_ready(body)
    bench.start()
    bench.node.on_ready(body)
    bench.exit(generation=1, signal=9)
    bench.start()
    bench.exit(generation=1, signal=9)
    assert [failure.kind for failure in bench.job.of(Failure)] == [FailureKind.RANKS, FailureKind.COMMAND]


def test_ready_is_told_only_while_there_is_no_newer_world(bench: Bench) -> None:
    bench.node.on_ready(ReadyReport(after_generation=0, store_ports=(1, 2), processes=4))
    [ready] = bench.group.of(Ready)
    assert (ready.after_generation, ready.store_ports, ready.processes) == (0, (1, 2), 4)
    bench.apply(2)
    bench.node.on_ready(ReadyReport(after_generation=1, ranks=(rank(),)))
    assert len(bench.group.of(Ready)) == 1
    assert len(bench.job.of(Failure)) == 1


def test_a_commands_own_number_of_nodes_is_shown(tmp_path: Path) -> None:
    for folder, nodes, least, most, shown in (
        ("a", "2:4", 2, 4, None),
        ("b", "4", 4, 4, None),
        ("c", "2:4", 4, 4, "4:4"),
    ):
        (tmp_path / folder).mkdir()
        bench = Bench(tmp_path / folder, nodes=nodes)
        bench.node.on_handler_hello(HandlerHello(pid=5, min_nodes=least, max_nodes=most, processes=1))
        bench.node.on_ready(ReadyReport())
        [ready] = bench.group.of(Ready)
        assert ready.command_nodes == shown


def test_a_new_torchrun_never_gets_the_world_that_the_last_one_left(bench: Bench) -> None:
    node = bench.node
    node.on_handler_hello(HandlerHello(pid=5, min_nodes=2, max_nodes=4, processes=1))
    bench.apply(1)
    bench.enter(1)
    bench.exit(generation=1, signal=9)
    node.on_handler_hello(HandlerHello(pid=6, min_nodes=2, max_nodes=4, processes=1))
    assert not node.state.has_news(after=0, complete=0)
    assert node.state.world_for(0) is None
    node.on_ready(ReadyReport(after_generation=0))
    assert bench.group.of(Ready)[-1].after_generation == 1
    bench.apply(2)
    assert node.state.has_news(after=0, complete=0)
    world = node.state.world_for(0)
    assert world is not None
    assert (world.generation, node.state.desired.attempt) == (2, 2)


def test_a_torchrun_is_shown_worlds_of_its_own_stage_only(bench: Bench) -> None:
    bench.desire(complete_generation=4, stages_complete=1)
    bench.apply(5, stage=1)
    assert bench.node.state.world_answer(0) == WorldAnswer(complete=4, stages_complete=1)
    assert not bench.node.state.has_news(after=0, complete=4, stage=0, stages=1)
    assert bench.node.state.has_news(after=0, complete=4, stage=0, stages=0)
    world = bench.node.state.world_for(1)
    assert world is not None
    assert world.generation == 5
    assert bench.node.state.has_news(after=0, complete=4, stage=1, stages=1)


def test_in_env_mode_the_launcher_goes_into_newer_worlds_itself(tmp_path: Path) -> None:
    bench = Bench(tmp_path, mode="env")
    bench.apply(1)
    bench.enter(1)
    bench.node.on_finished(FinishedReport(generation=1, time=NOW.timestamp()))
    bench.apply(2)
    bench.exit(generation=1, code=0)
    assert bench.node.state.desired.attempt == 1
    assert bench.node.state.summary != "command ended"
    bench.enter(2)
    bench.node.on_finished(FinishedReport(generation=2, time=NOW.timestamp()))
    bench.exit(generation=2, code=0)
    assert [finished.generation for finished in bench.job.of(Finished)] == [1, 2]
    bench.apply(3)
    assert bench.node.state.desired.attempt == 2


def test_unprotected_ranks_are_stopped_and_explained_once(bench: Bench) -> None:
    bench.node.on_unmanaged(UnmanagedReport(ranks=(11, 12), detail="ranks without a rendezvous"))
    assert not bench.node.state.desired.run
    bench.exit(generation=0, signal=9)
    [failure] = bench.job.of(Failure)
    assert failure.kind is FailureKind.UNPROTECTED
    assert [one.pid for one in failure.ranks] == [11, 12]


def test_a_node_that_departs_has_a_checkpoint_made_first_and_reports_no_failure(bench: Bench) -> None:
    bench.config = bench.config.model_copy(update={"checkpoint": Checkpoint(storage="file:///saves")})
    bench.start().depart("`perdure join` got SIGTERM", save=True)
    # Its launcher gets the signal next.
    bench.node.on_leaving(LeavingReport(reason="the launcher received SIGTERM"))
    [leaving] = bench.group.of(Leaving)
    assert leaving.reason == "`perdure join` got SIGTERM"
    assert not bench.node.state.desired.exit
    bench.desire(released=True)
    assert bench.node.state.desired.exit
    bench.node.on_exited(CommandExit(attempt=1, generation=1, signal=15))
    assert bench.job.of(Failure) == []


def test_an_agent_that_has_lost_its_state_reports_that_its_ranks_have_finished(tmp_path: Path) -> None:
    """The launcher does not repeat the report, so the job would wait for it forever."""
    bench = Bench(tmp_path)
    bench.node.on_finished(FinishedReport(generation=3, time=NOW.timestamp()))
    assert len(bench.job.of(Finished)) == 1


SUSPENDED = StopRequest(reason="suspended", grace=timedelta(0))


@pytest.mark.parametrize("report", ["ranks", "command"])
@pytest.mark.parametrize(
    "end",
    [
        pytest.param(lambda bench: bench.node.depart("SIGTERM", save=False), id="its machine leaves at once"),
        pytest.param(lambda bench: bench.node.depart("SIGTERM", save=True), id="its machine leaves after a save"),
        pytest.param(lambda bench: bench.node.on_leaving(LeavingReport(reason="drain")), id="it is drained"),
        pytest.param(lambda bench: bench.node.leave("the job is over"), id="it is released"),
        pytest.param(lambda bench: bench.desire(stop=SUSPENDED), id="the job stops it"),
    ],
)
def test_a_script_that_exits_with_0_as_it_is_ended_has_finished_nothing(
    tmp_path: Path, end: Callable[[Bench], object], report: str
) -> None:
    bench = Bench(tmp_path, mode="env")
    bench.apply(1)
    bench.enter(1)
    end(bench)
    if report == "ranks":
        bench.node.on_finished(FinishedReport(generation=1, time=NOW.timestamp()))
    bench.exit(generation=1, code=0)
    assert bench.job.of(Finished) == []


@pytest.mark.parametrize("again", [False, True])
def test_a_node_that_departs_without_saving_leaves_at_once(bench: Bench, again: bool) -> None:
    if again:
        bench.config = bench.config.model_copy(update={"checkpoint": Checkpoint(storage="file:///saves")})
        bench.start().depart("Ctrl-C", save=True)
    bench.node.depart("Ctrl-C", save=not again)
    assert bench.node.state.desired.exit
    assert bench.node.state.leaving == "Ctrl-C"


def test_a_node_that_leaves_reports_no_failure(bench: Bench) -> None:
    bench.apply(1)
    bench.node.leave("scaled down")
    bench.node.on_ready(ReadyReport(after_generation=1, ranks=(rank(),)))
    bench.exit(generation=1, signal=15)
    assert not bench.job.messages
    assert bench.node.state.desired.exit
    assert bench.node.state.summary == "leaving"


def test_versions_change_with_what_is_wanted_and_with_each_agent(bench: Bench) -> None:
    first = bench.node.state.desired.version
    bench.node.on_ready(ReadyReport())
    assert bench.node.state.desired.version == first
    bench.apply(1)
    second = bench.node.state.desired.version
    assert second > first
    bench.start()
    assert bench.node.state.desired.version > second
    assert bench.node.state.generation == 1


def test_an_agent_that_forgot_learns_from_its_launcher(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    (tmp_path / "agent-state.json").write_text("{")
    bench.start()
    bench.node.on_launcher_hello(LauncherHello(pid=1, attempt=4, mode="torchrun"))
    assert bench.node.state.desired.attempt == 4
    bench.exit(attempt=4, generation=9, signal=9)
    bench.apply(10)
    assert bench.node.state.desired.attempt == 5


def script(bench: Bench, *, attempt: int = 1) -> None:
    hello = LauncherHello(pid=1, attempt=attempt, mode="torchrun", script=True)
    bench.node.on_launcher_hello(hello)


def torchrun(bench: Bench, *, pid: int = 5) -> None:
    bench.node.on_handler_hello(HandlerHello(pid=pid, min_nodes=2, max_nodes=4, processes=1))


def test_a_script_that_has_not_come_to_its_torchrun_has_not_missed_its_world(bench: Bench) -> None:
    script(bench)
    bench.apply(1)
    bench.node.report_overdue()
    assert bench.node.state.prepares
    assert bench.start().state.prepares
    assert bench.job.of(Failure) == []
    torchrun(bench)
    assert not bench.node.state.prepares
    bench.node.report_overdue()
    assert [failure.kind for failure in bench.job.of(Failure)] == [FailureKind.RENDEZVOUS]


def test_a_script_that_begins_anew_prepares_until_the_torchrun_that_has_ranks_to_run(bench: Bench) -> None:
    script(bench)
    torchrun(bench)
    bench.apply(1)
    bench.enter(1)
    bench.desire(complete_generation=1, stages_complete=1)
    bench.exit(generation=1, code=7)
    assert not bench.node.state.prepares
    bench.apply(2, stage=1)
    assert bench.node.state.prepares
    torchrun(bench, pid=6)
    bench.node.on_ready(ReadyReport(after_generation=1, stage=0))
    assert bench.node.state.prepares
    torchrun(bench, pid=7)
    bench.node.on_ready(ReadyReport(after_generation=1, stage=1))
    assert not bench.node.state.prepares


def test_torchrun_itself_does_no_work_of_its_own(bench: Bench) -> None:
    assert not bench.node.state.prepares


def test_work_before_torchrun_is_reported_when_it_takes_long_and_as_long_as_it_lasts(bench: Bench) -> None:
    script(bench)
    reports: list[float] = []
    telemetry = Telemetry(
        bench.node, ProgressReader(bench.config.run_dir), to_group=bench.group, on_preparing=lambda: reports.append(now)
    )
    for now in range(0, 800, 20):
        telemetry.look_for_preparation(now)
    assert reports == [60, 220, 380, 540, 700]
    torchrun(bench)
    for now in range(800, 2000, 20):
        telemetry.look_for_preparation(now)
    assert reports == [60, 220, 380, 540, 700]
