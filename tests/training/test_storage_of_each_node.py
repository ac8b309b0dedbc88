"""Storage that is missing on one node, or hangs there: the job learns it, and the ranks wait together."""

from __future__ import annotations

import json
import shutil
import tempfile
import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from perdure.agent.checkpoint import listing
from perdure.agent.checkpoint.storage import Storage
from perdure.contract import CheckpointRestored, Restore, RestoreSource, StorageFinding
from perdure_training.checkpoint import generation, generation_storage, state_search
from perdure_training.node_api.storage_link import StateLost, StorageLink
from tests.support.waiting import wait_for
from tests.training.checkpoint_agent import NODE, CheckpointAgent
from tests.training.ranks_in_threads import RankThreads, rank_threads

WITHIN = 60.0
FOLDER = "step-5-run-1"


class Nodes:
    """Two nodes with a rank and an agent each; both have stored step 5, and have nothing in memory."""

    def __init__(self, ranks: RankThreads, second: CheckpointAgent, storage: Path) -> None:
        self.ranks = ranks
        self.second = second
        self.storage = storage
        """Where the second node has mounted it."""
        self._links = [StorageLink(one.run_dir) for one in (ranks.agent, second)]
        self._here = threading.local()
        ranks.variables |= {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}

    @property
    def link(self) -> StorageLink:
        """The agent of the node whose rank this thread is."""
        return self._links[self._here.rank]

    def know(self, *folders: str, on_loss: str = "wait", accepts_less: bool = False) -> None:
        """The job knows that its storage has these checkpoints."""
        known = [{"folder": folder, "loads": True} for folder in folders]
        content = {"stored": known, "on_loss": on_loss, "may_return": False, "accepts_less": accepts_less}
        self.ranks.variables["PERDURE_KNOWN_STATES"] = json.dumps(content)

    @contextmanager
    def restoring(self) -> Iterator[Future[list[int | None]]]:
        """The ranks of the next world restore, in a thread."""
        self.ranks.prepare(2, lose_memory=True)
        self.second.generation = self.ranks.agent.generation
        for rank, one in enumerate(self.ranks.checkpointers):
            assert one._own is not None
            one._own = replace(one._own, node=rank)
        with ThreadPoolExecutor(1) as thread:
            yield thread.submit(self.ranks.each, self._restore)

    def waits(self) -> Restore:
        """What the job learns of a wait."""
        return wait_for(lambda: [one for one in self.ranks.agent.searches if one.waits])[-1]

    def _restore(self, rank: int) -> int | None:
        self._here.rank = rank
        return self.ranks.checkpointers[rank].restore({"step": 0})


@pytest.fixture
def nodes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Nodes]:
    monkeypatch.setattr(state_search, "SURE", 0.5)
    monkeypatch.setattr(state_search, "_REPORTED", 0.1)
    # The path of a socket is short.
    with rank_threads(tmp_path, keep_last=5) as ranks, tempfile.TemporaryDirectory() as folder:
        states: list[dict[str, Any]] = [{"step": 0}, {"step": 0}]
        assert ranks.begin(states) == [None, None]
        assert ranks.save(5, [{"step": 5}] * 2, durable=True) == [True, True]
        assert ranks.wait_until_durable(WITHIN) == [True, True]
        storage = tmp_path / "elsewhere"
        shutil.copytree(ranks.storage, storage)
        second = CheckpointAgent(Path(folder), str(storage), node=NODE.replace(rank=1))
        nodes = Nodes(ranks, second, storage)
        for module in (generation, generation_storage):
            monkeypatch.setattr(module, "find_storage", lambda: nodes.link)
        try:
            yield nodes
        finally:
            second.close()


def test_all_nodes_that_have_it_load_it(nodes: Nodes):
    nodes.know(FOLDER)
    with nodes.restoring() as loaded:
        assert loaded.result(WITHIN) == [5, 5]
    assert not any(one.waits for one in nodes.ranks.agent.searches)


def test_it_is_waited_for_and_the_node_is_named(nodes: Nodes):
    nodes.know(FOLDER)
    away = nodes.storage.rename(nodes.storage.with_name("unmounted"))
    with nodes.restoring() as loaded:
        report = nodes.waits()
        assert not loaded.done()
        away.rename(nodes.storage)
        assert loaded.result(WITHIN) == [5, 5]
    assert report.lookup is not None
    assert (report.lookup.storage, report.lookup.stored, report.lookup.in_storage) == (StorageFinding.LACKS, 5, None)
    assert report.source is RestoreSource.NOTHING
    assert report.lookup.problem.startswith(f"node 1: {nodes.storage} has no {FOLDER}, which node 0 has")


def test_a_storage_that_fails_there_is_named_with_its_error(nodes: Nodes, monkeypatch: pytest.MonkeyPatch):
    nodes.know(FOLDER)
    names, fails = Storage.names, threading.Event()
    fails.set()

    def failing(storage: Storage, folder: str) -> set[str]:
        if fails.is_set() and storage.url == str(nodes.storage):
            raise PermissionError("the credentials have expired")
        return names(storage, folder)

    monkeypatch.setattr(Storage, "names", failing)
    with nodes.restoring() as loaded:
        report = nodes.waits()
        fails.clear()
        assert loaded.result(WITHIN) == [5, 5]
    assert report.lookup is not None
    assert report.lookup.storage is StorageFinding.AWAY
    assert report.lookup.problem == "node 1: PermissionError: the credentials have expired"


@pytest.mark.parametrize("accepted", ["older", "by a user"])
def test_a_job_that_takes_older_states_continues_without_it(nodes: Nodes, accepted: str):
    if accepted == "older":
        nodes.know(FOLDER, on_loss="older")
    else:
        nodes.know(accepts_less=True)
    shutil.rmtree(nodes.storage)
    with nodes.restoring() as loaded:
        assert loaded.result(WITHIN) == [None, None]
    report = nodes.ranks.agent.searches[-1]
    assert (report.step, report.source) == (0, RestoreSource.NOTHING)
    assert report.lookup is not None
    assert report.lookup.problem.startswith("node 1: ")


def test_a_job_that_stops_then_stops_at_once(nodes: Nodes):
    nodes.know(FOLDER, on_loss="stop")
    shutil.rmtree(nodes.storage)
    with nodes.restoring() as loaded, pytest.raises(StateLost, match="step 5 is stored and cannot be loaded: node 1"):
        loaded.result(WITHIN)
    [report] = [one for one in nodes.ranks.agent.of(CheckpointRestored) if one.restored.stops]
    assert report.restored.lookup is not None


def test_checkpoints_of_a_job_before_are_not_passed_over_where_a_node_lacks_them(nodes: Nodes):
    nodes.know()
    away = nodes.storage.rename(nodes.storage.with_name("unmounted"))
    with nodes.restoring() as loaded:
        nodes.waits()
        away.rename(nodes.storage)
        assert loaded.result(WITHIN) == [5, 5]


@pytest.mark.parametrize("node", [0, 1])
def test_a_storage_that_hangs_there_is_named_and_loaded_from_once_it_answers(
    nodes: Nodes, node: int, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(listing, "_WITHIN", 0.5)
    nodes.know(FOLDER)
    with hanging(nodes, node, monkeypatch) as storage:
        with nodes.restoring() as loaded:
            report = nodes.waits()
            assert not loaded.done()
            assert report.lookup is not None
            assert (report.lookup.storage, report.lookup.stored) == (StorageFinding.AWAY, 5)
            place = nodes.ranks.storage if node == 0 else nodes.storage
            assert report.lookup.problem.startswith(f"node {node}: OSError: {place} hangs: it has not listed")
            # It was asked several times.
            wait_for(lambda: storage.asked >= 3)
            storage.answers.set()
            assert loaded.result(WITHIN) == [5, 5]
        assert storage.calls == 1, "it takes one thread"


@pytest.mark.parametrize("on_loss", ["older", "stop"])
def test_the_job_decides_what_follows_where_the_storage_of_rank_0_hangs(
    nodes: Nodes, on_loss: str, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(listing, "_WITHIN", 0.2)
    nodes.know(FOLDER, on_loss=on_loss)
    with hanging(nodes, 0, monkeypatch), nodes.restoring() as loaded:
        if on_loss == "stop":
            with pytest.raises(StateLost, match=r"step 5 is stored and cannot be loaded: node 0: .* hangs"):
                loaded.result(WITHIN)
        else:
            assert loaded.result(WITHIN) == [None, None]


class Hanging:
    """The storage of one node does not answer until it is told to."""

    def __init__(self) -> None:
        self.answers = threading.Event()
        self.calls = 0
        self.asked = 0


@contextmanager
def hanging(nodes: Nodes, node: int, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hanging]:
    played, saved, get = Hanging(), Storage.saved, listing.Listing.get
    url = str(nodes.ranks.storage if node == 0 else nodes.storage)

    def hangs(storage: Storage, place: str) -> list[Any]:
        if storage.url == url and not played.answers.is_set():
            played.calls += 1
            played.answers.wait(WITHIN)
        return saved(storage, place)

    def counted(self: listing.Listing, place: str) -> dict[str, Any]:
        played.asked += self._storage.url == url
        return get(self, place)

    monkeypatch.setattr(Storage, "saved", hangs)
    monkeypatch.setattr(listing.Listing, "get", counted)
    try:
        yield played
    finally:
        played.answers.set()
