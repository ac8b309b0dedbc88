"""Which files of a script count as complete, and what of them a new node gets back."""

from __future__ import annotations

import json
import os
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch.distributed.checkpoint.state_dict_saver import save

from perdure_launcher import watched_folder
from perdure_launcher.watched_folder import Entries, WatchedFolder, folder_of, is_whole, read_entries
from perdure_training.node_api.bodies import RestoringReport
from perdure_training.node_api.storage_link import StorageAway, StorageLink
from tests.support.waiting import wait_for
from tests.training.checkpoint_agent import CheckpointAgent, checkpoint_agent


@pytest.fixture
def agent(tmp_path: Path) -> Iterator[CheckpointAgent]:
    with checkpoint_agent(tmp_path / "storage") as agent:
        yield agent


def watch(agent: CheckpointAgent, folder: Path) -> WatchedFolder:
    """A folder that is restored."""
    ready = threading.Event()
    watched = WatchedFolder(folder, StorageLink(agent.run_dir), on_restored=ready.set)
    watched.start()
    assert ready.wait(60)
    return watched


def on_another_node(agent: CheckpointAgent, folder: Path) -> list[str]:
    """The files that a replacement finds."""
    watch(agent, folder).close(within=60)
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


def test_a_folder_that_cannot_be_restored_is_reported_until_it_is(
    agent: CheckpointAgent, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(watched_folder, "WAITS", 0.2)
    saves, place = tmp_path / "saves", tmp_path / "storage" / "watched"
    saves.mkdir()
    watched = watch(agent, saves)
    torch.save({"step": 1}, saves / "last.pt")
    watched.close(within=60)
    place.rename(tmp_path / "away")
    place.touch()
    reports: list[RestoringReport] = []
    ready = threading.Event()
    other = WatchedFolder(tmp_path / "other", StorageLink(agent.run_dir), on_restored=ready.set, report=reports.append)
    other.start()
    wait_for(lambda: reports and reports[-1].problem)
    assert "NotARegularFile" in reports[-1].problem
    assert not ready.is_set()
    place.unlink()
    (tmp_path / "away").rename(place)
    assert ready.wait(60)
    other.close(within=60)
    assert torch.load(tmp_path / "other" / "last.pt") == {"step": 1}
    assert reports[-1] == RestoringReport()
    # Not each of the tries.
    assert len(reports) <= 3
    assert {report.since for report in reports[:-1]} == {reports[0].since}


@pytest.mark.parametrize(
    "changes", [{"path": "../../outside"}, {"path": "{outside}"}, {"modified": 2**70}, {"size": -1}]
)
def test_a_list_of_files_that_nobody_wrote_so_leads_nowhere(
    agent: CheckpointAgent, tmp_path: Path, changes: dict[str, object]
):
    (saves := tmp_path / "saves").mkdir()
    watched = watch(agent, saves)
    torch.save({"step": 1}, saves / "last.pt")
    watched.close(within=60)
    outside = tmp_path / "outside"
    outside.write_text("mine")
    [manifest] = (tmp_path / "storage" / "watched" / "worker-0").glob("*/manifest.json")
    if isinstance(path := changes.get("path"), str):
        changes = {"path": path.format(outside=outside)}
    [file] = json.loads(manifest.read_text())
    manifest.write_text(json.dumps([file | changes]))
    assert on_another_node(agent, tmp_path / "other") == []
    assert outside.read_text() == "mine"


def test_saves_that_the_script_soon_deletes_are_copied_after_a_copy_has_failed(
    agent: CheckpointAgent, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    monkeypatch.setattr(watched_folder, "LOOK", 0.1)
    # Longer than a save exists.
    monkeypatch.setattr(watched_folder, "_AGAIN", 2.0)
    saves, place = tmp_path / "saves", tmp_path / "storage" / "watched"
    saves.mkdir()
    watched = watch(agent, saves)
    place.parent.mkdir(exist_ok=True)
    shutil.rmtree(place, ignore_errors=True)
    place.touch()
    ending = threading.Event()

    def train() -> None:
        step = 0
        while not ending.wait(0.3):
            step += 1
            torch.save({"step": step}, saves / f"step-{step}.pt")
            (saves / f"step-{step - 3}.pt").unlink(missing_ok=True)

    training = threading.Thread(target=train)
    training.start()
    try:
        wait_for(lambda: "is not copied, and is tried again" in caplog.text)
        place.unlink()
        wait_for(lambda: list(place.glob("worker-0/*/manifest.json")), within=60)
    finally:
        ending.set()
        training.join()
        watched.close(within=60)


def torn(path: Path) -> None:
    content = path.read_bytes()
    path.write_bytes(content[: len(content) * 2 // 3])


def test_a_copy_that_fails_at_the_commands_end_is_tried_again(
    agent: CheckpointAgent, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(watched_folder, "LOOK", 60.0)
    (saves := tmp_path / "saves").mkdir()
    watched = watch(agent, saves)
    torch.save({"step": 1}, saves / "last.pt")
    copy, tries = WatchedFolder._copy, list[object]()

    def fails_once(self: WatchedFolder, entries: Entries) -> None:
        tries.append(entries)
        if len(tries) == 1:
            raise StorageAway("the node that keeps the copies closed the connection")
        copy(self, entries)

    monkeypatch.setattr(WatchedFolder, "_copy", fails_once)
    watched.close(within=60)
    assert on_another_node(agent, tmp_path / "other") == ["last.pt"]


def test_a_replacement_gets_the_newest_complete_save_of_each_kind(agent: CheckpointAgent, tmp_path: Path):
    saves = tmp_path / "saves"
    watched = watch(agent, saves)
    saves.mkdir()
    for step in (1, 2):
        torch.save({"step": step, "w": torch.full((1000,), step)}, saves / f"step-{step}.pt")
        save({"w": torch.full((1000,), step)}, checkpoint_id=str(saves / f"dcp-{step}"), no_dist=True)
        (saves / "latest").write_text(str(step))
    torch.save({"step": 3, "w": torch.zeros(1000)}, saves / "step-3.pt")
    torn(saves / "step-3.pt")
    shutil.copytree(saves / "dcp-2", saves / "dcp-3")
    (saves / "dcp-3" / ".metadata").unlink()
    (saves / "step-4.pt.tmp").write_bytes(b"draft")
    watched.close(within=60)
    other = tmp_path / "other"
    assert on_another_node(agent, other) == ["dcp-2/.metadata", "dcp-2/__0_0.distcp", "latest", "step-2.pt"]
    assert torch.load(other / "step-2.pt")["step"] == 2
    assert (other / "latest").read_text() == "2"
    assert (other / "step-2.pt").stat().st_mtime_ns == (saves / "step-2.pt").stat().st_mtime_ns


def test_what_has_a_name_that_cannot_be_copied_is_said_once_and_holds_nothing_up(
    agent: CheckpointAgent, tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    saves = tmp_path / "saves"
    saves.mkdir()
    (saves / os.fsdecode(b"m\xfcnchen-1.txt")).write_text("Latin 1")
    deep = saves / "deep"
    for _ in range(5):
        deep /= "d" * 250
        deep.mkdir(parents=True)
    (deep / "step-1.txt").write_text("deep")
    (saves / "old-1.txt").write_text("from an archive")
    os.utime(saves / "old-1.txt", ns=(-1, -(10**18)))
    (saves / "late-1.txt").write_text("from another archive")
    os.utime(saves / "late-1.txt", ns=(0, 10**19))
    watched = watch(agent, saves)
    for step in (1, 2):
        torch.save({"step": step}, saves / f"step-{step}.pt")
        watched.look()
        watched.look()
    watched.close(within=60)
    assert on_another_node(agent, tmp_path / "other") == ["late-1.txt", "old-1.txt", "step-2.pt"]
    assert caplog.text.count("is not copied: its name is not UTF-8") == 1
    assert caplog.text.count("is not copied: it has a path of more than 1,024 characters") == 1


def test_saves_are_copied_while_the_training_runs_and_only_once(
    agent: CheckpointAgent, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(watched_folder, "LOOK", 0.05)
    saves, versions = tmp_path / "saves", tmp_path / "storage" / "watched" / "worker-0"
    saves.mkdir()
    watched = watch(agent, saves)
    torch.save({"step": 1}, saves / "last.pt")
    wait_for(lambda: list(versions.glob("*/manifest.json")))
    torch.save({"step": 2}, saves / "last.pt")
    wait_for(lambda: len(list(versions.glob("*/manifest.json"))) == 2)
    watched.close(within=60)
    # A launcher that is started again finds what it has copied.
    watch(agent, saves).close(within=60)
    assert len(list(versions.glob("*/manifest.json"))) == 2
    assert on_another_node(agent, tmp_path / "other") == ["last.pt"]
    assert torch.load(tmp_path / "other" / "last.pt") == {"step": 2}


def save_model(folder: Path) -> Path:
    """What a script saves before its ranks gather the state of the optimizer."""
    folder.mkdir()
    save_file({"w": torch.zeros(10)}, folder / "model.safetensors")
    return folder


def test_a_folder_without_a_file_that_the_one_before_it_had_is_not_copied(
    agent: CheckpointAgent, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(watched_folder, "LOOK", 0.05)
    saves, versions = tmp_path / "saves", tmp_path / "storage" / "watched" / "worker-0"
    saves.mkdir()
    watched = watch(agent, saves)
    for step in (1, 2):
        torch.save({"step": step}, save_model(saves / f"step-{step}") / "optimizer.pt")
    wait_for(lambda: len(list(versions.glob("*/files/*/optimizer.pt"))) == 2)
    model = save_model(saves / "step-3")
    torch.save({"step": 3}, saves / "last.pt")
    wait_for(lambda: list(versions.glob("*/files/last.pt")))
    assert not list(versions.glob("*/files/step-3"))
    watched.close(within=60)
    # A launcher that is started again knows what the folder before had.
    watched = watch(agent, saves)
    torch.save({"step": 4}, saves / "last.pt")
    wait_for(lambda: len(list(versions.glob("*/files/last.pt"))) == 2)
    assert not list(versions.glob("*/files/step-3"))
    torch.save({"step": 3}, model / "optimizer.pt")
    wait_for(lambda: list(versions.glob("*/files/step-3/optimizer.pt")))
    save_model(saves / "step-4")
    monkeypatch.setattr(watched_folder, "_LACKING", 0.2)
    wait_for(lambda: list(versions.glob("*/files/step-4")))
    watched.close(within=60)
    assert "step-4/optimizer.pt" not in on_another_node(agent, tmp_path / "other")


def test_a_checkpoint_of_hugging_faces_trainer_is_complete_with_its_last_file(tmp_path: Path):
    for name in ("checkpoint-10", "final"):
        (save_model(tmp_path / name) / "training_args.bin").write_bytes(b"arguments")
    entries = read_entries(tmp_path)
    assert {name: is_whole(tmp_path, files) for name, files in entries.items()} == {
        "checkpoint-10": False,
        "final": True,
    }
    (tmp_path / "checkpoint-10" / "trainer_state.json").write_text("{}")
    assert is_whole(tmp_path, read_entries(tmp_path)["checkpoint-10"])


def test_newer_saves_of_the_node_are_left_as_they_are(agent: CheckpointAgent, tmp_path: Path):
    saves = tmp_path / "saves"
    saves.mkdir()
    watched = watch(agent, saves)
    torch.save({"step": 1}, saves / "last.pt")
    watched.close(within=60)
    newer, older = tmp_path / "newer", tmp_path / "older"
    for folder, offset in ((older, -1), (newer, 1)):
        folder.mkdir()
        torch.save({"step": 100}, folder / "last.pt")
        moment = (saves / "last.pt").stat().st_mtime_ns + offset * 10**9
        os.utime(folder / "last.pt", ns=(moment, moment))
        on_another_node(agent, folder)
    assert torch.load(newer / "last.pt") == {"step": 100}
    assert torch.load(older / "last.pt") == {"step": 1}


def test_a_flipped_bit_in_the_storage_brings_the_save_before(
    agent: CheckpointAgent, tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    saves = tmp_path / "saves"
    saves.mkdir()
    for step in (1, 2):
        watched = watch(agent, saves)
        torch.save({"step": step}, saves / f"step-{step}.pt")
        (saves / "latest").write_text(str(step))
        watched.close(within=60)
    [path] = (tmp_path / "storage").rglob("step-2.pt")
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    assert on_another_node(agent, tmp_path / "other") == ["latest", "step-1.pt"]
    assert (tmp_path / "other" / "latest").read_text() == "1"
    assert "the copy of step-2.pt is damaged" in caplog.text


def test_formats_that_have_an_end_show_that_they_are_torn(tmp_path: Path):
    torch.save({"w": torch.zeros(1000)}, tmp_path / "a.pt")
    save_file({"w": torch.zeros(1000)}, tmp_path / "b.safetensors")
    (tmp_path / "c.json").write_text("{}")
    (tmp_path / "DONE").touch()
    entries = read_entries(tmp_path)
    assert sorted(entries) == ["DONE", "a.pt", "b.safetensors", "c.json"]
    assert all(is_whole(tmp_path, files) for files in entries.values())
    for name in ("a.pt", "b.safetensors"):
        torn(tmp_path / name)
        assert not is_whole(tmp_path, entries[name])
    (tmp_path / "a.pt").write_bytes(b"")
    assert not is_whole(tmp_path, read_entries(tmp_path)["a.pt"])


def test_the_path_has_the_commands_variables(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("HOME", "/home/ada")
    environment = {"SCRATCH": "/scratch/1"}
    assert folder_of("$SCRATCH/saves", environment) == Path("/scratch/1/saves")
    assert folder_of("${SCRATCH}/saves", environment) == Path("/scratch/1/saves")
    assert folder_of("~/saves", environment) == Path("/home/ada/saves")
