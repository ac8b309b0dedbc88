"""Which launcher gets the memory folder that a killed one has left, and when the folder is deleted."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections import namedtuple
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from threading import Event

import pytest

from perdure_launcher.system import memory_folder
from perdure_launcher.system.memory_folder import MemoryFolder, MemoryOrigin, delete_abandoned
from perdure_training.snapshots.arena import Arena, Header

HEADER = Header(step=0, rank=0, world_size=2, generation=1, replicated=False, index_at=0, size=0, checksum=0)
LAUNCHER = """
import os, sys, time
from pathlib import Path
from perdure_launcher.system.memory_folder import MemoryFolder
folder = MemoryFolder(Path(sys.argv[1]), node=sys.argv[2])
(folder.path / "state").write_bytes(b"x")
child = os.fork() if sys.argv[3] == "forks" else 1
if child:
    print(folder.path, child, flush=True)
time.sleep(300)
"""


Usage = namedtuple("Usage", "total used free")


@pytest.fixture(autouse=True)
def enough_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda path: Usage(100, 50, 50))


@contextmanager
def launcher(root: Path, node: str, *, forks: bool = False) -> Iterator[list[str]]:
    """A launcher that has a folder with some state, and is killed at the end; yields the folder, and a child's PID."""
    command = [sys.executable, "-c", LAUNCHER, str(root), node, "forks" if forks else ""]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as owner:
        assert owner.stdout
        try:
            yield owner.stdout.readline().split()
        finally:
            owner.kill()


def killed(root: Path, node: str) -> Path:
    """The folder of a launcher that was killed."""
    with launcher(root, node) as printed:
        return Path(printed[0])


def folders(root: Path) -> set[Path]:
    return set(root.iterdir())


def save(folder: Path, step: int, *, generation: int = 1) -> None:
    """Writes an empty snapshot, as a rank would."""
    slot = Arena(folder / "stage-0" / "state").slot(0, 0)
    slot.begin(0)
    slot.finish(replace(HEADER, step=step, generation=generation))


def found_long_ago(folder: Path) -> None:
    """Has the time for which a folder is kept pass, from when a launcher first found it abandoned."""
    mark = folder / "abandoned"
    then = mark.stat().st_mtime - memory_folder.KEPT_FOR.total_seconds() - 1
    os.utime(mark, (then, then))


def test_the_folder_of_a_running_launcher_is_left_to_it_and_removed_when_it_ends(tmp_path: Path):
    mine = MemoryFolder(tmp_path, node="job/worker-0")
    assert mine.path.stat().st_mode & 0o777 == 0o700
    assert mine.origin is MemoryOrigin.NEW
    delete_abandoned(tmp_path, node="job/worker-1", kept_for=timedelta())
    assert folders(tmp_path) == {mine.path}
    mine.remove()
    assert folders(tmp_path) == set()


def test_the_folder_of_a_killed_launcher_waits_for_its_node_while_others_start(tmp_path: Path):
    left = killed(tmp_path, "job/worker-1")
    others = [MemoryFolder(tmp_path, node=node) for node in ("job/worker-0", "another/worker-1", "")]
    for _ in range(2):
        delete_abandoned(tmp_path, node="another/worker-1")
    again = MemoryFolder(tmp_path, node="job/worker-1")
    assert (again.path, again.origin) == (left, MemoryOrigin.ADOPTED)
    assert (left / "state").exists()
    for folder in (again, *others):
        folder.remove()
    assert folders(tmp_path) == set()


def test_nodes_that_are_killed_together_each_find_their_own_folder(tmp_path: Path):
    left = [killed(tmp_path, f"job/worker-{rank}") for rank in (0, 1)]
    again = [MemoryFolder(tmp_path, node=f"job/worker-{rank}") for rank in (0, 1)]
    assert [folder.path for folder in again] == left
    for folder in again:
        folder.remove()


@pytest.mark.parametrize("all_of_it", [True, False])
def test_a_folder_that_something_else_deletes_is_made_again_for_its_owner(tmp_path: Path, all_of_it: bool):
    folder = MemoryFolder(tmp_path, node="uid/trainer-0")
    folder.renew()
    shutil.rmtree(folder.path)
    if not all_of_it:
        # By a rank, which saves the next step before the launcher looks.
        folder.path.mkdir(mode=0o700)
    folder.renew()
    assert folder.path.stat().st_mode & 0o777 == 0o700
    assert (folder.path / "owner").read_text() == "uid/trainer-0"
    (folder.path / "state").write_bytes(b"x")
    delete_abandoned(tmp_path, kept_for=timedelta())
    assert (folder.path / "state").exists(), "it is locked"
    folder.remove()
    assert not folder.path.exists()


def test_an_abandoned_folder_is_deleted_some_time_after_it_was_first_found(tmp_path: Path):
    left = killed(tmp_path, "job/worker-1")
    # It counts from the first look: the owner may have lived for days.
    for path in (left, *left.iterdir()):
        os.utime(path, (1, 1))
    delete_abandoned(tmp_path, node="job/worker-0")
    assert folders(tmp_path) == {left}
    found_long_ago(left)
    again = MemoryFolder(tmp_path, node="job/worker-1")
    assert again.path == left
    os.close(again._lock)
    delete_abandoned(tmp_path, node="job/worker-0")
    assert folders(tmp_path) == {left}
    found_long_ago(left)
    delete_abandoned(tmp_path, node="job/worker-0")
    assert folders(tmp_path) == set()


def test_a_mark_with_a_time_of_another_clock_is_made_again(tmp_path: Path):
    left = killed(tmp_path, "job/worker-1")
    (left / "abandoned").touch()
    delete_abandoned(tmp_path, node="job/worker-0")
    assert folders(tmp_path) == {left}
    found_long_ago(left)
    delete_abandoned(tmp_path, node="job/worker-0")
    assert folders(tmp_path) == set()


def test_a_clock_that_is_set_to_another_time_deletes_no_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    left = killed(tmp_path, "job/worker-1")
    delete_abandoned(tmp_path, node="job/worker-0")
    next_year = time.time() + 3e7
    monkeypatch.setattr(time, "time", lambda: next_year)
    delete_abandoned(tmp_path, node="job/worker-0")
    again = MemoryFolder(tmp_path, node="job/worker-1")
    assert (again.path, again.origin) == (left, MemoryOrigin.ADOPTED)
    again.remove()


def test_where_memory_is_short_only_the_same_jobs_folders_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    same, other = killed(tmp_path, "job/worker-1"), killed(tmp_path, "another/worker-1")
    delete_abandoned(tmp_path, node="job/worker-0")
    assert folders(tmp_path) == {same, other}
    monkeypatch.setattr(shutil, "disk_usage", lambda path: Usage(100, 51, 49))
    delete_abandoned(tmp_path)
    assert folders(tmp_path) == {same, other}, "a worker, which needs no memory itself"
    delete_abandoned(tmp_path, node="job/worker-0")
    assert folders(tmp_path) == {same}


def test_a_launcher_waits_for_the_lock_that_a_killed_one_has_not_given_up_yet(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(memory_folder, "_RELEASED_WITHIN", timedelta(minutes=1))
    looked = Event()
    lock = memory_folder._lock

    def observed(path: Path, descriptor: int) -> object:
        found = lock(path, descriptor)
        looked.set()
        return found

    monkeypatch.setattr(memory_folder, "_lock", observed)
    with launcher(tmp_path, "job/worker-0", forks=True) as printed:
        left = Path(printed[0])
        child = int(printed[1])
    with ThreadPoolExecutor(1) as thread:
        starting = thread.submit(MemoryFolder, tmp_path, node="job/worker-0")
        assert looked.wait(60)
        assert not starting.done()
        os.kill(child, signal.SIGKILL)
        again = starting.result()
    assert (again.path, again.origin) == (left, MemoryOrigin.ADOPTED)
    again.remove()


def test_a_launcher_whose_predecessor_still_runs_gets_a_new_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(memory_folder, "_RELEASED_WITHIN", timedelta())
    with launcher(tmp_path, "job/worker-0") as printed:
        mine = MemoryFolder(tmp_path, node="job/worker-0")
        assert mine.origin is MemoryOrigin.HELD
        assert str(mine.path) not in printed
    mine.remove()


def test_of_several_folders_the_one_with_the_newest_snapshot_is_taken_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(memory_folder, "_RELEASED_WITHIN", timedelta())
    made = [MemoryFolder(tmp_path, node="job/worker-0") for _ in range(4)]
    for folder, version in zip(made, ((1, 90), (2, 80), None, (1, 99)), strict=True):
        if version is not None:
            save(folder.path, version[1], generation=version[0])
        os.close(folder._lock)
    again = MemoryFolder(tmp_path, node="job/worker-0")
    assert again.path == made[1].path
    assert folders(tmp_path) == {again.path}
    again.remove()
