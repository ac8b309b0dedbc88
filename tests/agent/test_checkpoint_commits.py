"""What a storage has lost since nodes stored it is no checkpoint: in a folder, and in a storage without folders."""

from __future__ import annotations

import json
import os
import struct
import threading
import zlib
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from uuid import uuid4

import fsspec
import pytest

from perdure.agent.checkpoint import commits, further_tries
from perdure.agent.checkpoint.storage import Storage
from perdure.contract import CheckpointStored
from perdure_training.node_api.storage_link import StorageLink
from tests.support.waiting import DEADLINE, wait_for
from tests.training.checkpoint_agent import CheckpointAgent, checkpoint_agent

FOLDER = "step-5-run-1"
CONTENT = b"0123456789"
WITHIN = 30.0


class Place:
    """A storage that keeps two ranks' parts, as any program reaches it."""

    def __init__(self, url: str) -> None:
        self.url = url
        files, root = fsspec.core.url_to_fs(url)
        self._files: Any = files
        self._root = str(root)

    def lose(self, name: str) -> None:
        self._files.rm_file(f"{self._root}/{FOLDER}/{name}")

    def cut(self, name: str) -> None:
        self._files.pipe_file(f"{self._root}/{FOLDER}/{name}", CONTENT[:3])

    @property
    def names(self) -> set[str]:
        return Storage(self.url).names(FOLDER)


@pytest.fixture(params=["folder", "objects"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Place:
    return Place(str(tmp_path / "storage") if request.param == "folder" else f"memory://{uuid4().hex}/checkpoints")


@pytest.fixture
def agent(place: Place) -> Iterator[CheckpointAgent]:
    with checkpoint_agent(place.url, ranks=2) as agent:
        agent.commits = False
        agent.begin(1)
        yield agent


def stored_by(agent: CheckpointAgent, folder: Path) -> CheckpointStored:
    """Has two ranks store their parts; returns the node's report."""
    text = json.dumps([(1, 0, len(CONTENT))]).encode()
    contents = {"snapshot": CONTENT, "recipe": struct.pack("<Q", len(text)) + text, "metadata": b"pickle"}
    for name, content in contents.items():
        (folder / name).write_bytes(content)

    def store(rank: int) -> None:
        names = ["snapshot", "recipe", "metadata"] if rank == 0 else ["snapshot", "recipe"]
        files = [os.open(folder / name, os.O_RDONLY) for name in names]
        described = {"offset": 0, "size": len(CONTENT), "checksum": zlib.crc32(CONTENT)}
        fields = {"folder": FOLDER, "rank": rank, "ranks": 2, "name": f"__{rank}_0.distcp", "size": len(CONTENT)}
        StorageLink(agent.run_dir).ask(
            {"request": "store", **fields, "snapshot": described}, files=files, within=DEADLINE
        )
        for file in files:
            os.close(file)

    with ThreadPoolExecutor(2) as ranks:
        list(ranks.map(store, range(2)))
    [report] = wait_for(lambda: agent.of(CheckpointStored), within=WITHIN)
    return report


def test_a_checkpoint_whose_parts_are_all_there_is_committed(agent: CheckpointAgent, place: Place, tmp_path: Path):
    agent.commit(stored_by(agent, tmp_path))
    wait_for(lambda: agent.committed, within=WITHIN)
    assert ".metadata" in place.names
    assert agent.commit_problems == []


@pytest.mark.parametrize(
    ("lose", "named"),
    [
        (lambda place: place.lose("__1_0.distcp"), "__1_0.distcp is missing"),
        (lambda place: place.cut("__0_0.distcp"), "__0_0.distcp has 3 bytes, and had 10 when it was stored"),
        (lambda place: place.lose("metadata.uncommitted"), ".metadata is missing"),
        (lambda place: place.lose("perdure-0.json"), "perdure-0.json is missing"),
        (lambda place: place.cut("perdure-0.json"), "perdure-0.json is damaged"),
    ],
    ids=["part", "end of a part", "metadata", "record", "end of a record"],
)
def test_a_checkpoint_of_which_something_is_lost_is_not_committed_and_the_loss_named(
    agent: CheckpointAgent,
    place: Place,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    lose: Callable[[Place], None],
    named: str,
):
    monkeypatch.setattr(commits, "_LISTED_WITHIN", 0.0)
    stored = stored_by(agent, tmp_path)
    lose(place)
    agent.commit(stored)
    [problem] = wait_for(lambda: agent.commit_problems, within=WITHIN)
    assert named in problem
    assert "Find out whether each node has mounted the same storage there" in problem
    assert "what else deletes or changes files in it" in problem
    answer = StorageLink(agent.run_dir).ask({"request": "await", "folder": FOLDER, "within": 30}, within=DEADLINE)
    assert (answer["committed"], named in answer["given_up"]) == (False, True), "ranks do not wait for it"
    assert ".metadata" not in place.names


def test_a_commit_that_is_withdrawn_while_the_parts_are_listed_is_not_carried_out(
    agent: CheckpointAgent, place: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    sizes, listed = Storage.sizes, threading.Event()

    def withdraw(storage: Storage, folder: str) -> dict[str, int | None]:
        agent.desired_commit = None
        listed.set()
        return sizes(storage, folder)

    stored = stored_by(agent, tmp_path)
    monkeypatch.setattr(Storage, "sizes", withdraw)
    agent.commit(stored)
    assert listed.wait(DEADLINE)
    monkeypatch.undo()
    assert agent.checkpoints._commits is not None
    agent.checkpoints._commits._threads.submit(lambda: None).result(WITHIN)
    assert ".metadata" not in place.names
    agent.commit(stored)
    wait_for(lambda: agent.committed, within=WITHIN)
    assert ".metadata" in place.names


def test_a_listing_that_is_behind_delays_a_commit_and_alarms_no_one(
    agent: CheckpointAgent, place: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    sizes, listings = Storage.sizes, iter(range(100))

    def behind(storage: Storage, folder: str) -> dict[str, int | None]:
        found = sizes(storage, folder)
        if next(listings) == 0:
            del found["__1_0.distcp"]
        return found

    stored = stored_by(agent, tmp_path)
    monkeypatch.setattr(Storage, "sizes", behind)
    agent.commit(stored)
    wait_for(lambda: agent.committed, within=WITHIN)
    assert agent.commit_problems == []


def test_a_storage_that_is_mounted_again_takes_a_commit_although_the_first_try_never_ends(
    agent: CheckpointAgent, place: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    sizes, listings, returns = Storage.sizes, iter(range(100)), threading.Event()

    def hang_first(storage: Storage, folder: str) -> dict[str, int | None]:
        if next(listings) == 0:
            returns.wait(DEADLINE)
        return sizes(storage, folder)

    stored = stored_by(agent, tmp_path)
    monkeypatch.setattr(commits, "_ANSWERS_WITHIN", 0.05)
    monkeypatch.setattr(further_tries, "_FIRST_PAUSE", 0.0)
    monkeypatch.setattr(Storage, "sizes", hang_first)
    try:
        agent.commit(stored)
        wait_for(lambda: agent.committed, within=WITHIN)
        assert ".metadata" in place.names
        assert "no answer within" in agent.commit_problems[0]
    finally:
        returns.set()
