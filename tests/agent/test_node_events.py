"""Tests of the events that an agent emits about its node."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path

from perdure.agent.node_events import NodeEventEmitter
from perdure.events import AsyncExporter, FileExporter
from perdure_training.node_api.bodies import LeavingReport, RankExit, ReadyReport
from tests.agent.bench import NOW, Bench
from tests.training.events.collected import lines


def test_the_life_of_a_node_is_told(tmp_path: Path):
    path = tmp_path / "events" / "agent.jsonl"
    exporter = AsyncExporter(FileExporter(path))
    bench = Bench(tmp_path, events=NodeEventEmitter(exporter))
    bench.node.on_ready(ReadyReport())
    bench.apply(1)
    bench.enter(1)
    bench.node.training.report_stepping(1, counted=True, starts=None)
    bench.node.training.report_stall(since=datetime(2026, 1, 2, tzinfo=UTC), usual_step=None)
    bench.node.training.report_stall_end()
    culprit = RankExit(local_rank=0, global_rank=0, pid=77, signal=9, time=NOW.timestamp())
    for _ in range(2):
        bench.node.on_ready(ReadyReport(after_generation=1, ranks=(culprit,)))
    bench.apply(2)
    bench.enter(2)
    bench.exit(generation=2, code=0)
    bench.node.on_leaving(LeavingReport(reason="evicted"))
    bench.node.leave("the job has closed")
    exporter.close()
    found = lines(path)
    assert {event["target"] for event in found} == {"agent"}
    assert [(event["name"], event["generation"]) for event in found] == [
        ("ready", 0),
        ("world", 1),
        ("rendezvous", 1),
        ("rendezvous", 1),
        ("entered", 1),
        ("stepping", 1),
        ("stalled", 1),
        ("stall_ended", 1),
        ("rank_exited", 1),
        ("fault_detected", 1),
        ("ready", 1),
        ("ready", 1),
        ("world", 2),
        ("rendezvous", 2),
        ("rendezvous", 2),
        ("entered", 2),
        ("command_exited", 2),
        ("fault_detected", 2),
        ("leaving", None),
    ]
    exited = next(event for event in found if event["name"] == "rank_exited")
    assert (exited["rank"], exited["time"]) == (0, NOW.timestamp())
    assert exited["attributes"] == {"local_rank": 0, "exited_pid": 77, "exit_code": None, "signal": 9, "error": None}
    assert found[found.index(exited) + 1]["attributes"] == {"kind": "RANKS", "message": "rank 0 was ended by SIGKILL"}
    assert found[1]["attributes"]["world_size"] == 2


def test_a_rendezvous_has_a_span_and_ranks_that_end_for_a_newer_world_an_abort(tmp_path: Path):
    path = tmp_path / "events" / "agent.jsonl"
    exporter = AsyncExporter(FileExporter(path))
    bench = Bench(tmp_path, events=NodeEventEmitter(exporter))
    bench.node.on_ready(ReadyReport())
    bench.apply(1)
    bench.enter(1)
    bench.apply(2)
    bench.apply(3)
    bench.node.leave("the job has closed")
    exporter.close()
    told = [event for event in lines(path) if event["name"] in ("rendezvous", "abort")]
    assert [(event["name"], event["type"], event["generation"]) for event in told] == [
        ("rendezvous", "begin", 1),
        ("rendezvous", "end", 1),
        ("abort", "instant", 1),
        ("rendezvous", "begin", 2),
        ("rendezvous", "end", 2),
        ("rendezvous", "begin", 3),
        ("rendezvous", "end", 3),
    ]
    first, second, third = (event["attributes"] for event in told if event["type"] == "end")
    assert (first["success"], second["success"], third["success"]) == (True, False, False)
    assert (second["error"], third["error"]) == ("generation 3 follows", "the job has closed")
    assert told[2]["attributes"] == {"reason": "generation 2 follows"}
