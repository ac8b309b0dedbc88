"""Tests of event files: rotation, several writers, full disks, and what training code may put in their place."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from perdure_training.events import Event, EventsLost, EventType, FileExporter, text_line
from tests.training.events.collected import ROOT, lines, run


def event(name: str = "x", **attributes: object) -> Event:
    return Event("1-1", time.time(), "test", name, EventType.INSTANT, attributes, os.getpid())


def test_full_files_are_kept_up_to_a_number(tmp_path: Path):
    path = tmp_path / "new" / "events.jsonl"
    exporter = FileExporter(path, max_bytes=1000, kept=2)
    for number in range(60):
        exporter.export([event(number=number)])
    exporter.close()
    assert sorted(file.name for file in path.parent.iterdir()) == ["events.jsonl", "events.jsonl.1", "events.jsonl.2"]
    numbers = [line["attributes"]["number"] for line in lines(path)]
    assert numbers == list(range(numbers[0], 60))
    assert all(file.stat().st_size < 1200 for file in path.parent.iterdir())


def test_no_older_file_is_kept_if_none_shall_be(tmp_path: Path):
    path = tmp_path / "events.txt"
    exporter = FileExporter(path, format=text_line, max_bytes=1, kept=0)
    exporter.export([event("first")])
    exporter.export([event("second")])
    exporter.close()
    assert "test second instant" in path.read_text()
    assert list(tmp_path.iterdir()) == [path]


def test_a_batch_may_be_larger_than_what_is_written_at_once(tmp_path: Path):
    path = tmp_path / "events.jsonl"
    FileExporter(path).export([event(text="x" * 10_000, number=number) for number in range(100)])
    assert [line["attributes"]["number"] for line in lines(path)] == list(range(100))


WRITES = """
import sys
from perdure_training.events import AsyncExporter, EventEmitter, FileExporter
exporter = AsyncExporter(FileExporter(sys.argv[1], max_bytes=20_000, kept=200))
emitter = EventEmitter("test", exporter, rank=int(sys.argv[2]))
for number in range(3000):
    emitter.instant("x", number=number)
    if number % 100 == 0:
        exporter.flush()
exporter.close()
assert exporter.dropped == exporter.refused == 0
"""


def test_two_ranks_may_write_one_file(tmp_path: Path):
    path = tmp_path / "events.jsonl"
    ranks = [subprocess.Popen([sys.executable, "-c", WRITES, path, str(rank)], cwd=ROOT) for rank in range(2)]
    assert [rank.wait(timeout=60) for rank in ranks] == [0, 0]
    found = lines(path)
    assert len(list(tmp_path.iterdir())) > 10
    assert sorted((line["rank"], line["attributes"]["number"]) for line in found) == [
        (rank, number) for rank in range(2) for number in range(3000)
    ]


def test_a_full_disk_loses_what_is_counted_and_the_file_stays_readable(tmp_path: Path):
    script = """
import resource, sys
from perdure_training.events import AsyncExporter, EventEmitter, FileExporter
exporter = AsyncExporter(FileExporter(sys.argv[1]))
emitter = EventEmitter("test", exporter)
_, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
resource.setrlimit(resource.RLIMIT_FSIZE, (2000, hard))
for number in range(100):
    emitter.instant("x", number=number)
assert exporter.flush()
refused = exporter.refused
emitter.instant("refused as well")
assert exporter.flush()
assert exporter.refused == refused + 1
resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
emitter.instant("accepted")
exporter.close()
print(exporter.refused)
"""
    refused = int(run(script, path := tmp_path / "events.jsonl"))
    whole, cut_off = [], []
    for line in path.read_text().splitlines():
        (whole if line.endswith("}") else cut_off).append(line)
    assert len(cut_off) == 1
    path.write_text("".join(f"{line}\n" for line in whole))
    found = lines(path)
    assert [line["name"] for line in found[-2:]] == ["accepted", "lost"]
    assert found[-1]["attributes"] == {"dropped": 0, "refused": refused, "total": refused}
    assert len(found) - 2 + refused == 101


def test_a_line_that_an_earlier_process_did_not_finish_is_ended(tmp_path: Path):
    path = tmp_path / "events.jsonl"
    path.write_text('{"id": "cut o')
    FileExporter(path).export([event()])
    assert path.read_text().splitlines()[0] == '{"id": "cut o'
    assert path.read_text().splitlines()[1].startswith('{"id":"1-1"')


def test_a_file_that_was_removed_is_created_again(tmp_path: Path):
    path = tmp_path / "events.jsonl"
    exporter = FileExporter(path)
    exporter.export([event("first")])
    path.unlink()
    exporter.export([event("second")])
    assert [line["name"] for line in lines(path)] == ["second"]


@pytest.mark.parametrize("planted", ["link", "pipe", "folder"])
def test_only_regular_files_are_written(tmp_path: Path, planted: str):
    path, other = tmp_path / "events.jsonl", tmp_path / "other"
    other.write_text("other")
    match planted:
        case "link":
            path.symlink_to(other)
        case "pipe":
            os.mkfifo(path)
        case _:
            path.mkdir()
    with pytest.raises(EventsLost) as lost:
        FileExporter(path).export([event(), event()])
    assert lost.value.count == 2
    assert other.read_text() == "other"


def test_numbers_out_of_range_are_refused(tmp_path: Path):
    with pytest.raises(ValueError, match="max_bytes: expected at least 1, found 0"):
        FileExporter(tmp_path / "x", max_bytes=0)
