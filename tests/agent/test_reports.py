"""Tests that reports of a node's processes reach the agent, whatever the processes die of."""

from __future__ import annotations

import asyncio
import tempfile
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from perdure.agent.progress import ProgressReader
from perdure.agent.server import NodeServer
from perdure.agent.telemetry import Telemetry
from perdure.contract import Failure, FailureKind, Finished
from perdure_launcher.agent_link.session import AgentSession, Outbox
from perdure_training.node_api import agent_client
from perdure_training.node_api.agent_client import AgentConnection, AgentRefused
from perdure_training.node_api.bodies import (
    Body,
    CommandExit,
    EnteredReport,
    FinishedReport,
    HandlerHello,
    LauncherHello,
    LeavingReport,
    RankExit,
    ReadyReport,
    UnmanagedReport,
)
from tests.agent.bench import Bench
from tests.support.waiting import DEADLINE, tasks_wait

PATIENCE = timedelta(seconds=DEADLINE)
HELLO = LauncherHello(pid=1, attempt=1, processes=1)

texts = st.one_of(
    st.text(st.characters(exclude_categories=()), max_size=20),
    st.sampled_from(["caf\udce9.jpg", "\0", "\ud83d", "x" * 5_000_000, "\x1b]52;c;eA==\x07"]),
)
times = st.one_of(st.none(), st.floats(), st.sampled_from([1e300, -1e300, 1.7e9]))
rank_exits = st.builds(
    RankExit,
    local_rank=st.integers(0, 7),
    global_rank=st.none() | st.integers(0, 1000),
    pid=st.none() | st.integers(0, 2**22),
    exit_code=st.none() | st.integers(0, 255),
    signal=st.none() | st.integers(1, 64),
    error=st.none() | texts,
    traceback=st.none() | texts,
    time=times,
)


def deliver(bench: Bench, *reports: tuple[str, Body], hello: LauncherHello = HELLO) -> None:
    """Has the launcher's outbox post to the agent's server."""

    async def run(run_dir: Path) -> None:
        telemetry = Telemetry(bench.node, ProgressReader(run_dir), to_group=bench.group)
        server = NodeServer(
            bench.node, telemetry, run_dir, **bench.of_ranks, on_hello=lambda _: None, on_waits=lambda: None
        )
        await server.start()
        session = AgentSession(socket_path=run_dir / "agent.sock", hello_path="/v1/launcher/hello", hello=lambda: hello)
        outbox = Outbox(session)
        for path, body in reports:
            outbox.post(path, body)
        outbox.start()
        assert await asyncio.to_thread(outbox.flush, PATIENCE)
        session.close()
        # Its thread ends at the next post.
        outbox.post(*reports[0])
        await asyncio.to_thread(outbox.join)
        server.close()
        await tasks_wait()

    asyncio.run(run(bench.config.run_dir))


def node(folder: str) -> Bench:
    bench = Bench(Path(folder))
    bench.node.on_handler_hello(HandlerHello(pid=4, min_nodes=2, max_nodes=4, processes=8))
    bench.apply(1)
    bench.enter(1)
    return bench


@given(ranks=st.lists(rank_exits, min_size=1, max_size=2))
def test_failed_ranks_count_whatever_they_died_of(ranks: list[RankExit]) -> None:
    with tempfile.TemporaryDirectory(prefix="pl-") as folder:
        bench = node(folder)
        deliver(bench, ("/v1/rendezvous/ready", ReadyReport(after_generation=1, ranks=tuple(ranks))))
        [failure] = bench.job.of(Failure)
        assert [(one.local_rank, one.signal, one.exit_code) for one in failure.ranks] == [
            (one.local_rank, one.signal, one.exit_code) for one in ranks
        ]
        assert bench.node.state.ready_after == 1


@given(tail=texts, message=texts, time=times, ranks=st.lists(rank_exits, max_size=2))
def test_the_commands_end_counts_whatever_it_printed(
    tail: str, message: str, time: float | None, ranks: list[RankExit]
) -> None:
    with tempfile.TemporaryDirectory(prefix="pl-") as folder:
        bench = node(folder)
        report = CommandExit(
            attempt=1, generation=1, exit_code=1, ranks=tuple(ranks), log_tail=tail, time=time, message=message
        )
        deliver(bench, ("/v1/launcher/exited", report))
        [failure] = bench.job.of(Failure)
        assert (failure.kind, failure.exit_code) == (FailureKind.COMMAND, 1)
        assert bench.node.state.exited_attempt == 1


@given(text=texts, time=times)
def test_every_other_report_counts_too(text: str, time: float | None) -> None:
    with tempfile.TemporaryDirectory(prefix="pl-") as folder:
        bench = node(folder)
        bench.apply(2)
        handler = HandlerHello(pid=5, torch=text, min_nodes=2, max_nodes=4, processes=1)
        deliver(
            bench,
            ("/v1/rendezvous/hello", handler),
            ("/v1/rendezvous/entered", EnteredReport(generation=2, time=time, store_ports=(29501,))),
            ("/v1/rendezvous/finished", FinishedReport(generation=2, time=time)),
            ("/v1/launcher/unmanaged", UnmanagedReport(ranks=(11,), detail=text)),
            ("/v1/launcher/leaving", LeavingReport(reason=text)),
            hello=replace(HELLO, mode=text),
        )
        assert (bench.node.state.handler, bench.node.state.entered) == (5, 2)
        assert len(bench.job.of(Finished)) == 1
        [failure] = bench.job.of(Failure)
        assert (failure.kind, failure.ranks[0].pid) == (FailureKind.UNPROTECTED, 11)
        assert bench.node.state.ended_by


def test_a_report_that_the_agent_cannot_parse_counts_without_its_texts(monkeypatch: pytest.MonkeyPatch) -> None:
    """As where launcher and agent are of different releases."""

    def encode(body: Body) -> bytes:
        return encoded(body).replace(b"odd", rb"\udce9")

    encoded = agent_client.encode
    monkeypatch.setattr(agent_client, "encode", encode)
    with tempfile.TemporaryDirectory(prefix="pl-") as folder:
        bench = node(folder)
        ended = RankExit(local_rank=3, global_rank=3, signal=9, error="odd")
        deliver(bench, ("/v1/rendezvous/ready", ReadyReport(after_generation=1, ranks=(ended,))))
        [failure] = bench.job.of(Failure)
        assert (failure.ranks[0].signal, failure.message) == (9, "rank 3 was ended by SIGKILL")


@pytest.mark.parametrize(
    ("path", "hello"),
    [
        ("/v1/launcher/hello", LauncherHello(pid=1, mode="env", protocol=2)),
        ("/v1/rendezvous/hello", HandlerHello(pid=1, min_nodes=1, max_nodes=1, processes=1, protocol=2)),
    ],
)
def test_a_hello_of_another_protocol_is_refused_and_changes_nothing(path: str, hello: Body) -> None:
    async def run(bench: Bench, run_dir: Path) -> None:
        telemetry = Telemetry(bench.node, ProgressReader(run_dir), to_group=bench.group)
        server = NodeServer(
            bench.node,
            telemetry,
            run_dir,
            **bench.of_ranks,
            on_hello=lambda _: pytest.fail("it counts"),
            on_waits=lambda: pytest.fail("it counts"),
        )
        await server.start()
        known, connection = bench.node.state, AgentConnection(run_dir / "agent.sock")
        with pytest.raises(AgentRefused, match="launcher speaks protocol 2 and the agent speaks protocol 1"):
            await asyncio.to_thread(connection.request, "POST", path, hello)
        connection.close()
        assert bench.node.state == known
        server.close()
        await tasks_wait()

    with tempfile.TemporaryDirectory(prefix="pl-") as folder:
        asyncio.run(run(Bench(Path(folder)), Path(folder)))
