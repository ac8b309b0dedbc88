"""Tests of the node's decisions, event by event."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from agent.config import AgentConfig
from agent.datasets import Datasets
from agent.node import Node
from agent.outbox import ControlPlaneBusy
from agent.progress import ProgressReader
from agent.state import StateFile
from agent.store import StoreCalls
from agent.telemetry import Telemetry
from perdure.spec.checkpoint import Checkpoint
from perdure_launcher.protocol import (
    CommandExit,
    EnteredReport,
    FinishedReport,
    HandlerHello,
    LauncherHello,
    LeavingReport,
    RankExit,
    ReadyReport,
    SupersededReport,
    UnmanagedReport,
)
from workflows.messages import (
    AgentMessage,
    ApplyWorld,
    DatasetAnswer,
    DatasetRequest,
    Failure,
    FailureKind,
    Finished,
    Leaving,
    NodeCredentials,
    Progress,
    Ready,
    StoreAnswers,
    StoreRequest,
)

NOW = datetime(2026, 11, 21, 12, 0, tzinfo=UTC)
IDENTITY = NodeCredentials(uid="0a1b2c3d", role="worker", rank=3, incarnation=2, token="secret")


class Told:
    """Keeps what it is told."""

    def __init__(self) -> None:
        self.messages: list[AgentMessage] = []

    def put(self, message: AgentMessage, *, first: bool = False) -> None:
        self.messages.append(message)

    def of(self, kind: type) -> list[Any]:
        return [message for message in self.messages if isinstance(message, kind)]


async def _no_exchange(name: str, request: DatasetRequest) -> DatasetAnswer:
    raise ControlPlaneBusy(f"{name} does not answer")


async def _no_call(request: StoreRequest) -> StoreAnswers:
    raise ControlPlaneBusy("the store does not answer")


class Bench:
    """A node and those it talks to."""

    def __init__(self, run_dir: Path, *, nodes: str = "2:4", mode: str = "torchrun") -> None:
        self.config = AgentConfig(
            node=IDENTITY,
            job_id="job/a/b",
            job_first_run_id="first",
            group_id="group",
            task_queue="queue",
            address="127.0.0.1",
            nodes=nodes,
            run_dir=run_dir,
        )
        self.job, self.group = Told(), Told()
        self.node = self.start()
        self.node.on_launcher_hello(LauncherHello(pid=1, attempt=1, mode=mode, processes=1))
        self.store = StoreCalls(
            IDENTITY,
            send=_no_call,
            state=lambda: self.node.state,
            changed=self.node.changed,
            to_group=self.group.put,
        )
        self.datasets = Datasets(IDENTITY, send=_no_exchange, state=lambda: self.node.state, to_group=self.group.put)

    @property
    def of_ranks(self) -> dict[str, Any]:
        """What serves requests of ranks, as a server takes it."""
        return {"datasets": self.datasets, "store": self.store}

    def start(self) -> Node:
        """An agent that has just started, perhaps again."""
        self.node = Node(
            self.config,
            StateFile(self.config.run_dir),
            to_job=self.job,
            to_group=self.group,
            progress=lambda: Progress(step=7),
        )
        return self.node

    def apply(self, generation: int, *, stage: int = 0) -> None:
        command = ApplyWorld(
            node=IDENTITY,
            generation=generation,
            nodes=2,
            group_rank=0,
            base_rank=0,
            world_size=2,
            store_address="127.0.0.1",
            store_port=29500 + generation,
            store_host=True,
            stage=stage,
        )
        assert self.node.apply_world(command).accepted

    def enter(self, generation: int) -> None:
        self.node.on_entered(EnteredReport(generation=generation, time=NOW.timestamp()))

    def exit(self, *, attempt: int = 1, generation: int, code: int | None = None, **fields: Any) -> None:
        self.node.on_exited(
            CommandExit(attempt=attempt, generation=generation, exit_code=code, time=NOW.timestamp(), **fields)
        )


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    return Bench(tmp_path)


def rank(**fields: Any) -> RankExit:
    return RankExit(**{"local_rank": 0, "global_rank": 0, "pid": 10, "exit_code": 1, "time": NOW.timestamp(), **fields})


def test_the_culprit_named_is_who_died_of_a_signal(bench: Bench) -> None:
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


def test_a_node_that_its_job_ends_is_no_failure(bench: Bench) -> None:
    bench.apply(1)
    bench.node.leave("the job is over")
    bench.node.on_leaving(LeavingReport(reason="the launcher received SIGTERM"))
    bench.exit(generation=1, code=1)
    assert bench.job.of(Failure) == []


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
    assert not node.has_news(after=0, complete=0)
    assert node.world_for(-1).generation == 0
    node.on_ready(ReadyReport(after_generation=0))
    assert bench.group.of(Ready)[-1].after_generation == 1
    bench.apply(2)
    assert node.has_news(after=0, complete=0)
    assert (node.world_for(-1).generation, node.desired.attempt) == (2, 2)


def test_a_superseded_command_runs_again_at_once(bench: Bench) -> None:
    bench.apply(1)
    bench.enter(1)
    bench.node.on_finished(FinishedReport(generation=1, time=NOW.timestamp()))
    bench.apply(2)
    bench.exit(generation=1, code=87, superseded=True)
    assert bench.node.desired.attempt == 2
    assert not bench.job.of(Failure)


def test_leaving_the_barrier_of_a_generation_that_is_over_is_no_end(bench: Bench) -> None:
    bench.apply(1)
    bench.enter(1)
    bench.apply(2)
    bench.exit(generation=1, code=0)
    assert bench.node.desired.attempt == 2
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
    assert bench.node.desired.attempt == 2
    [failure] = bench.job.of(Failure)
    assert (failure.kind, failure.generation, failure.starts_again) == (FailureKind.COMMAND, 1, world_first)


def test_a_command_that_ends_before_its_rendezvous_runs_again_once_for_each_newer_world(bench: Bench) -> None:
    bench.apply(1)
    bench.exit(attempt=1, generation=0, code=1)
    assert bench.node.desired.attempt == 2
    bench.exit(attempt=2, generation=0, code=1)
    assert bench.node.desired.attempt == 2
    first, second = bench.job.of(Failure)
    assert (first.generation, first.starts_again) == (0, True)
    assert (second.generation, second.starts_again) == (1, False)
    assert second.message == "the command exited with 1 before it entered generation 1"
    bench.apply(2)
    assert bench.node.desired.attempt == 3


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
    assert bench.node.desired.attempt == 1
    [failure] = bench.job.of(Failure)
    assert (failure.generation, failure.starts_again) == (1, False)


def test_a_command_without_a_rendezvous_finishes_by_ending_well(bench: Bench) -> None:
    bench.exit(generation=0, code=0)
    [finished] = bench.job.of(Finished)
    assert finished.generation == 0
    assert bench.node.desired.attempt == 1


def test_the_end_of_torchrun_and_the_end_of_its_command_are_reported_apart(bench: Bench) -> None:
    bench.apply(1)
    bench.enter(1)
    bench.node.on_finished(FinishedReport(generation=1, time=NOW.timestamp()))
    bench.node.complete_generation(1, stages=1)
    assert bench.node.state.summary == "its command runs without ranks"
    for _ in range(2):
        bench.exit(generation=1, code=0)
    assert [(told.generation, told.command_runs) for told in bench.job.of(Finished)] == [(1, True), (1, False)]
    assert not bench.job.of(Failure)
    assert bench.node.desired.attempt == 1


@pytest.mark.parametrize("how", [{"code": 7}, {"signal": 9}])
def test_a_command_that_fails_after_its_torchrun_is_a_failure_and_starts_again_when_asked(
    bench: Bench, how: dict[str, int]
) -> None:
    bench.apply(1)
    bench.enter(1)
    bench.node.on_finished(FinishedReport(generation=1, time=NOW.timestamp()))
    bench.node.complete_generation(1, stages=1)
    bench.exit(generation=1, **how)
    [failure] = bench.job.of(Failure)
    assert (failure.kind, failure.generation, failure.starts_again) == (FailureKind.COMMAND, 1, False)
    assert bench.node.desired.attempt == 1
    for _ in range(2):
        assert bench.node.restart_command(1).accepted
        assert bench.node.desired.attempt == 2


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


def test_a_torchrun_is_shown_worlds_of_its_own_stage_only(bench: Bench) -> None:
    bench.node.complete_generation(4, stages=1)
    bench.apply(5, stage=1)
    assert bench.node.world_for(0).generation == 0
    assert bench.node.world_for(0).stages_complete == 1
    assert not bench.node.has_news(after=0, complete=4, stage=0, stages=1)
    assert bench.node.has_news(after=0, complete=4, stage=0, stages=0)
    assert bench.node.world_for(1).generation == 5
    assert bench.node.has_news(after=0, complete=4, stage=1, stages=1)


def test_a_superseded_exit_barrier_has_the_command_started_again_once(bench: Bench) -> None:
    bench.apply(1)
    bench.enter(1)
    bench.node.on_superseded(SupersededReport(generation=1))
    assert bench.node.desired.attempt == 1
    bench.apply(2)
    for _ in range(2):
        bench.node.on_superseded(SupersededReport(generation=1))
        assert bench.node.desired.attempt == 2
    bench.exit(attempt=1, generation=1, code=87, superseded=True)
    assert bench.node.desired.attempt == 2
    assert not bench.job.of(Failure)


def test_in_env_mode_the_launcher_goes_into_newer_worlds_itself(tmp_path: Path) -> None:
    bench = Bench(tmp_path, mode="env")
    bench.apply(1)
    bench.enter(1)
    bench.node.on_finished(FinishedReport(generation=1, time=NOW.timestamp()))
    bench.apply(2)
    bench.exit(generation=1, code=0)
    assert bench.node.desired.attempt == 1
    assert bench.node.state.summary != "command ended"
    bench.enter(2)
    bench.node.on_finished(FinishedReport(generation=2, time=NOW.timestamp()))
    bench.exit(generation=2, code=0)
    assert [finished.generation for finished in bench.job.of(Finished)] == [1, 2]
    bench.apply(3)
    assert bench.node.desired.attempt == 2


def test_a_command_that_could_not_be_started_says_why(bench: Bench) -> None:
    bench.exit(generation=0, code=127, log_tail="perdure: torchrunn: command not found\n")
    [failure] = bench.job.of(Failure)
    assert (failure.kind, failure.exit_code, failure.generation) == (FailureKind.COMMAND, 127, 0)
    assert failure.message == "the command exited with 127"
    assert "not found" in failure.log_tail


def test_unprotected_ranks_are_stopped_and_explained_once(bench: Bench) -> None:
    bench.node.on_unmanaged(UnmanagedReport(ranks=(11, 12), detail="ranks without a rendezvous"))
    assert not bench.node.desired.run
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
    assert not bench.node.desired.exit
    bench.node.release()
    assert bench.node.desired.exit
    bench.node.on_exited(CommandExit(attempt=1, generation=1, signal=15))
    assert bench.job.of(Failure) == []


@pytest.mark.parametrize("again", [False, True])
def test_a_node_that_departs_without_saving_leaves_at_once(bench: Bench, again: bool) -> None:
    if again:
        bench.config = bench.config.model_copy(update={"checkpoint": Checkpoint(storage="file:///saves")})
        bench.start().depart("Ctrl-C", save=True)
    bench.node.depart("Ctrl-C", save=not again)
    assert bench.node.desired.exit
    assert bench.node.state.leaving == "Ctrl-C"


def test_a_node_that_leaves_reports_no_failure(bench: Bench) -> None:
    bench.apply(1)
    bench.node.leave("scaled down")
    bench.node.on_ready(ReadyReport(after_generation=1, ranks=(rank(),)))
    bench.exit(generation=1, signal=15)
    assert not bench.job.messages
    assert bench.node.desired.exit
    assert bench.node.state.summary == "leaving"


def test_versions_change_with_what_is_wanted_and_with_each_agent(bench: Bench) -> None:
    first = bench.node.desired.version
    bench.node.on_ready(ReadyReport())
    assert bench.node.desired.version == first
    bench.apply(1)
    second = bench.node.desired.version
    assert second > first
    bench.start()
    assert bench.node.desired.version > second
    assert bench.node.state.generation == 1


def test_an_agent_that_forgot_learns_from_its_launcher(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    (tmp_path / "agent-state.json").write_text("{")
    bench.start()
    bench.node.on_launcher_hello(LauncherHello(pid=1, attempt=4, mode="torchrun"))
    assert bench.node.desired.attempt == 4
    bench.exit(attempt=4, generation=9, signal=9)
    bench.apply(10)
    assert bench.node.desired.attempt == 5


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
    bench.node.complete_generation(1, stages=1)
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
