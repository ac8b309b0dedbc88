"""Tests of the agent's part in checks of its machine: the launcher's answer, its clock, and other nodes."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from perdure.agent import checks
from perdure.agent.checks import Checker
from perdure.contract import Checked, CheckKind, CheckNode, NodeChecks, NodeLink, Peer
from perdure.contract.checks import MOST_CHECKS
from perdure.spec.preflight import Preflight
from perdure_training.node_api.bodies import CheckFigure, CheckRequest, ChecksReport, LauncherHello
from tests.agent.bench import IDENTITY, Bench
from tests.support.waiting import DEADLINE

QUESTION = CheckNode(uid=IDENTITY.uid, role=IDENTITY.role, rank=IDENTITY.rank, incarnation=IDENTITY.incarnation)


async def asked(
    bench: Bench, checker: Checker, question: CheckNode = QUESTION, *, ahead: float = 0.0
) -> asyncio.Task[NodeChecks]:
    """A question that the launcher can see."""
    handed_out = datetime.now(UTC) - timedelta(seconds=ahead)
    answering = asyncio.create_task(checker.answer(question, handed_out=handed_out))
    assert await bench.node.changed.wait_for(lambda: bench.node.state.checks is not None, within=DEADLINE)
    return answering


def report(bench: Bench, *figures: CheckFigure) -> ChecksReport:
    assert bench.node.state.desired.checks is not None
    return ChecksReport(request=bench.node.state.desired.checks.number, figures=figures)


async def test_the_answer_has_the_figures_of_the_launcher_and_the_clock(bench: Bench):
    began, checker = datetime.now(UTC), Checker(bench.node)
    answering = await asked(bench, checker, ahead=7.0)
    assert bench.node.state.desired.checks == CheckRequest(number=1, kind="quick")
    checker.on_report(report(bench, CheckFigure(name="memory", value=9.0, unit="MB/s", seconds=0.1)))
    memory, clock = (await answering).checks
    assert (memory.name, memory.value, memory.unit, memory.seconds) == ("memory", 9.0, "MB/s", 0.1)
    assert clock.name == "clock"
    assert 7.0 <= (clock.value or 0.0) <= 7.0 + (datetime.now(UTC) - began).total_seconds()


async def test_other_nodes_are_tried_and_the_one_that_does_not_answer_is_named(bench: Bench):
    listening = await asyncio.start_server(lambda _, writer: writer.close(), "127.0.0.1", 0)
    port = listening.sockets[0].getsockname()[1]
    # A machine that refuses a connection answers; a name that there is not does not.
    peers = (Peer(rank=0, address="127.0.0.1", port=port), Peer(rank=1, address="127.0.0.1", port=9))
    peers = (*peers, Peer(rank=2, address="no-such-machine.invalid", port=9))
    checker = Checker(bench.node)
    answering = await asked(bench, checker, QUESTION.replace(peers=peers))
    checker.on_report(report(bench))
    reached = [check for check in (await answering).checks if check.name == "reach"]
    assert [bool(check.problem) for check in reached] == [False, False, True]
    assert reached[2].subject == "node 2"
    assert "no-such-machine.invalid port 9 cannot be reached" in reached[2].problem
    listening.close()


async def test_a_launcher_that_does_not_answer_is_a_failed_check(bench: Bench, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(checks.ANSWER_WITHIN, CheckKind.QUICK, 0.2)
    checker = Checker(bench.node)
    (failed, _) = (await (await asked(bench, checker))).checks
    assert (failed.name, failed.problem) == ("launcher", "the launcher of the node has not answered within 0.2 s")
    # An answer to that request is no answer to the next one.
    late = report(bench)
    again = asyncio.create_task(checker.measure(CheckRequest()))
    assert await bench.node.changed.wait_for(lambda: bench.node.state.checks != CheckRequest(number=1), within=DEADLINE)
    checker.on_report(late)
    assert [check.name for check in await again] == ["launcher"]


async def test_one_end_of_a_link_is_measured_alone(bench: Bench):
    checker = Checker(bench.node)
    link = NodeLink(address="10.0.0.1", port=20_001, end=1)
    answering = await asked(bench, checker, QUESTION.replace(kind=CheckKind.LINK, link=link))
    assert bench.node.state.desired.checks == CheckRequest(
        number=1, kind="link", address="10.0.0.1", port=20_001, rank=1
    )
    checker.on_report(report(bench, CheckFigure(name="link", value=100.0)))
    assert [check.name for check in (await answering).checks] == ["link"]


async def test_an_answer_is_bounded_whatever_the_launcher_says(bench: Bench):
    checker = Checker(bench.node)
    answering = await asked(bench, checker)
    checker.on_report(report(bench, *(CheckFigure(name="x" * 9_000, problem="y" * 9_000) for _ in range(200))))
    answer = await answering
    assert len(answer.checks) == MOST_CHECKS
    assert len(answer.model_dump_json()) < 300_000


async def test_a_restarted_agent_counts_on(bench: Bench):
    """The launcher answers a number once."""
    first = bench.node.request_checks(CheckRequest())
    assert bench.start().request_checks(CheckRequest(kind="full")) == first + 1


@pytest.fixture
def checking(tmp_path: Path) -> Bench:
    """A node of a job with `preflight: quick`."""
    return Bench(tmp_path, preflight=Preflight.QUICK)


async def test_checks_before_a_world_are_reported_once_with_the_clock(checking: Bench):
    bench, checker, began = checking, Checker(checking.node), datetime.now(UTC)
    checker.on_time(datetime.now(UTC) - timedelta(seconds=9))
    checker.on_time(datetime.now(UTC) - timedelta(seconds=3))
    running = asyncio.create_task(checker.make_checks())
    assert await bench.node.changed.wait_for(lambda: bench.node.state.checks is not None, within=DEADLINE)
    checker.on_report(report(bench, CheckFigure(name="memory", value=9.0)))
    assert await bench.node.changed.wait_for(lambda: bench.node.state.checked == 1, within=DEADLINE)
    (message,) = bench.group.of(Checked)
    memory, clock = message.checks
    assert (message.run, memory.name, clock.name) == (1, "memory", "clock")
    # An activity may begin late, so the least difference counts.
    assert 3.0 <= clock.value <= 3.0 + (datetime.now(UTC) - began).total_seconds()
    running.cancel()
    # An agent that was started again has nothing left to check.
    again = Checker(bench.start())
    assert bench.node.state.checked == 1
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.2):
            await again.make_checks()


async def test_the_job_can_ask_for_a_second_run(checking: Bench):
    bench, checker = checking, Checker(checking.node)
    running = asyncio.create_task(checker.make_checks())
    for run in (1, 2):
        assert await bench.node.changed.wait_for(
            lambda run=run: bench.node.state.checks is not None and bench.node.state.checks.number == run, within=5
        )
        checker.on_report(report(bench))
        assert await bench.node.changed.wait_for(lambda run=run: bench.node.state.checked == run, within=DEADLINE)
        bench.node.apply_desired(bench.desires.next(check_runs=2))
    assert [message.run for message in bench.group.of(Checked)] == [1, 2]
    running.cancel()


async def test_without_preflight_only_what_the_job_asks_for_is_measured_twice(bench: Bench):
    checker = Checker(bench.node)
    running = asyncio.create_task(checker.make_checks())
    assert not await bench.node.changed.wait_for(lambda: bench.node.state.checks is not None, within=0.1)
    bench.node.apply_desired(bench.desires.next(check_runs=2))
    for run in (1, 2):
        assert await bench.node.changed.wait_for(
            lambda run=run: bench.node.state.checks is not None and bench.node.state.checks.number == run, within=5
        )
        assert bench.node.state.checks is not None
        assert bench.node.state.checks.kind == "quick"
        checker.on_report(report(bench))
        assert await bench.node.changed.wait_for(lambda run=run: bench.node.state.checked == run, within=DEADLINE)
    assert [message.run for message in bench.group.of(Checked)] == [1, 2]
    running.cancel()


async def test_nothing_is_measured_before_the_launcher_runs(tmp_path: Path):
    """Its container may take minutes to start."""
    bench = Bench(tmp_path, preflight=Preflight.QUICK, mode="")
    running = asyncio.create_task(Checker(bench.node).make_checks())
    assert not await bench.node.changed.wait_for(lambda: bench.node.state.checks is not None, within=0.2)
    bench.node.on_launcher_hello(LauncherHello(pid=1, mode="torchrun", processes=1))
    assert await bench.node.changed.wait_for(lambda: bench.node.state.checks is not None, within=DEADLINE)
    running.cancel()
