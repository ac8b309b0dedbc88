"""Tests of the events that an agent emits about its node."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path

from agent.node_events import NodeEventEmitter
from perdure.events import AsyncExporter, FileExporter
from perdure_launcher.protocol import LeavingReport, RankExit, ReadyReport
from tests.agent.bench import NOW, Bench
from tests.training.events.collected import lines


def test_the_life_of_a_node_is_told(tmp_path: Path):
    bench = Bench(tmp_path)
    path = tmp_path / "events" / "agent.jsonl"
    exporter = AsyncExporter(FileExporter(path))
    bench.node.events = NodeEventEmitter(exporter)
    bench.node.on_ready(ReadyReport())
    bench.apply(1)
    bench.enter(1)
    bench.node.report_stepping(1, counted=True, starts=None)
    bench.node.report_stall(since=datetime(2026, 1, 2, tzinfo=UTC), usual_step=None)
    bench.node.report_stall_end()
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
        ("entered", 1),
        ("stepping", 1),
        ("stalled", 1),
        ("stall_ended", 1),
        ("rank_exited", 1),
        ("fault_detected", 1),
        ("ready", 1),
        ("ready", 1),
        ("world", 2),
        ("entered", 2),
        ("command_exited", 2),
        ("fault_detected", 2),
        ("leaving", None),
    ]
    exited = found[6]
    assert (exited["rank"], exited["time"]) == (0, NOW.timestamp())
    assert exited["attributes"] == {"local_rank": 0, "exited_pid": 77, "exit_code": None, "signal": 9, "error": None}
    assert found[7]["attributes"] == {"kind": "RANKS", "message": "rank 0 was ended by SIGKILL"}
    assert found[1]["attributes"]["world_size"] == 2
