"""Tests of how an agent parses bodies from another release, or malformed ones: no report is lost because of a field."""

from __future__ import annotations

import gc
import json
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from perdure.agent.protocol import Malformed, read_body, time_of, time_or_arrival
from perdure.contract import Failure, Ready
from perdure.contract.agents import LONGEST_TRACEBACK
from perdure.contract.base import LONGEST_ERROR
from perdure.contract.nodes import MOST_RANKS
from perdure_training.node_api.bodies import (
    POSTS,
    CommandExit,
    EnteredReport,
    HandlerHello,
    LauncherHello,
    RankExit,
    ReadyReport,
    UsageReport,
    protocol_mismatch,
)
from perdure_training.node_api.codec import encode
from tests.agent.bench import NOW, Bench

KINDS: list[Any] = sorted(set(POSTS.values()), key=lambda kind: kind.__name__)


def read(kind: Any, **fields: Any) -> Any:
    return read_body(kind, json.dumps(fields).encode())


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_what_the_launcher_encodes_is_what_the_agent_reads(kind: Any) -> None:
    required = {
        "local_rank": 1,
        "pid": 5,
        "min_nodes": 1,
        "max_nodes": 2,
        "processes": 3,
        "generation": 4,
        "attempt": 6,
        "request": 7,
    }
    body = kind(**{name: value for name, value in required.items() if name in kind.__dataclass_fields__})
    assert read_body(kind, encode(body)) == body


def test_fields_of_a_newer_release_are_ignored_and_missing_ones_have_their_default() -> None:
    assert read(ReadyReport, colour="red") == ReadyReport()
    assert read(LauncherHello, pid=1) == LauncherHello(pid=1, protocol=1)


def test_a_malformed_field_has_its_default_and_the_rest_counts() -> None:
    assert read(CommandExit, attempt=2, exit_code="?", signal=9, log_tail=7) == CommandExit(attempt=2, signal=9)
    assert read(EnteredReport, generation=3, store_ports="all", time=[]) == EnteredReport(generation=3)
    assert read(UsageReport, cpu_cores=1.5, devices=[{"name": "x"}, {"index": 1, "name": 3}, 4]) == read(
        UsageReport, cpu_cores=1.5, devices=[{"index": 1}]
    )


def test_a_malformed_rank_costs_no_other_rank() -> None:
    ranks = [{"local_rank": 0, "signal": "KILL", "pid": 7}, {"signal": 9}, {"local_rank": "x"}, 5, {"local_rank": 3}]
    report = read(ReadyReport, after_generation=1, ranks=ranks, store_ports=[1, "x", 2])
    assert report.ranks == (RankExit(local_rank=0, pid=7), RankExit(local_rank=3))
    assert (report.after_generation, report.store_ports) == (1, (1, 2))


@pytest.mark.parametrize(
    "content", [b"", b"[]", b"7", b"{}", b'{"generation": null}', b'{"generation": "x"}', b'{"generation": 1']
)
def test_a_body_without_what_it_is_about_is_refused(content: bytes) -> None:
    with pytest.raises(Malformed):
        read_body(EnteredReport, content)


@pytest.mark.parametrize(
    "content", [b'"' + b"x" * 1000 + b'"', b"[" * 9, b'{"pid": "x"}', b'{"ranks": [{"pid": "x"}]}', b'{"ranks": 1}']
)
def test_what_is_refused_leaves_nothing_for_the_garbage_collector(content: bytes) -> None:
    def left() -> int:
        gc.collect()
        for kind in (UsageReport, ReadyReport, HandlerHello):
            with suppress(Malformed):
                read_body(kind, content)
        return gc.collect()

    # Threads of other tests, and finalizers, may leave something in one of the turns.
    assert min(left() for _ in range(5)) == 0


def test_numbers_and_lists_are_bounded(tmp_path: Path) -> None:
    """A script could otherwise have its agent, and its job, count to any number."""
    ranks = [{"local_rank": 10**30}, {"local_rank": 0, "pid": 10**30}, *({"local_rank": n} for n in range(5000))]
    report = read(ReadyReport, after_generation=10**30, ranks=ranks, store_ports=[10**30, 0, *range(1, 5000)])
    assert report.after_generation == 0
    assert report.ranks[:2] == (RankExit(local_rank=0), RankExit(local_rank=0))
    assert len(report.ranks) == 255
    assert report.store_ports == tuple(range(255))
    with pytest.raises(Malformed, match="generation"):
        read(EnteredReport, generation=10**30)
    bench = Bench(tmp_path)
    for processes in (10**9, -5):
        bench.node.on_launcher_hello(read(LauncherHello, pid=2, processes=processes))
        bench.node.on_handler_hello(read(HandlerHello, pid=2, min_nodes=2, max_nodes=4, processes=processes))
        assert bench.node.state.processes == (MOST_RANKS if processes > 0 else 1)
        bench.node.on_ready(read(ReadyReport, processes=processes))
        assert bench.group.of(Ready)[-1].processes == bench.node.state.processes


@pytest.mark.parametrize("time", ["yesterday", None, [], {}, 1e300, -1e300, "1e400", 253402300799])
def test_an_odd_time_counts_as_the_time_of_arrival(time: Any) -> None:
    before = datetime.now(UTC)
    assert before <= time_or_arrival(read(EnteredReport, generation=1, time=time).time) <= datetime.now(UTC)
    assert time_of(read(EnteredReport, generation=1, time=time).time) is None


def test_a_time_is_taken_to_the_microsecond() -> None:
    now = datetime.now(UTC)
    assert time_or_arrival(read(EnteredReport, generation=1, time=now.timestamp()).time) == now


def test_a_node_has_one_rank_at_least(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    bench.node.on_handler_hello(HandlerHello(pid=1, min_nodes=2, max_nodes=4, processes=0))
    assert bench.node.state.processes == 1
    ended = RankExit(local_rank=0, signal=9, time=NOW.timestamp())
    bench.apply(1)
    bench.node.on_ready(ReadyReport(after_generation=1, ranks=(ended,), processes=-3))
    assert [failure.ranks[0].signal for failure in bench.job.of(Failure)] == [9]
    assert [ready.processes for ready in bench.group.of(Ready)] == [1]


def test_the_job_reads_each_exit_as_the_launcher_reported_it(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    bench.node.on_handler_hello(HandlerHello(pid=1, min_nodes=2, max_nodes=4, processes=2))
    ended = RankExit(local_rank=0, pid=7, signal=9, error="odd", traceback="line", time=NOW.timestamp())
    bench.apply(1)
    bench.node.on_ready(ReadyReport(after_generation=1, ranks=(ended, RankExit(local_rank=1, time=1e300))))
    [failure] = bench.job.of(Failure)
    read = Failure.model_validate_json(failure.model_dump_json())
    assert read.ranks == (ended, RankExit(local_rank=1))
    assert read.time == NOW


def test_what_an_exit_says_is_bounded(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    ended = RankExit(local_rank=0, error="x" * 5_000, traceback="begin" + "y" * 5_000 + "end")
    bench.apply(1)
    bench.node.on_ready(ReadyReport(after_generation=1, ranks=(ended,)))
    [exit] = Failure.model_validate_json(bench.job.of(Failure)[0].model_dump_json()).ranks
    assert (len(exit.error or ""), len(exit.traceback or "")) == (LONGEST_ERROR, LONGEST_TRACEBACK)
    assert (exit.traceback or "").endswith("yend")


def test_a_mismatch_names_both_protocols_and_the_remedy() -> None:
    assert protocol_mismatch(launcher=1, agent=1) == ""
    text = protocol_mismatch(launcher=1, agent=2)
    assert "launcher speaks protocol 1 and the agent speaks protocol 2" in text
    assert "perdure restart JOB --node NODE" in text
