"""Tests of the metrics made of torch's own events, whose file belongs to the training code."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from perdure.agent.torch_events import TorchEvents
from perdure.events import AsyncExporter, EventEmitter, EventType, FileExporter
from perdure_training.node_api.layout import torchrun_events

STATUS = "torchelastic.worker.status."


def emit(path: Path, *events: tuple[str, str, float], max_bytes: int = 1 << 20) -> None:
    exporter = AsyncExporter(FileExporter(path, max_bytes=max_bytes))
    emitter = EventEmitter("torchelastic", exporter)
    for name, source, time in events:
        emitter.emit(None, name, EventType.INSTANT, time, 0, 1, {"source": source})
        exporter.flush()
    exporter.close()


def read(events: TorchEvents) -> dict[tuple[str, str], tuple[float, float | None]]:
    """Counts and newest times, by event and source; without those that have not happened."""
    samples = events.read()
    of = {
        name: {(one.labels["event"], one.labels["source"]): one.value for one in samples if one.name.endswith(name)}
        for name in ("events_total", "event_time_seconds")
    }
    return {kind: (count, of["event_time_seconds"].get(kind)) for kind, count in of["events_total"].items() if count}


def test_events_are_counted_once_with_the_time_of_the_newest(tmp_path: Path) -> None:
    path, events = torchrun_events(tmp_path), TorchEvents(tmp_path)
    assert events.read() == ()
    emit(path, (f"{STATUS}START", "WORKER", 10.5), ("metric", "", 11), (f"{STATUS}ASSIGN_WORKER_RANKS", "AGENT", 11))
    assert read(events) == {("START", "WORKER"): (1, 10.5)}
    assert read(events) == {("START", "WORKER"): (1, 10.5)}
    emit(path, (f"{STATUS}START", "WORKER", 20), (f"{STATUS}SUCCEEDED", "AGENT", 30))
    assert read(events) == {("START", "WORKER"): (2, 20), ("SUCCEEDED", "AGENT"): (1, 30)}
    # Prometheus counts what grows, so what has not happened yet is there as 0.
    assert len(events.read()) == 8 + 2


def test_a_rotated_file_is_read_to_its_end(tmp_path: Path) -> None:
    path, events = torchrun_events(tmp_path), TorchEvents(tmp_path)
    emit(path, (f"{STATUS}START", "WORKER", 1))
    assert read(events) == {("START", "WORKER"): (1, 1)}
    emit(path, *((f"{STATUS}START", "WORKER", time) for time in range(2, 5)), max_bytes=300)
    assert path.with_name(f"{path.name}.1").exists()
    assert read(events) == {("START", "WORKER"): (4, 4)}


@pytest.mark.parametrize(
    "line",
    [
        b"no JSON",
        b"[]",
        b"1",
        b"\xff\xfe",
        b"{" * 60_000,
        b"x" * 200_000,
        b'{"name": "torchelastic.worker.status.START", "time": "NaN", "attributes": {"source": "WORKER"}}',
        b'{"name": "torchelastic.worker.status.START", "time": 1e999, "attributes": {"source": "WORKER"}}',
        b'{"name": "torchelastic.worker.status.START", "time": 1, "attributes": []}',
        b'{"name": "torchelastic.worker.status.MADE_UP", "time": 1, "attributes": {"source": "WORKER"}}',
    ],
    ids=lambda line: repr(line[:30]),
)
def test_what_is_no_event_is_left_out(tmp_path: Path, line: bytes) -> None:
    path = torchrun_events(tmp_path)
    emit(path, (f"{STATUS}START", "WORKER", 1))
    with path.open("ab") as file:
        file.write(line + b"\n" + line[:10])
    events = TorchEvents(tmp_path)
    assert read(events) == {("START", "WORKER"): (1, 1)}
    # What follows is read once the cut line is complete.
    good = {"name": f"{STATUS}START", "time": 2, "attributes": {"source": "WORKER"}}
    with path.open("ab") as file:
        file.write(b"\n" + json.dumps(good).encode() + b"\n")
    assert read(events) == {("START", "WORKER"): (2, 2)}


def test_a_line_without_an_end_is_passed_over(tmp_path: Path) -> None:
    path = torchrun_events(tmp_path)
    emit(path, (f"{STATUS}START", "WORKER", 1))
    with path.open("ab") as file:
        file.truncate(20 << 20)
    events = TorchEvents(tmp_path)
    for _ in range(10):
        events.read()
    emit(path, (f"{STATUS}START", "WORKER", 2), max_bytes=64 << 20)
    assert read(events) == {("START", "WORKER"): (2, 2)}


@pytest.mark.parametrize("kind", ["link", "pipe"])
def test_neither_a_link_is_followed_nor_a_pipe_awaited(tmp_path: Path, kind: str) -> None:
    path, elsewhere = torchrun_events(tmp_path), tmp_path / "elsewhere.jsonl"
    emit(elsewhere, (f"{STATUS}START", "WORKER", 1))
    path.parent.mkdir()
    if kind == "link":
        path.symlink_to(elsewhere)
    else:
        os.mkfifo(path)
    assert TorchEvents(tmp_path).read() == ()
