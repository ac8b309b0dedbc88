"""Tests of copying event files: rotations, restarts, files of training code, and a storage that rejects writes."""

from __future__ import annotations

from pathlib import Path

import pytest

from perdure.agent.event_files import EventShipper
from perdure.contract import NodeCredentials
from perdure_training.events.event import Event, EventType
from perdure_training.events.files import FileExporter

NODE = NodeCredentials(uid="0a1b2c3d", role="worker", rank=1, incarnation=2, token="secret")


def write(path: Path, *numbers: int, max_bytes: int = 1000) -> None:
    exporter = FileExporter(path, max_bytes=max_bytes)
    exporter.export([event(number) for number in numbers])
    exporter.close()


def event(number: int) -> Event:
    return Event(
        id=f"e-{number}", time=1.0, target="trainer", name="step", type=EventType.INSTANT, attributes={}, pid=1
    )


def copied(folder: Path, name: str) -> list[str]:
    parts = sorted((folder / "worker-1" / "2" / name).glob("part-*.jsonl"))
    return [line for part in parts for line in part.read_text().splitlines()]


def identifiers(lines: list[str]) -> list[int]:
    return [int(line.partition('"e-')[2].partition('"')[0]) for line in lines]


async def test_events_of_the_agent_of_torchrun_and_of_each_rank_are_kept(tmp_path: Path) -> None:
    run, private = tmp_path / "run", tmp_path / "private"
    shipper = EventShipper(run, f"file://{tmp_path}/kept", NODE, private_dir=private)
    await shipper.ship()
    assert not (tmp_path / "kept").exists(), "there is nothing yet"
    for number, name in enumerate(("torchrun", "local-rank-0", "local-rank-1", "agent")):
        write(run / "events" / f"{name}.jsonl", number)
    write(private / "events" / "agent.jsonl", 10)
    (run / "events" / "notes.txt").write_text("not an event file")
    await shipper.finish()
    kept = {path.name for path in (tmp_path / "kept" / "worker-1" / "2").iterdir()}
    assert kept == {"agent", "torchrun", "local-rank-0", "local-rank-1", "complete"}
    assert identifiers(copied(tmp_path / "kept", "local-rank-1")) == [2]
    assert identifiers(copied(tmp_path / "kept", "agent")) == [10], "the agent's own, not the training code's"


async def test_rotations_and_another_agent_lose_nothing_and_repeat_nothing(tmp_path: Path) -> None:
    run, url = tmp_path / "run", f"file://{tmp_path}/kept"
    path = run / "events" / "local-rank-0.jsonl"
    for number in range(30):
        write(path, number, max_bytes=400)
        if number % 4 == 0:
            await EventShipper(run, url, NODE, part_max=300).ship()
    await EventShipper(run, url, NODE, part_max=300).ship()
    assert path.with_name("local-rank-0.jsonl.3").exists()
    content = "".join(
        part.read_text() for part in sorted((tmp_path / "kept" / "worker-1" / "2" / "local-rank-0").iterdir())
    )
    assert identifiers(content.splitlines()) == list(range(30))


async def test_a_storage_that_refuses_is_tried_again(tmp_path: Path) -> None:
    run, blocked = tmp_path / "run", tmp_path / "storage"
    blocked.write_text("a file where a folder should be")
    shipper = EventShipper(run, f"file://{blocked}/events", NODE)
    write(run / "events" / "torchrun.jsonl", 1)
    await shipper.finish()
    blocked.unlink()
    await shipper.ship()
    assert identifiers(copied(blocked / "events", "torchrun")) == [1]
    assert not list(blocked.rglob("complete"))


@pytest.mark.parametrize("name", ["..jsonl", "...jsonl", "a b.jsonl", "\x1b[31m.jsonl", "a" * 200 + ".jsonl", "x.json"])
async def test_names_that_no_event_file_has_are_left_alone(tmp_path: Path, name: str) -> None:
    run = tmp_path / "run"
    (run / "events").mkdir(parents=True)
    (run / "events" / name).write_text("{}\n")
    write(run / "events" / "torchrun.jsonl", 1)
    await EventShipper(run, f"file://{tmp_path}/kept", NODE).ship()
    assert [path.name for path in (tmp_path / "kept" / "worker-1" / "2").iterdir()] == ["torchrun"]


async def test_training_code_with_thousands_of_files_costs_no_more_than_some(tmp_path: Path) -> None:
    run = tmp_path / "run"
    (run / "events").mkdir(parents=True)
    for number in range(2000):
        (run / "events" / f"{number}.jsonl").write_text("{}\n")
    await EventShipper(run, f"file://{tmp_path}/kept", NODE).ship()
    assert len(list((tmp_path / "kept" / "worker-1" / "2").iterdir())) == 64
