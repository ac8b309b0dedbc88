"""Checkpoints in storage of a world of one rank: what is stored, committed, loaded and refused; storage that fails."""

from __future__ import annotations

import contextlib
import os
import shutil
import threading
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed import TCPStore

from perdure.agent.checkpoint.connections import CheckpointSocket
from perdure.agent.checkpoint.storage import Storage
from perdure.contract import CheckpointStored, RestoreSource
from perdure_training.checkpoint import Checkpointer, Generators
from perdure_training.checkpoint.schedule import Schedule
from perdure_training.snapshots.arena import Slot, SnapshotPin
from tests.support.waiting import wait_for
from tests.training.checkpoint_agent import CheckpointAgent, checkpoint_agent
from tests.training.warm_torch import run_with_torch

WITHIN = 60.0
ONLY_TORCH = """
import sys
from pathlib import Path
import torch
import torch.distributed.checkpoint as dcp
[folder] = [path.parent for path in Path(sys.argv[1]).rglob(".metadata")]
model = torch.nn.Linear(64, 64)
state = {"model": model.state_dict(), "step": 0}
dcp.load(state, checkpoint_id=folder)
assert not any(name.startswith("perdure") for name in sys.modules)
print(state["step"], model.weight.sum().item())
"""


class AgentEnded(BaseException):
    """Not an error that is tried again: the agent's thread ends, and with it the connection."""


class Site:
    """One rank in one generation after another, its agent, and a storage."""

    def __init__(self, folder: Path, agent: CheckpointAgent, monkeypatch: pytest.MonkeyPatch) -> None:
        self.storage = folder / "storage"
        self.memory = folder / "memory"
        self.agent = agent
        self._set = monkeypatch.setenv
        variables = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
        identity = {"PERDURE_MEMORY_DIR": str(self.memory), "PERDURE_RUN_ID": "run", "TORCHELASTIC_RUN_ID": "run"}
        for name, value in (variables | identity | agent.environment).items():
            self._set(name, value)
        self._store: TCPStore | None = None

    def begin(self, state: dict[str, Any], *, lose_memory: bool = False) -> tuple[Checkpointer, int | None]:
        """Begins the next generation, and restores."""
        if lose_memory:
            shutil.rmtree(self.memory)
        self.agent.begin(self.agent.generation + 1)
        self._store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self._set("PERDURE_STORE", f"127.0.0.1:{self._store.port}")
        self._set("PERDURE_GENERATION", str(self.agent.generation))
        checkpointer = Checkpointer(every=1)
        return checkpointer, checkpointer.restore(state)

    @property
    def folders(self) -> list[Path]:
        """The committed checkpoints, the latest first."""
        storage = Storage(str(self.storage))
        return [self.storage / one.folder for one in storage.saved("") if storage.is_committed(one)]


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Site]:
    with checkpoint_agent(tmp_path / "storage", every=1000, keep_last=2) as agent:
        yield Site(tmp_path, agent, monkeypatch)


@pytest.fixture(autouse=True)
def same_generators() -> Iterator[None]:
    before = Generators().state_dict()
    yield
    Generators().load_state_dict(before)


def trained(seed: int = 1, *, steps: int = 0) -> dict[str, Any]:
    torch.manual_seed(seed)
    model = nn.Linear(64, 64)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.randn(4, 64)).square().mean().backward()
        optimizer.step()
    return {"model": model, "optimizer": optimizer, "random": Generators(), "step": steps}


def durable(checkpointer: Checkpointer, step: int, state: dict[str, Any]) -> bool:
    assert checkpointer.save(step, state, durable=True)
    return checkpointer.wait_until_durable(WITHIN)


def flip(path: Path, at: int) -> None:
    with path.open("r+b") as file:
        file.seek(at)
        [byte] = file.read(1)
        file.seek(at)
        file.write(bytes([byte ^ 1]))


def test_a_checkpoint_is_loaded_after_memory_was_lost_as_if_nothing_had_happened(site: Site):
    state = trained(steps=3)
    checkpointer, step = site.begin(state)
    assert step is None
    assert durable(checkpointer, 3, state)
    expected = torch.rand(3)
    again = trained(seed=2)
    _, step = site.begin(again, lose_memory=True)
    assert (step, again["step"]) == (3, 3)
    assert torch.equal(torch.rand(3), expected), "the generators continue"
    for one, other in zip(state["model"].parameters(), again["model"].parameters(), strict=True):
        assert torch.equal(one, other)
    moments, found = (one["optimizer"].state_dict() for one in (state, again))
    assert found["param_groups"] == moments["param_groups"]
    for number, moment in moments["state"].items():
        for name, value in moment.items():
            assert torch.equal(found["state"][number][name], value), name
    [report] = wait_for(lambda: site.agent.restores)
    assert (report.step, report.source) == (3, RestoreSource.STORAGE)
    assert site.agent.saving == [1, 2]


def test_a_scheduler_of_functions_continues_from_storage(site: Site):
    def scheduled(steps: int) -> dict[str, Any]:
        optimizer = torch.optim.SGD(torch.nn.Linear(2, 2).parameters(), lr=1.0)
        # What it saves of functions is empty.
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, partial(pow, 0.5))
        for _ in range(steps):
            optimizer.step()
            scheduler.step()
        return {"scheduler": scheduler, "step": steps}

    state = scheduled(3)
    checkpointer, _ = site.begin(state)
    assert durable(checkpointer, 3, state)
    again = scheduled(0)
    assert site.begin(again, lose_memory=True)[1] == 3
    assert again["scheduler"].get_last_lr() == [0.125]


def test_an_optimizer_is_as_new_where_nothing_is_loaded(site: Site):
    """Else its bias correction, and so each parameter, would differ from those of a job without storage."""
    state = trained()
    _, step = site.begin(state)
    assert step is None
    assert not state["optimizer"].state


def test_memory_comes_before_storage(site: Site):
    state = trained(steps=1)
    checkpointer, _ = site.begin(state)
    assert durable(checkpointer, 1, state)
    checkpointer.save(2, state)
    checkpointer.flush()
    assert site.begin(trained())[1] == 2
    wait_for(lambda: [one.source for one in site.agent.restores] == [RestoreSource.MEMORY])


@pytest.mark.usefixtures("ranks")
def test_a_script_that_has_only_torch_loads_it(site: Site, tmp_path: Path):
    state = trained(steps=2)
    state["model"] = nn.Linear(64, 64)
    checkpointer, _ = site.begin(state)
    assert durable(checkpointer, 2, state)
    script = tmp_path / "loads.py"
    script.write_text(ONLY_TORCH)
    [run] = run_with_torch([str(script), str(site.storage)], environments=[os.environ], folder=tmp_path)
    assert run.returncode == 0, run.stderr
    step, total = run.stdout.split()
    assert (int(step), float(total)) == (2, state["model"].weight.sum().item())


@pytest.mark.parametrize("file", ["__0_0.distcp", ".metadata", "perdure-0.json"])
def test_a_damaged_checkpoint_is_passed_over_with_the_damage_named(
    site: Site, caplog: pytest.LogCaptureFixture, file: str
):
    state = trained(steps=1)
    checkpointer, _ = site.begin(state)
    for step in (1, 2):
        state["step"] = step
        assert durable(checkpointer, step, state)
    flip(site.folders[0] / file, 100 if file != "perdure-0.json" else 0)
    assert site.begin(trained(), lose_memory=True)[1] == 1
    assert "step 2 in storage is not loaded" in caplog.text
    assert file in caplog.text


def test_a_torn_checkpoint_is_passed_over(site: Site, caplog: pytest.LogCaptureFixture):
    state = trained(steps=1)
    checkpointer, _ = site.begin(state)
    for step in (1, 2):
        assert durable(checkpointer, step, state)
    os.truncate(site.folders[0] / "__0_0.distcp", 1000)
    assert site.begin(trained(), lose_memory=True)[1] == 1
    assert "1,000 bytes" in caplog.text


@pytest.mark.parametrize("method", ["names", "pieces", "read", "sizes"])
def test_a_storage_that_is_away_while_it_is_read_is_waited_for(
    site: Site, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, method: str
):
    state = trained(steps=1)
    checkpointer, _ = site.begin(state)
    for step in (1, 2):
        assert durable(checkpointer, step, state)
    works, calls = getattr(Storage, method), iter(range(100))

    def fails_at_first(storage: Storage, *arguments: Any, **options: Any) -> Any:
        # Old checkpoints are deleted by another thread.
        if threading.current_thread().name in ("checkpoint", "storage-read") and next(calls) == 0:
            raise ConnectionError("the storage is away")
        return works(storage, *arguments, **options)

    monkeypatch.setattr(Storage, method, fails_at_first)
    assert site.begin(trained(), lose_memory=True)[1] == 2
    assert "waits for the storage of checkpoints: ConnectionError: the storage is away" in caplog.text


def test_what_was_never_committed_is_no_checkpoint(site: Site):
    state = trained(steps=1)
    checkpointer, _ = site.begin(state)
    assert durable(checkpointer, 1, state)
    site.agent.commits = False
    checkpointer.save(2, state, durable=True)
    [_, stored] = wait_for(lambda: (found := site.agent.of(CheckpointStored))[1:] and found)
    folder = site.storage / stored.stored.checkpoint.folder
    assert (folder / "__0_0.distcp").exists()
    assert not (folder / ".metadata").exists()
    assert site.begin(trained(), lose_memory=True)[1] == 1


def test_the_last_ones_are_kept(site: Site):
    state = trained(steps=1)
    checkpointer, _ = site.begin(state)
    for step in (1, 2, 3, 4):
        assert durable(checkpointer, step, state)
    wait_for(lambda: sorted(path.name for path in site.storage.iterdir()) == ["step-3-run-1", "step-4-run-1"])


def test_a_hundred_saves_in_a_row_are_more_than_the_storage_takes_and_what_it_took_is_whole(site: Site):
    state = trained(steps=1)
    checkpointer, _ = site.begin(state)
    for step in range(1, 101):
        state["step"] = step
        checkpointer.save(step, state, durable=True)
    checkpointer.flush()
    checkpointer.wait_until_durable(WITHIN)
    assert not site.agent.problems
    again = trained(seed=2)
    newest = site.begin(again, lose_memory=True)[1]
    assert newest is not None
    assert again["step"] == newest
    assert len(site.folders) <= 2


def test_a_snapshot_that_is_damaged_in_memory_is_not_stored(site: Site, monkeypatch: pytest.MonkeyPatch):
    state = trained(steps=1)
    checkpointer, _ = site.begin(state)
    pin = Slot.pin

    def flip_and_pin(slot: Slot) -> SnapshotPin:
        flip(slot.path, 5000)
        return pin(slot)

    monkeypatch.setattr(Slot, "pin", flip_and_pin)
    assert not durable(checkpointer, 1, state)
    # The rank is answered before the report has passed through the agent's event loop.
    [problem] = wait_for(lambda: site.agent.problems)
    assert "damaged in memory" in problem
    assert site.folders == []


def test_a_storage_that_fails_for_a_while_is_tried_again_and_training_continues(
    site: Site, monkeypatch: pytest.MonkeyPatch
):
    full = threading.Event()
    full.set()
    write = Storage.write

    def fails(storage: Storage, path: str, pieces: Any) -> tuple[int, int]:
        if full.is_set():
            raise OSError(28, "No space left on device")
        return write(storage, path, pieces)

    monkeypatch.setattr(Storage, "write", fails)
    state = trained(steps=1)
    checkpointer, _ = site.begin(state)
    assert checkpointer.save(1, state, durable=True)
    wait_for(lambda: site.agent.problems)
    assert "No space left on device" in site.agent.problems[0]
    # Snapshots continue beside the one that is kept for the storage.
    for step in range(2, 12):
        assert checkpointer.save(step, state)
        checkpointer.flush()
    full.clear()
    assert checkpointer.wait_until_durable(WITHIN)
    [folder] = site.folders
    assert folder.name == "step-1-run-1"
    assert site.begin(trained(), lose_memory=True)[1] == 1


def test_an_agent_that_ends_meanwhile_is_given_the_snapshot_again(site: Site, monkeypatch: pytest.MonkeyPatch):
    entered, released = threading.Event(), threading.Event()
    write = Storage.write

    def dies(storage: Storage, path: str, pieces: Any) -> tuple[int, int]:
        if not released.is_set():
            entered.set()
            released.wait(WITHIN)
            raise AgentEnded
        return write(storage, path, pieces)

    def serve_until_it_ends(*arguments: Any) -> None:
        # The connection is closed by then, without an answer.
        with contextlib.suppress(AgentEnded):
            serve(*arguments)

    serve = CheckpointSocket._serve
    monkeypatch.setattr(CheckpointSocket, "_serve", serve_until_it_ends)
    monkeypatch.setattr(Storage, "write", dies)
    state = trained(steps=1)
    checkpointer, _ = site.begin(state)
    assert checkpointer.save(1, state, durable=True)
    assert entered.wait(WITHIN)
    site.agent.start()
    released.set()
    assert checkpointer.wait_until_durable(WITHIN)
    assert site.begin(trained(), lose_memory=True)[1] == 1


def test_a_part_of_a_world_that_is_over_is_refused(site: Site, caplog: pytest.LogCaptureFixture):
    state = trained(steps=1)
    checkpointer, _ = site.begin(state)
    site.agent.begin(7)
    assert not durable(checkpointer, 1, state)
    assert "generation 1 is over" in caplog.text
    assert not site.storage.exists()


def test_a_requested_checkpoint_is_made_at_one_of_the_next_steps(site: Site):
    state = trained(steps=1)
    checkpointer, _ = site.begin(state)
    checkpointer.save(1, state)
    site.agent.request_checkpoint(1)
    for step in range(2, 9):
        checkpointer.save(step, state)
        checkpointer.flush()
    assert checkpointer.wait_until_durable(WITHIN)
    [folder] = site.folders
    assert folder.name == "step-4-run-1"


def test_a_scheduled_checkpoint_does_not_answer_a_later_request(site: Site):
    state = trained(steps=1)
    checkpointer, _ = site.begin(state)
    checkpointer.save(1, state)
    assert checkpointer.save(2, state, durable=True)
    assert checkpointer.wait_until_durable(WITHIN)
    site.agent.request_checkpoint(1)
    for step in range(3, 9):
        checkpointer.save(step, state)
        checkpointer.flush()
    assert checkpointer.wait_until_durable(WITHIN)
    found = wait_for(lambda: (stored := site.agent.of(CheckpointStored))[1:] and stored)
    assert [one.stored.answers for one in found] == [0, 1]


def test_a_request_that_its_world_did_not_answer_is_answered_by_the_next_one(site: Site):
    state = trained(steps=1)
    site.begin(state)
    site.agent.request_checkpoint(1)
    checkpointer, _ = site.begin(state)
    for step in range(2, 9):
        checkpointer.save(step, state)
        checkpointer.flush()
    assert checkpointer.wait_until_durable(WITHIN)
    [stored] = site.agent.of(CheckpointStored)
    assert (stored.stored.answers, stored.stored.checkpoint.generation) == (1, 2)


def test_a_request_is_tried_again_after_a_while_until_one_is_durable():
    now = 0.0
    schedule = Schedule(every_steps=None, every_seconds=10_000, clock=lambda: now)
    desired = {"request": 1}
    assert schedule.next_target(1, every=1, desired=desired) == 3
    assert schedule.next_target(4, every=1, desired=desired) is None
    now = 31.0
    assert schedule.next_target(5, every=1, desired=desired) == 7
    assert [schedule.answers(step) for step in (2, 3, 7)] == [0, 1, 1]
    schedule.finish(schedule.answers(7))
    now = 70.0
    assert schedule.next_target(8, every=1, desired=desired) is None


def test_a_request_that_an_earlier_world_answered_is_not_due_again():
    schedule = Schedule(every_steps=None, every_seconds=10_000)
    assert schedule.next_target(1, every=1, desired={"request": 2, "answered": 2}) is None


def test_another_state_is_refused_with_both_names(site: Site):
    state = trained(steps=1)
    checkpointer, _ = site.begin(state)
    assert durable(checkpointer, 1, state)
    with pytest.raises(KeyError, match=r"the checkpoint has \['model', .*\], the state has \['weights'\]"):
        site.begin({"weights": nn.Linear(2, 2)}, lose_memory=True)
    with pytest.raises(KeyError, match="Size mismatch"):
        site.begin(trained() | {"model": nn.Linear(2, 2)}, lose_memory=True)


def test_without_a_storage_nothing_is_stored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    with checkpoint_agent(tmp_path / "storage") as agent:
        agent.checkpoints._storage = agent.checkpoints._spec = None
        site = Site(tmp_path, agent, monkeypatch)
        state = trained(steps=1)
        checkpointer, step = site.begin(state)
        assert step is None
        assert checkpointer.save(1, state, durable=True)
        assert not checkpointer.wait_until_durable(1)
        assert not site.storage.exists()


@pytest.mark.parametrize("every", [1, 3])
def test_steps_are_announced_ahead_and_stored_at_their_multiples(every: int):
    schedule = Schedule(every_steps=30, every_seconds=None)
    targets = [(step, schedule.next_target(step, every=every, desired={})) for step in range(every, 100, every)]
    announced = [(step, target) for step, target in targets if target is not None]
    assert [target for _, target in announced] == [30, 60, 90]
    assert all(2 <= target - step <= 2 + every for step, target in announced)


def test_the_time_between_two_is_the_jobs_where_it_chooses():
    now = 0.0
    schedule = Schedule(every_steps=None, every_seconds=None, clock=lambda: now)
    assert schedule.next_target(10, every=5, desired={"interval_s": 100.0}) is None
    now = 99.0
    assert schedule.next_target(15, every=5, desired={"interval_s": 100.0}) is None
    now = 101.0
    assert schedule.next_target(20, every=5, desired={"interval_s": 100.0}) == 25
    assert schedule.next_target(25, every=5, desired={"interval_s": 100.0}) is None
    assert schedule.next_target(30, every=5, desired={"interval_s": 100.0, "request": 1}) == 35


def test_an_optimizer_that_had_made_no_step_is_new_after_a_restore(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    with checkpoint_agent(tmp_path / "storage", every=1000) as agent:
        site = Site(tmp_path, agent, monkeypatch)
        state = trained()
        checkpointer, _ = site.begin(state)
        state["optimizer"].state.clear()
        assert checkpointer.save(1, state, durable=True)
        assert checkpointer.wait_until_durable(WITHIN)
        weights = state["model"].weight.detach().clone()
        state = trained()
        assert site.begin(state, lose_memory=True)[1] == 1
        assert not state["optimizer"].state
        assert torch.equal(state["model"].weight, weights)


def test_the_best_checkpoint_by_a_metric_is_kept_and_the_newest_is_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    best = {"metric": "accuracy", "mode": "max"}
    with checkpoint_agent(tmp_path / "storage", every=1000, keep_last=1, keep_best=best) as agent:
        site = Site(tmp_path, agent, monkeypatch)
        state = trained()
        checkpointer, _ = site.begin(state)
        # An evaluation that failed, and steps without one, are none of the best.
        measured = {1: 0.2, 2: 0.9, 3: float("nan"), 4: 0.5, 5: None}
        for step, accuracy in measured.items():
            state["step"] = step
            metrics = {} if accuracy is None else {"accuracy": accuracy, "loss": 1.0}
            assert checkpointer.save(step, state, durable=True, metrics=metrics)
            assert checkpointer.wait_until_durable(WITHIN)
        kept = wait_for(lambda: (found := [one.name.split("-")[1] for one in site.folders]) == ["5", "2"] and found)
        assert kept
        # The next agent knows the metrics by what is in the storage.
        agent.start()
        state["step"] = 6
        assert checkpointer.save(6, state, durable=True, metrics={"accuracy": 0.8})
        assert checkpointer.wait_until_durable(WITHIN)
        assert wait_for(lambda: [one.name.split("-")[1] for one in site.folders] == ["6", "2"])
        assert site.begin(state, lose_memory=True)[1] == 6
