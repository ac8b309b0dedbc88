"""What training code may put into the folder that it shares with its agent, and what the agent makes of it."""

from __future__ import annotations

import json
import os
import shutil
import stat
import struct
import tempfile
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from perdure.agent.event_files import EventShipper
from perdure.agent.files import log_files, log_tail
from perdure.agent.local_files import open_storage
from perdure.agent.log_reader import end_of_log, read_log
from perdure.agent.logs import LogShipper
from perdure.agent.progress import ProgressReader
from perdure.agent.sockets import listen_beneath
from perdure.agent.torch_events import TorchEvents
from perdure.contract import LogChunk, NodeCredentials
from perdure_launcher.warm_start.starts import read_starts, read_why_all_cold
from perdure_training.node_api.layout import short_links
from perdure_training.node_api.progress_file import (
    MAGIC,
    REPORTED,
    ProgressFile,
    mark_without_process_group,
    progress_path,
    read_progress,
)
from perdure_training.node_api.storage_link import StorageAway, StorageLink, StorageProblem
from perdure_training.node_api.untrusted_files import NotARegularFile, open_beneath, read_beneath
from tests.support.waiting import DEADLINE
from tests.training.checkpoint_agent import checkpoint_agent

SECRET = "TEMPORAL_API_KEY=secret"
NODE = NodeCredentials(uid="0a1b2c3d", role="worker", rank=0, incarnation=1, token="t" * 16)

Trap = Callable[[Path, Path], object]
"""Puts something in place of a file; the second path is a file that only the agent may read."""


def _socket(path: Path) -> None:
    import socket

    with socket.socket(socket.AF_UNIX) as listener:
        folder = os.open(path.parent, os.O_RDONLY)
        try:
            listener.bind(f"/proc/self/fd/{folder}/{path.name}")
        finally:
            os.close(folder)


TRAPS: dict[str, Trap] = {
    "link": lambda path, secret: path.symlink_to(secret),
    "link-to-own-environment": lambda path, _: path.symlink_to("/proc/self/environ"),
    "link-to-a-descriptor": lambda path, _: path.symlink_to("/proc/self/fd/0"),
    "dangling-link": lambda path, _: path.symlink_to("nowhere"),
    "loop": lambda path, _: path.symlink_to(path.name),
    "pipe": lambda path, _: os.mkfifo(path),
    "socket": lambda path, _: _socket(path),
    "device": lambda path, _: path.symlink_to("/dev/zero"),
    "folder": lambda path, _: path.mkdir(),
}


@pytest.fixture
def secret(tmp_path: Path) -> Path:
    path = tmp_path / "agent.env"
    path.write_text(SECRET)
    return path


@pytest.fixture
def run(tmp_path: Path) -> Path:
    for folder in ("logs", "progress", "warm"):
        (tmp_path / "run" / folder).mkdir(parents=True)
    return tmp_path / "run"


def _hard_link(path: Path, secret: Path) -> None:
    path.hardlink_to(secret)


IN_THE_RUN_DIRECTORY: dict[str, Trap] = TRAPS | {"hard-link": _hard_link}
"""In a storage, files of the agent's own may have several names: that is how some backups are made."""


@pytest.mark.parametrize("trap", IN_THE_RUN_DIRECTORY.values(), ids=IN_THE_RUN_DIRECTORY.keys())
async def test_in_place_of_the_log(run: Path, secret: Path, trap: Trap) -> None:
    trap(run / "logs" / "output.log", secret)
    assert log_files(run) == []
    assert log_tail(run, 1000) == ""
    assert end_of_log(run) is None
    assert read_log(run, lines=10) == LogChunk()
    await LogShipper(run, f"file://{run.parent}/kept", NODE).ship()
    assert not list(run.parent.glob("kept/**/*.log"))


def test_a_run_directory_with_a_short_link_of_its_users_own(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    link = short_links() / "0123456789abcdef"
    link.parent.mkdir(mode=0o700)
    link.symlink_to(run)
    listen_beneath(link, "agent.sock", backlog=1).close()
    assert stat.S_ISSOCK((run / "agent.sock").lstat().st_mode)
    elsewhere = tmp_path / "another"
    elsewhere.symlink_to(run)
    with pytest.raises(NotARegularFile):
        listen_beneath(elsewhere, "agent.sock", backlog=1)


def test_no_folder_for_temporary_files_is_needed(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def none() -> Path:
        raise FileNotFoundError("no usable temporary directory, as in the agent's container")

    monkeypatch.setattr("perdure_training.node_api.untrusted_files.short_links", none)
    listen_beneath(run, "agent.sock", backlog=1).close()


@pytest.mark.parametrize("trap", IN_THE_RUN_DIRECTORY.values(), ids=IN_THE_RUN_DIRECTORY.keys())
async def test_in_place_of_an_event_file(run: Path, secret: Path, trap: Trap) -> None:
    (run / "events").mkdir()
    trap(run / "events" / "torchrun.jsonl", secret)
    await EventShipper(run, f"file://{run.parent}/kept", NODE).ship()
    assert not (run.parent / "kept").exists()


async def test_in_place_of_the_folder_of_events(run: Path, secret: Path) -> None:
    elsewhere = run.parent / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "torchrun.jsonl").write_text(SECRET)
    (run / "events").symlink_to(elsewhere)
    await EventShipper(run, f"file://{run.parent}/kept", NODE).ship()
    assert not (run.parent / "kept").exists()


@pytest.mark.parametrize("name", ["logs", "progress", "warm"])
def test_in_place_of_a_folder(run: Path, secret: Path, name: str) -> None:
    elsewhere = run.parent / "elsewhere"
    elsewhere.mkdir()
    for file in ("output.log", "rank-0", "all-cold"):
        (elsewhere / file).write_text(SECRET)
    (run / name).rmdir()
    (run / name).symlink_to(elsewhere)
    assert log_files(run) == []
    assert read_progress(run / "progress" / "rank-0") is None
    assert read_why_all_cold(run / "warm") == ""


def test_a_log_that_is_swapped_after_it_was_found(run: Path, secret: Path) -> None:
    log = run / "logs" / "output.log"
    log.write_text("line\n")
    [found] = log_files(run)
    log.unlink()
    log.symlink_to(secret)
    with pytest.raises(NotARegularFile):
        found.open()


def _write_what_ranks_do(run: Path) -> None:
    """Writes one of each file that an agent reads, with content that it takes in."""
    for folder in ("logs", "progress", "warm", "events"):
        (run / folder).mkdir(parents=True, exist_ok=True)
    (run / "logs" / "output.log").write_text("line\n")
    writer = ProgressFile(progress_path(run / "progress", 0), generation=1, pid=7, source=REPORTED)
    writer.write(5, time=1.0)
    mark_without_process_group(run / "progress", generation=1)
    start = {"generation": 1, "pid": 7, "warm": True}
    (run / "warm" / "start-0").write_text(json.dumps(start))
    (run / "warm" / "all-cold").write_text("no reason")
    event = {"name": "torchelastic.worker.status.START", "time": 1.0, "attributes": {"source": "WORKER"}}
    (run / "events" / "torchrun.jsonl").write_text(json.dumps(event) + "\n")


def _read_by_an_agent(run: Path) -> list[object]:
    """What an agent takes in of the files above; of each of them, something that is false says nothing was read."""
    reader = ProgressReader(run)
    reader.sample(generation=1, base_rank=0, processes=1, now=1.0)
    return [
        log_files(run),
        log_tail(run, 1000),
        end_of_log(run),
        read_log(run).text,
        reader.newest,
        reader.newest and reader.newest.apart,
        reader.starts(generation=1, processes=1),
        reader.starts(generation=2, processes=1),
        TorchEvents(run).read(),
    ]


def test_in_place_of_the_run_directory_itself(tmp_path: Path) -> None:
    """The folder that holds it is open to the training code, which can give it another name."""
    elsewhere, run = tmp_path / "elsewhere", tmp_path / "run"
    _write_what_ranks_do(elsewhere)
    assert all(_read_by_an_agent(elsewhere)), "the files are what an agent reads"
    run.symlink_to(elsewhere)
    assert not any(_read_by_an_agent(run))
    with pytest.raises(NotARegularFile):
        listen_beneath(run, "agent.sock", backlog=1)


@pytest.mark.parametrize("name", ["logs", "progress", "warm", "events"])
def test_in_place_of_any_folder_in_it(tmp_path: Path, name: str) -> None:
    elsewhere, run = tmp_path / "elsewhere", tmp_path / "run"
    _write_what_ranks_do(elsewhere)
    _write_what_ranks_do(run)
    shutil.rmtree(run / name)
    (run / name).symlink_to(elsewhere / name)
    unread = {"logs": [0, 1, 2, 3], "progress": [4, 5], "warm": [6, 7], "events": [8]}[name]
    assert [number for number, found in enumerate(_read_by_an_agent(run)) if not found] == unread


@pytest.mark.parametrize("trap", IN_THE_RUN_DIRECTORY.values(), ids=IN_THE_RUN_DIRECTORY.keys())
def test_in_place_of_progress_and_of_starts(run: Path, secret: Path, trap: Trap) -> None:
    ProgressFile(secret, generation=1, pid=7, source=REPORTED).write(5, time=1.0)
    trap(run / "progress" / "rank-0", secret)
    trap(run / "warm" / "start-0", secret)
    reader = ProgressReader(run)
    reader.sample(generation=1, base_rank=0, processes=1, now=1.0)
    assert reader.newest is None
    assert read_starts(run / "warm", generation=1, processes=1) == []


@pytest.mark.parametrize("time", [1e300, float("inf"), float("nan"), -1.0])
def test_a_step_at_no_time(run: Path, time: float) -> None:
    (run / "progress" / "rank-0").write_bytes(struct.pack("<IIQQQQdd16x", MAGIC, 1, 1, 7, 5, 0, 0.1, time))
    assert read_progress(run / "progress" / "rank-0") is None


def test_more_steps_than_a_number_holds(run: Path) -> None:
    (run / "progress" / "rank-0").write_bytes(struct.pack("<IIQQQQdd16x", MAGIC, 1, 1, 7, 2**64 - 1, 0, 0.1, 1.0))
    assert read_progress(run / "progress" / "rank-0") is None


def test_100_gigabytes_without_a_line_break_take_no_memory_and_no_time(run: Path) -> None:
    log = run / "logs" / "output.log"
    with log.open("wb") as file:
        file.truncate(100 * 1024**3)
    chunk = read_log(run, lines=10)
    assert chunk.position is not None
    assert len(chunk.text) <= 256 * 1024
    assert len(log_tail(run, 4000)) == 4000
    os.truncate(run / "logs" / "output.log", 0)
    for name in ("progress/rank-0", "warm/all-cold", "warm/start-0"):
        with (run / name).open("wb") as file:
            file.truncate(100 * 1024**3)
    assert read_progress(run / "progress" / "rank-0") is None
    assert len(read_why_all_cold(run / "warm")) <= 64 * 1024
    assert read_starts(run / "warm", generation=1, processes=1) == []


async def test_of_100_gigabytes_no_more_is_copied_than_a_log_has(run: Path) -> None:
    with (run / "logs" / "output.log").open("wb") as file:
        file.truncate(100 * 1024**3)
    kept = run.parent / "kept"
    shipper = LogShipper(run, f"file://{kept}", NODE, part_max=4096, file_max=10_000)
    for _ in range(2):
        await shipper.ship()
        assert [path.stat().st_size for path in sorted(kept.rglob("*.log"))] == [4096, 4096, 1808]


STEP = "step-5-run-1"
READ = {"request": "read", "folder": STEP, "name": ".metadata"}


@pytest.mark.parametrize("trap", TRAPS.values(), ids=TRAPS.keys())
def test_in_the_storage_of_checkpoints(tmp_path: Path, secret: Path, trap: Trap) -> None:
    """A storage may be a volume that training code writes to. It asks the agent to read what it put there."""
    storage = tmp_path / "storage"
    (storage / STEP).mkdir(parents=True)
    trap(storage / STEP / ".metadata", secret)
    record = {"size": len(SECRET), "checksum": zlib.crc32(SECRET.encode())}
    (storage / STEP / "perdure-0.json").write_text(json.dumps({"ranks": 0, "files": {".metadata": record}}))
    with checkpoint_agent(storage) as agent, pytest.raises((StorageAway, StorageProblem)):
        StorageLink(agent.run_dir).read(READ, patience=0)
    files, root = open_storage(f"file://{storage}")
    with pytest.raises(OSError):  # noqa: PT011
        files.info(f"{root}/{STEP}/.metadata")
    with pytest.raises(OSError):  # noqa: PT011
        files.pipe_file(f"{root}/{STEP}/.metadata", b"mine")
    assert secret.read_text() == SECRET


@pytest.mark.parametrize("chain", ["simplecache", "filecache", "blockcache", "cached", "dir"])
def test_no_file_system_around_the_folder_follows_links(tmp_path: Path, secret: Path, chain: str) -> None:
    (tmp_path / STEP).mkdir()
    (tmp_path / STEP / ".metadata").symlink_to(secret)
    url = f"{chain}::file://{tmp_path}"
    with pytest.raises(ValueError, match="chains file systems"):
        open_storage(url)
    with checkpoint_agent(url) as agent, pytest.raises((StorageAway, StorageProblem)):
        StorageLink(agent.run_dir).read(READ, patience=0)


def test_in_place_of_what_the_script_itself_saved(tmp_path: Path, secret: Path) -> None:
    files = tmp_path / "storage" / "watched" / "worker-0" / "00000001-run-1" / "files"
    files.mkdir(parents=True)
    (files / "saved").symlink_to(secret)
    (files.parent / "manifest.json").symlink_to(secret)
    read = {"request": "watched", "do": "read", "version": "00000001-run-1", "path": "saved"}
    with checkpoint_agent(tmp_path / "storage") as agent:
        link = StorageLink(agent.run_dir)
        for request in (read, {"request": "watched", "do": "choose"}):
            with pytest.raises((StorageAway, StorageProblem)):
                link.read(request, patience=0)


def test_100_gigabytes_in_place_of_a_record_take_no_memory(tmp_path: Path) -> None:
    step = tmp_path / "storage" / STEP
    step.mkdir(parents=True)
    (step / ".metadata").write_text("")
    with (step / "perdure-0.json").open("wb") as file:
        file.truncate(100 * 1024**3)
    with checkpoint_agent(tmp_path / "storage") as agent:
        link = StorageLink(agent.run_dir)
        ask = {"request": "verify", "folder": STEP, "share": [0, 1]}
        assert link.ask(ask, within=DEADLINE) == {"damage": "perdure-0.json is damaged"}
        (step / "perdure-0.json").write_text(json.dumps({"ranks": 10**15, "files": {}}))
        assert "ranks are missing" in link.ask(ask, within=DEADLINE)["damage"]


def test_in_place_of_a_folder_of_the_storage(tmp_path: Path, secret: Path) -> None:
    storage, private = tmp_path / "storage", tmp_path / "private"
    storage.mkdir()
    private.mkdir()
    (private / ".metadata").write_text(SECRET)
    (storage / STEP).symlink_to(private)
    with checkpoint_agent(storage) as agent, pytest.raises((StorageAway, StorageProblem)):
        StorageLink(agent.run_dir).read(READ, patience=0)
    files, root = open_storage(str(storage))
    for change in (
        lambda: files.pipe_file(f"{root}/{STEP}/new", b""),
        lambda: files.mv(f"{root}/{STEP}/.metadata", f"{root}/{STEP}/new"),
        lambda: files.rm_file(f"{root}/{STEP}/.metadata"),
        lambda: files.rm(f"{root}/{STEP}", recursive=True),
        lambda: files.makedirs(f"{root}/{STEP}/new", exist_ok=True),
    ):
        with pytest.raises(OSError):  # noqa: PT011
            change()
    assert [path.name for path in private.iterdir()] == [".metadata"]


@pytest.fixture
def volume() -> Iterator[Path]:
    """A folder of a mounted volume."""
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        yield Path(folder)


@pytest.fixture
def private() -> Iterator[Path]:
    """A folder that is not on that volume."""
    with tempfile.TemporaryDirectory(dir="/var/tmp") as folder:
        yield Path(folder)


def test_in_place_of_the_storage_itself(tmp_path: Path, volume: Path, private: Path) -> None:
    """Its folder is on a volume that the training code writes to, too."""
    (volume / "storage").symlink_to(private)
    files, root = open_storage(f"file://{volume}/storage", contained=True)
    for change in (
        lambda: files.makedirs(f"{root}/{STEP}", exist_ok=True),
        lambda: files.pipe_file(f"{root}/new", b""),
        lambda: files.ls(root, detail=False),
    ):
        with pytest.raises(OSError, match="leads out of the volume /dev/shm"):
            change()
    begin = {"request": "watched", "do": "begin"}
    agents = checkpoint_agent(volume / "storage", state_dir=tmp_path / "state")
    with agents as agent, pytest.raises((StorageAway, StorageProblem)):
        StorageLink(agent.run_dir).ask(begin, within=DEADLINE)
    assert list(private.iterdir()) == []


def test_a_link_within_the_volume_is_followed(volume: Path) -> None:
    (volume / "first").mkdir()
    (volume / "storage").symlink_to(volume / "first")
    files, root = open_storage(f"file://{volume}/storage", contained=True)
    files.makedirs(f"{root}/{STEP}", exist_ok=True)
    files.pipe_file(f"{root}/{STEP}/new", b"mine")
    assert (volume / "first" / STEP / "new").read_bytes() == b"mine"


async def test_in_place_of_a_copy_of_the_log(run: Path, secret: Path) -> None:
    """What a job prints would otherwise become the content of any file of the agent's, such as its configuration."""
    (run / "logs" / "output.log").write_text("mine")
    part = run.parent / "kept" / "worker-0" / "1" / "part-000001.log"
    part.parent.mkdir(parents=True)
    part.symlink_to(secret)
    await LogShipper(run, f"file://{run.parent}/kept", NODE).ship()
    assert secret.read_text() == SECRET


def test_a_socket_replaces_whatever_is_there_and_nothing_else(run: Path, secret: Path) -> None:
    secret.chmod(0o600)
    (run / "agent.sock").symlink_to(secret)
    listener = listen_beneath(run, "agent.sock", backlog=1)
    try:
        status = os.lstat(run / "agent.sock")
        assert stat.S_ISSOCK(status.st_mode)
        assert stat.S_IMODE(status.st_mode) == 0o666
    finally:
        listener.close()
    assert secret.read_text() == SECRET
    assert stat.S_IMODE(secret.stat().st_mode) == 0o600
    elsewhere = run.parent / "link"
    elsewhere.symlink_to(run)
    with pytest.raises(NotARegularFile):
        listen_beneath(elsewhere, "agent.sock", backlog=1)


@pytest.mark.parametrize("name", ["../agent.env", "logs/../../agent.env", "/etc/passwd", "logs/.."])
def test_a_path_that_leaves_the_folder(run: Path, secret: Path, name: str) -> None:
    with pytest.raises(OSError):  # noqa: PT011
        open_beneath(run, name)


def test_what_belongs_there_is_read(run: Path) -> None:
    (run / "logs" / "output.log").write_text("line\n")
    assert read_beneath(run, "logs/output.log", limit=3) == b"lin"
    assert read_log(run).text == "line\n"
    with pytest.raises(FileNotFoundError):
        open_beneath(run, "logs/missing.log")
