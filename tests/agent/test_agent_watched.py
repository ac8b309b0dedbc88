"""What a node gets back of what its script has saved, and what the agent takes from the launcher."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from perdure.agent.checkpoint.saved_names import parse
from perdure.agent.checkpoint.watched import Version, WatchedFile, choose, current, kept_versions
from perdure_training.node_api.storage_link import StorageAway, StorageLink, StorageProblem
from tests.support.waiting import DEADLINE
from tests.training.checkpoint_agent import NODE, CheckpointAgent, checkpoint_agent


@pytest.fixture
def agent(tmp_path: Path) -> Iterator[CheckpointAgent]:
    with checkpoint_agent(tmp_path / "storage", keep_last=2) as agent:
        yield agent


@pytest.fixture
def link(agent: CheckpointAgent) -> StorageLink:
    return StorageLink(agent.run_dir)


def ask(link: StorageLink, do: str, **fields: Any) -> dict[str, Any]:
    file = fields.pop("file", None)
    files = [] if file is None else [os.open(file, os.O_RDONLY)]
    try:
        return link.ask({"request": "watched", "do": do} | fields, files=files, within=DEADLINE)
    finally:
        for one in files:
            os.close(one)


def put(link: StorageLink, version: str, file: Path, **changes: Any) -> dict[str, Any]:
    known = file.stat()
    fields: dict[str, Any] = {"path": file.name, "size": known.st_size, "modified": known.st_mtime_ns}
    return ask(link, "put", version=version, file=file, **fields | changes)


def chosen(link: StorageLink, *damaged: tuple[str, str]) -> list[str]:
    content = link.read({"request": "watched", "do": "choose", "damaged": damaged}, patience=0)
    return sorted(file["path"] for one in json.loads(content) for file in one["files"])


def versions(*saves: str) -> dict[Version, tuple[WatchedFile, ...]]:
    """Versions with these entries, separated by spaces."""
    return {
        Version(number, "uid", 1): tuple(WatchedFile(path=path, size=1, modified=1) for path in save.split())
        for number, save in enumerate(saves, 1)
    }


def names(found: dict[Version, tuple[WatchedFile, ...]], *damaged: tuple[int, str]) -> set[str]:
    bad = [(str(Version(number, "uid", 1)), entry) for number, entry in damaged]
    return {f"{one.version.number}:{one.entry}" for one in choose(found, damaged=bad)}


def test_the_newest_of_each_kind_is_restored():
    found = versions("config.json step-10/a step-10/b latest", "step-20/a latest", "other.pt")
    assert names(found) == {"1:config.json", "2:step-20", "2:latest", "3:other.pt"}


def test_a_damaged_one_is_replaced_by_the_one_before_and_by_nothing_that_is_newer_than_that():
    found = versions("config.json step-10/a latest", "step-20/a latest", "step-30/a", "latest")
    assert names(found, (3, "step-30")) == {"1:config.json", "2:step-20", "2:latest"}
    assert names(found, (3, "step-30"), (2, "step-20")) == {"1:config.json", "1:step-10", "1:latest"}
    assert names(found, (2, "step-20")) == {"1:config.json", "3:step-30", "4:latest"}
    assert names(found, (1, "config.json")) == {"3:step-30", "4:latest"}


def test_versions_with_one_of_the_newest_of_a_kind_are_kept():
    found = versions("config.json", "step-10/a", "step-20/a", "step-30/a")
    assert {one.number for one in kept_versions(found, keep_last=2)} == {1, 3, 4}


@pytest.mark.parametrize(
    ("name", "kind", "save"),
    [
        ("step-100.pt", "step-#.pt", "step-100.pt"),
        ("rank3.pt", "rank3.pt", "rank@.pt"),
        ("ckpt_step200_rank_03.pt", "ckpt_step#_rank_03.pt", "ckpt_step200_rank_@.pt"),
        ("mp_rank_00_model_states.pt", "mp_rank_00_model_states.pt", "mp_rank_@_model_states.pt"),
        ("epoch=3-tp1-pp0.ckpt", "epoch=#-tp1-pp0.ckpt", "epoch=3-tp@-pp@.ckpt"),
        ("model-00001-of-00003-100.safetensors", "model-00001-of-00003-#.safetensors", None),
        ("__3_0.distcp", "__3_0.distcp", "__@_@.distcp"),
        ("checkpoint12.pt", "checkpoint#.pt", "checkpoint12.pt"),
        ("depart7.pt", "depart#.pt", "depart7.pt"),
    ],
)
def test_numbers_of_ranks_and_numbers_of_saves(name: str, kind: str, save: str | None):
    found = parse(name)
    assert found.kind == kind
    assert save is None or found.save == save


def test_what_the_ranks_of_a_node_have_saved_is_restored_together():
    found = versions("rank0.pt rank1.pt", "rank2.pt rank3.pt latest", "rank0.pt rank1.pt rank2.pt", "rank3.pt latest")
    assert names(found) == {"3:rank0.pt", "3:rank1.pt", "3:rank2.pt", "4:rank3.pt", "4:latest"}
    # Saved together, and no word says so.
    assert names(versions("state_0.pt state_1.pt state_2.pt")) == {f"1:state_{rank}.pt" for rank in range(3)}
    assert len(names(versions("step_1/a step_2/a"))) == 1, "folders hold all parts of a save"


def test_a_save_of_which_a_rank_lacks_its_part_is_not_restored(caplog: pytest.LogCaptureFixture):
    whole, begun = "s1_rank0.pt s1_rank1.pt latest", "s2_rank1.pt latest"
    assert names(versions(whole, begun)) == {"1:s1_rank0.pt", "1:s1_rank1.pt", "1:latest"}
    assert "s2_rank@.pt is not restored, of which parts are missing: s2_rank1.pt" in caplog.text
    finished = versions(whole, begun, "s2_rank0.pt")
    assert names(finished) == {"3:s2_rank0.pt", "2:s2_rank1.pt", "2:latest"}


def test_a_damaged_part_is_replaced_with_the_others(caplog: pytest.LogCaptureFixture):
    found = versions("rank0.pt rank1.pt", "rank0.pt rank1.pt")
    assert names(found, (2, "rank1.pt")) == {"1:rank0.pt", "1:rank1.pt"}
    assert names(found, (2, "rank1.pt"), (1, "rank1.pt")) == set()
    assert "rank@.pt is not restored, since the copy of rank1.pt is damaged" in caplog.text


def test_versions_with_parts_of_one_of_the_newest_complete_saves_are_kept():
    saves = ["s1_rank0.pt", "s1_rank1.pt", "s2_rank0.pt", "s2_rank1.pt", "s3_rank0.pt"]
    assert {one.number for one in kept_versions(versions(*saves), keep_last=1)} == {3, 4, 5}
    assert {one.number for one in kept_versions(versions(*saves), keep_last=2)} == {1, 2, 3, 4, 5}
    together = versions("a0.pt a1.pt a2.pt", "a0.pt a1.pt a2.pt")
    assert {one.number for one in kept_versions(together, keep_last=2)} == {1, 2}


def test_an_incarnation_that_was_replaced_adds_nothing():
    old, new = (lambda number: Version(number, "u", 1)), (lambda number: Version(number, "u", 2))
    later_run = Version(9, "v", 1)
    assert current([old(1), old(2), new(3), old(4), new(5), old(6), later_run]) == [
        *(old(1), old(2), new(3), new(5)),
        later_run,
    ]


def test_versions_without_a_manifest_do_not_count_and_go(link: StorageLink, tmp_path: Path):
    for step in (10, 20, 30):
        file = tmp_path / f"step-{step}.pt"
        file.write_bytes(b"content" * step)
        torn = ask(link, "begin")["version"]
        put(link, torn, file)
        version = ask(link, "begin")["version"]
        put(link, version, file)
        if step == 30:
            assert chosen(link) == ["step-20.pt"]
        assert ask(link, "finish", version=version, files=1) == {}
    assert chosen(link) == ["step-30.pt"]
    folder = tmp_path / "storage" / "watched" / "worker-0"
    assert sorted(path.name.split("-")[0] for path in folder.iterdir()) == ["00000004", "00000006"]


def test_a_file_that_changes_meanwhile_is_not_part_of_a_version(link: StorageLink, tmp_path: Path):
    file = tmp_path / "last.pt"
    file.write_bytes(b"content")
    version = ask(link, "begin")["version"]
    with pytest.raises(StorageProblem, match="changes while it is copied"):
        put(link, version, file, size=6)
    with pytest.raises(StorageProblem, match="changes while it is copied"):
        put(link, version, file, modified=1)
    with pytest.raises(StorageProblem, match="has 0 files, not 1"):
        ask(link, "finish", version=version, files=1)
    assert chosen(link) == []


def test_only_files_of_a_complete_version_are_read_and_only_as_they_were_stored(link: StorageLink, tmp_path: Path):
    file = tmp_path / "last.pt"
    file.write_bytes(b"content")
    version = ask(link, "begin")["version"]
    put(link, version, file)
    read = {"request": "watched", "do": "read", "version": version, "path": "last.pt"}
    with pytest.raises(StorageProblem):
        link.read(read, patience=0)
    assert ask(link, "finish", version=version, files=1) == {}
    assert link.read(read, patience=0) == b"content"
    files = tmp_path / "storage" / "watched" / "worker-0" / version / "files"
    (files / "token").write_text("the agent's own")
    with pytest.raises(StorageProblem, match="has no file 'token'"):
        link.read(read | {"path": "token"}, patience=0)
    (files / "last.pt").write_text("the agent's own")
    with pytest.raises(StorageProblem, match="not what was stored"):
        link.read(read, patience=0)


def test_an_agent_that_was_started_again_completes_no_version(
    agent: CheckpointAgent, link: StorageLink, tmp_path: Path
):
    file = tmp_path / "last.pt"
    file.write_bytes(b"content")
    version = ask(link, "begin")["version"]
    put(link, version, file)
    agent.start()
    with pytest.raises(StorageProblem, match="begin again"):
        ask(link, "finish", version=version, files=1)


@pytest.mark.parametrize("path", ["../secret", "/etc/passwd", "a/../../b", "a//b", ".", "", "a/\0"])
def test_no_path_leads_out_of_the_folder(link: StorageLink, tmp_path: Path, path: str):
    file = tmp_path / "last.pt"
    file.write_bytes(b"content")
    version = ask(link, "begin")["version"]
    with pytest.raises(StorageProblem, match="path"):
        put(link, version, file, path=path)
    with pytest.raises(StorageProblem, match="path"):
        ask(link, "read", version=version, path=path)
    with pytest.raises(StorageProblem, match="version"):
        ask(link, "read", version="../..", path="x")
    with pytest.raises(StorageProblem, match="not begun"):
        put(link, "../../x", file)


OF_LOW_PRIORITY = """
import os, sys, tempfile
from pathlib import Path
# It is imported late, when this process cannot read root's files any more.
import fsspec.implementations.local
from perdure_training.node_api.storage_link import StorageLink
from tests.training.checkpoint_agent import CheckpointAgent

os.nice(15)
if os.geteuid() == 0:
    # Who may not raise priorities, as in a pod.
    os.setgid(65534)
    os.setuid(65534)
with tempfile.TemporaryDirectory() as folder:
    agent = CheckpointAgent(Path(folder), folder + "/storage")
    link = StorageLink(agent.run_dir)
    print(link.read({"request": "watched", "do": "choose"}, patience=0).decode(), flush=True)
    os._exit(0)
"""


def test_an_agent_that_has_a_lower_priority_already_copies_nevertheless():
    command = [sys.executable, "-c", OF_LOW_PRIORITY]
    asked = subprocess.run(
        command, cwd=Path(__file__).parents[2], capture_output=True, text=True, timeout=DEADLINE, check=False
    )
    assert asked.stdout == "[]\n", asked.stderr


def test_a_replaced_node_waits_for_the_storage_that_its_first_incarnation_has_used(tmp_path: Path):
    storage, unmounted = tmp_path / "storage", tmp_path / "unmounted"
    with checkpoint_agent(storage) as first:
        assert chosen(StorageLink(first.run_dir)) == []
    storage.rename(unmounted)
    with tempfile.TemporaryDirectory() as folder:
        node = first.node.replace(incarnation=2)
        second = CheckpointAgent(Path(folder), str(storage), node=node)
        try:
            link = StorageLink(second.run_dir)
            with pytest.raises(StorageAway, match="has nothing of node 0 of this job"):
                chosen(link)
            assert not storage.exists(), "nothing is written where it is mounted"
            unmounted.rename(storage)
            assert chosen(link) == []
        finally:
            second.close()


def test_a_node_whose_first_agent_left_no_mark_takes_a_storage_with_its_saves(link: StorageLink, tmp_path: Path):
    file = tmp_path / "last.pt"
    file.write_bytes(b"content")
    version = ask(link, "begin")["version"]
    put(link, version, file)
    ask(link, "finish", version=version, files=1)
    with tempfile.TemporaryDirectory() as folder:
        node = NODE.replace(incarnation=2)
        second = CheckpointAgent(Path(folder), str(tmp_path / "storage"), node=node)
        try:
            assert chosen(StorageLink(second.run_dir)) == ["last.pt"]
        finally:
            second.close()
